"""What a node remembers: between messages, over a restart of the node, and when a run goes on from a checkpoint."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

from fedivon_flwr.errors import UserError
from fedivon_flwr.records import NDArrays
from fedivon_flwr.runs import KEPT_CHECKPOINTS
from fedivon_flwr.state import NodeState, state_folder


def memory(value: float) -> NDArrays:
    return {"mean/w": np.full((2, 3), value, np.float32), "precision": np.array(value, np.float64)}


def value(arrays: NDArrays) -> float | None:
    return float(arrays["precision"]) if arrays else None


def node(folder: Path, context: RecordDict | None = None, run: str = "run", client: str = "client-3") -> NodeState:
    """A node; without a context, one that has just been started."""
    return NodeState.of(RecordDict() if context is None else context, str(folder), run, client)


def test_nothing_is_remembered_at_first(tmp_path: Path) -> None:
    assert node(tmp_path).before(1) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("run", ["run", ""])
def test_a_node_remembers_in_its_context(tmp_path: Path, run: str) -> None:
    context = RecordDict()
    context["another app's"] = ConfigRecord({"x": 1})
    node(tmp_path, context, run).keep(4, memory(7))
    for name, array in node(tmp_path / "elsewhere", context, run).before(5).items():
        assert np.array_equal(array, memory(7)[name])
        assert array.dtype == memory(7)[name].dtype
    assert context.config_records["another app's"] == {"x": 1}
    assert any(tmp_path.iterdir()) == bool(run)  # a run without a name leaves nothing on disk


def test_a_restarted_node_remembers(tmp_path: Path) -> None:
    node(tmp_path).keep(4, memory(7))
    assert value(node(tmp_path).before(5)) == 7
    assert node(tmp_path, run="other").before(5) == {}
    assert node(tmp_path, client="client-4").before(5) == {}


def test_another_run_in_the_same_context_begins_anew(tmp_path: Path) -> None:
    context = RecordDict()
    node(tmp_path, context).keep(4, memory(7))
    assert node(tmp_path, context, run="other").before(5) == {}


def test_struck_rounds_are_forgotten(tmp_path: Path) -> None:
    """The server goes on after round 4: rounds 5 to 9 will be run again, on what was there before."""
    context = RecordDict()
    for server_round in (2, 4, 6, 9):
        node(tmp_path, context).keep(server_round, memory(server_round), checkpoint_every=4)
    for state in (node(tmp_path, context), node(tmp_path)):
        assert value(state.before(10)) == 9
        assert value(state.before(5)) == 4
    node(tmp_path, context).keep(5, memory(50), checkpoint_every=4)
    assert value(node(tmp_path, context).before(6)) == 50
    assert value(node(tmp_path).before(6)) == 50


@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_struck_round_left_is_forgotten_whenever_the_node_is_asked_next(tmp_path: Path, restarted: bool) -> None:
    """The server goes on after round 5, and then the node is not asked before round 12."""
    context = RecordDict()
    for server_round in (2, 9):
        node(tmp_path, context).keep(server_round, memory(server_round), checkpoint_every=5)
    context = RecordDict() if restarted else context
    assert value(node(tmp_path, context).before(12)) == 9
    assert value(node(tmp_path, context).before(12, [5])) == 2
    node(tmp_path, context).keep(12, memory(12), checkpoint_every=5, resumptions=1)
    assert value(node(tmp_path, context).before(14, [5])) == 12
    assert value(node(tmp_path, context).before(14, [5, 12])) == 12
    assert value(node(tmp_path, context).before(14, [5, 10])) == 2


def test_a_newer_memory_on_disk_is_preferred_to_the_context(tmp_path: Path) -> None:
    context = RecordDict()
    node(tmp_path, context).keep(2, memory(2))
    node(tmp_path).keep(5, memory(5))  # while the node ran in another process
    assert value(node(tmp_path, context).before(6)) == 5


@pytest.mark.parametrize("every", [1, 3, 10])
def test_every_checkpoint_finds_its_memory_and_old_ones_go(tmp_path: Path, every: int) -> None:
    asked = [1, 2, 5, 6, 11, 12, 13, 24, 25, 39, 40, 41]
    for server_round in asked:
        node(tmp_path).keep(server_round, memory(server_round), every)
        last = (server_round - 1) // every
        for checkpoint in [each * every for each in range(max(0, last - KEPT_CHECKPOINTS + 1), last + 1)]:
            expected = max((r for r in asked if r <= checkpoint), default=None)
            assert value(node(tmp_path).before(checkpoint + 1)) == expected
    left = sorted(int(path.stem.removeprefix("round-")) for path in (tmp_path / "run" / "client-3").iterdir())
    assert left == {1: [39, 40, 41], 3: [25, 39, 40, 41], 10: [25, 39, 40, 41]}[every]


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDIVON_STATE", str(tmp_path / "a"))
    assert state_folder() == tmp_path / "a"
    assert state_folder(str(tmp_path / "b")) == tmp_path / "b"
    monkeypatch.delenv("FEDIVON_STATE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert state_folder() == tmp_path / "c" / "fedivon" / "state"


def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no name"):
        node(tmp_path, run="../../etc")


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written to .* state-dir"):
        node(tmp_path / "file").keep(1, memory(1))
