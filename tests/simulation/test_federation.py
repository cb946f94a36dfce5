"""A run from its settings to its folder, on an in-process grid, and what is written down about it."""

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from grid import SMALL, LocalGrid

import clients
import strategies
from fedivon_flwr.cli import make_settings
from fedivon_flwr.data import load
from fedivon_flwr.errors import UserError
from fedivon_flwr.metrics import score
from fedivon_flwr.runs import RunFolder, draws_done, load_arrays, to_json
from fedivon_flwr.settings import Settings, flatten
from simulation import federation
from simulation.federation import clients_scores, run
from simulation.presets import PRESETS
from strategies.base import draw


def settings(path: Path, **changes: Any) -> Settings:
    return Settings.from_config({**SMALL, "run-dir": str(path), **changes})


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_run_writes_all_that_it_promises(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "run")
    run(LocalGrid(chosen.to_config(), chosen.clients), chosen)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary) == {
        *("method", "dataset", "seed", "rounds", "clients", "settings", "versions", "seconds", "metrics")
    }
    assert set(summary["metrics"]["mean"]) == {"accuracy", "ece", "nll", "brier"}
    assert summary["metrics"]["mc"]["samples"] == 3
    found = rows(tmp_path / "run")
    assert [row["round"] for row in found] == [1, 2, 3, 4]
    for row in found:
        assert {"round", "train_loss", "seconds", "bytes_up", "bytes_down", "replies", "refused"} <= set(row)
        assert ("mean" in row) == (row["round"] % 2 == 0)
        assert row["bytes_up"] == row["bytes_down"] > 0
    assert (tmp_path / "run" / "report.md").exists()
    assert "run-dir" not in summary["settings"]


def test_personal_models_are_scored_client_by_client(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "run", personal=True, **{"unseen-clients": 2, "partitioner": "classes"})
    run(LocalGrid(chosen.to_config(), chosen.clients), chosen)
    found = people(tmp_path / "run")
    parts = clients.split("digits", clients.partition_spec(chosen))
    assert [row["client"] for row in found] == [0, 1, 2, 3, 4, 5]
    assert [row["seen"] for row in found] == [True] * 4 + [False] * 2
    assert [row["examples"] for row in found] == [len(part) for part in parts]
    data = load("digits")
    for row, part in zip(found, parts, strict=True):
        assert row["test_examples"] == np.isin(data.test.y, data.train.y[part]).sum() < len(data.test)
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    for name, some in (("personal", found[:4]), ("unseen", found[4:])):
        assert metrics[name]["clients"] == len(some)
        for at in ("mean", "mc"):  # however many examples a client has
            assert metrics[name][at]["nll"] == pytest.approx(np.mean([row[at]["nll"] for row in some]))
        assert metrics[name]["global"]["accuracy"] == pytest.approx(
            np.mean([row["global"]["mean"]["accuracy"] for row in some])
        )
    assert metrics["personal"]["mc"]["samples"] == 3
    report = (tmp_path / "run" / "report.md").read_text()
    assert "FedIvon, personal@mean" in report
    assert "personal.png" in report
    assert "| push | start | import | load | train | reply | the rest | a round |" in report
    assert (tmp_path / "run" / "personal.png").stat().st_size > 5000


@pytest.mark.parametrize("method", ["pfedbayes", "fedper", "pfedvem"])
def test_a_run_with_memory_goes_on_from_a_checkpoint_to_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Killed two rounds after a checkpoint, with new processes afterwards: the nodes' disks have what is needed."""
    changes = {"method": method, "personal": True, "rounds": 9, "checkpoint-every": 2, "clients-per-round": 2}
    whole, broken = (settings(tmp_path / name, **changes) for name in ("whole", "broken"))
    run(LocalGrid(whole.to_config(), whole.clients), whole)

    def kill(folder: RunFolder, row: Any) -> None:
        if row["round"] == 7:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append_metrics", kill)
        with pytest.raises(KeyboardInterrupt):
            run(LocalGrid(broken.to_config(), broken.clients), broken)
    run(LocalGrid(broken.to_config(), broken.clients), broken)
    one, other = (load_arrays(tmp_path / name / "posterior.safetensors")[0] for name in ("whole", "broken"))
    for key in one:
        np.testing.assert_array_equal(one[key], other[key])
    assert people(tmp_path / "whole") == people(tmp_path / "broken")


def people(path: Path) -> list[dict[str, Any]]:
    """The clients' scores without the seconds that they took."""
    found = [json.loads(line) for line in (path / "clients.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("seconds", "timeline")} for row in found]


def test_a_client_that_failed_is_asked_again(tmp_path: Path) -> None:
    """Nothing is averaged over the others only: without the client the run does not end."""
    failures = federation.TRIES

    class Grid(LocalGrid):
        def _deliver(self, message: Message) -> Iterable[Message]:
            nonlocal failures
            replies = super()._deliver(message)
            if message.metadata.message_type == "evaluate" and self.asked[-1][2] == 3 and failures:
                failures -= 1
                return []
            return replies

    chosen = settings(tmp_path / "run", personal=True)
    with pytest.raises(UserError, match=r"1 of 6 clients .*\(3\).* asks them again"):
        run(Grid(chosen.to_config(), chosen.clients), chosen)
    assert not (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "posterior.safetensors").exists()  # the training is done
    failures = 1
    run(Grid(chosen.to_config(), chosen.clients), chosen)
    assert [row["client"] for row in people(tmp_path / "run")] == [0, 1, 2, 4, 5, 3]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"]["personal"]["clients"] == 6


def test_nodes_that_are_not_back_yet_are_waited_for(tmp_path: Path) -> None:
    """A run that goes on after its last round has not asked anybody yet: its nodes may still be connecting."""

    class Grid(LocalGrid):
        away = 0

        def get_node_ids(self) -> Iterable[int]:
            self.away -= 1
            return [] if self.away >= 0 else super().get_node_ids()

    class Broken(LocalGrid):
        def _deliver(self, message: Message) -> Iterable[Message]:
            return [] if message.metadata.message_type == "evaluate" else super()._deliver(message)

    chosen = settings(tmp_path / "run", personal=True, **{"node-wait": 5.0})
    grid = Grid(chosen.to_config(), chosen.clients)
    with pytest.raises(UserError, match="6 of 6 clients gave no scores"):
        run(Broken(chosen.to_config(), chosen.clients), chosen)
    grid.away = 10**9
    with pytest.raises(UserError, match=r"No node is connected after 0\.1 s"):
        run(grid, chosen.model_copy(update={"node_wait": 0.1}))
    assert not (tmp_path / "run" / "summary.json").exists()
    grid.away = 2
    run(grid, chosen)
    assert [row["client"] for row in people(tmp_path / "run")] == [0, 1, 2, 3, 4, 5]


def test_odd_scores_of_a_personal_model_are_asked_for_again(tmp_path: Path) -> None:
    odd = 1

    class Grid(LocalGrid):
        def _deliver(self, message: Message) -> Iterable[Message]:
            nonlocal odd
            replies = list(super()._deliver(message))
            if message.metadata.message_type == "evaluate" and self.asked[-1][2] == 3 and odd:
                odd -= 1
                replies[0].content.metric_records["metrics"]["train-examples"] = 0
            elif message.metadata.message_type == "evaluate":
                replies[0].content.metric_records["metrics"]["train"] = 1  # of another version: passed over
            return replies

    chosen = settings(tmp_path / "run", personal=True)
    run(Grid(chosen.to_config(), chosen.clients), chosen)
    assert [row["client"] for row in people(tmp_path / "run")] == [0, 1, 2, 4, 5, 3]


def test_a_node_without_test_data_holds_nobody_up(tmp_path: Path) -> None:
    data = load("digits")
    for node, images in enumerate((30, 20, 0)):
        own: dict[str, Any] = {"x_train": data.train.x[node::3], "y_train": data.train.y[node::3]}
        if images:
            own |= {"x_test": data.test.x[:images], "y_test": data.test.y[:images]}
        np.savez(tmp_path / f"{node}.npz", **own)
    common = {"dataset": "nodes", "input-shape": "1x8x8", "classes": 10, "evaluation": "clients", "clients": 3}
    chosen = settings(tmp_path / "run", personal=True, **common)
    grid = LocalGrid(chosen.to_config(), 3)
    grid.node_config = lambda partition: {"data": str(tmp_path / f"{partition}.npz")}
    run(grid, chosen)
    found = people(tmp_path / "run")
    assert [row["test_examples"] for row in found] == [30, 20, 0]
    assert [row["examples"] for row in found] == [479] * 3
    assert ["mean" in row for row in found] == [True, True, False]
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert metrics["personal"]["clients"] == 2
    assert metrics["personal"]["mean"]["nll"] == pytest.approx(np.mean([row["mean"]["nll"] for row in found[:2]]))


def test_an_infinite_strength_is_written_down(tmp_path: Path) -> None:
    """JSON has no infinity, but the run must be found again."""
    chosen = strategies.complete(settings(tmp_path / "run", **{"fedivon.temperature": float("inf")}))
    run(LocalGrid(chosen.to_config(), chosen.clients), chosen)
    again = LocalGrid(chosen.to_config(), chosen.clients)
    run(again, chosen)
    assert again.clients() == []
    saved = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert strategies.complete(Settings.from_config(saved)).identity() == chosen.identity()


def test_personal_models_that_were_interrupted_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"method": "local", "personal": True, "clients-per-round": 2}
    whole, broken = (settings(tmp_path / name, **changes) for name in ("whole", "broken"))
    run(LocalGrid(whole.to_config(), whole.clients), whole)
    append = RunFolder.append_client

    def kill(folder: RunFolder, row: Any) -> None:
        append(folder, row)
        if row["client"] == 2:
            with (folder.path / "clients.jsonl").open("a") as file:
                file.write('{"client": 3, "se')  # in the middle of a line
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append_client", kill)
        with pytest.raises(KeyboardInterrupt):
            run(LocalGrid(broken.to_config(), broken.clients), broken)
    grid = LocalGrid(broken.to_config(), broken.clients)
    run(grid, broken)
    assert sorted(who for _, who in grid.clients("evaluate")) == [3, 4, 5]
    assert people(tmp_path / "broken") == people(tmp_path / "whole")
    metrics = json.loads((tmp_path / "broken" / "summary.json").read_text())["metrics"]
    assert set(metrics) == {"personal"}  # no global model
    assert not (tmp_path / "broken" / "state").exists()


def test_the_predictions_of_the_test_set_are_kept(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "run")
    run(LocalGrid(chosen.to_config(), chosen.clients), chosen)
    kept, about = load_arrays(tmp_path / "run" / "predictions.safetensors")
    assert about["samples"] == 3
    assert kept["labels"].tolist() == load("digits").test.y.tolist()
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    labels = torch.from_numpy(kept["labels"])
    for at in ("mean", "mc"):
        found = score(torch.from_numpy(kept[at]), labels).as_dict()
        assert found == {key: metrics[at][key] for key in found}


def test_a_final_evaluation_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after the third of seven weight samples: these are not drawn through the network again."""
    monkeypatch.setattr(federation, "EVALUATION_SECONDS", 0.0)
    whole = settings(tmp_path / "whole", **{"test-samples": 7})
    run(LocalGrid(whole.to_config(), whole.clients), whole)
    assert draws_done(tmp_path / "whole") == 0

    chosen, save = settings(tmp_path / "run", **{"test-samples": 7}), RunFolder.save_evaluation

    def stop(folder: RunFolder, draws: int, *more: Any) -> None:
        save(folder, draws, *more)
        if draws == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_evaluation", stop)
        with pytest.raises(KeyboardInterrupt):
            run(LocalGrid(chosen.to_config(), chosen.clients), chosen)
    assert draws_done(tmp_path / "run") == 3
    assert not (tmp_path / "run" / "summary.json").exists()
    seen: list[int] = []
    monkeypatch.setattr(RunFolder, "save_evaluation", lambda _, draws, *__: seen.append(draws))
    run(LocalGrid(chosen.to_config(), chosen.clients), chosen)
    assert seen == [4, 5, 6, 7]
    ours, theirs = (load_arrays(tmp_path / name / "predictions.safetensors")[0] for name in ("run", "whole"))
    assert np.array_equal(ours["mc"], theirs["mc"])


def test_evaluation_on_the_nodes_ends_up_in_the_summary(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "run", evaluation="clients", **{"fedivon.ess": "local"})
    run(LocalGrid(chosen.to_config(), chosen.clients), chosen)
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert 0 <= metrics["mean"]["accuracy"] <= 1
    assert metrics["mc"]["samples"] == chosen.test_samples == 3
    assert rows(tmp_path / "run")[-1]["clients"]["mc"]["nll"] == metrics["mc"]["nll"]


def test_an_evaluation_that_is_missing_is_no_final_one(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "run", evaluation="clients")
    scores = {"mean": {"nll": 1.0}, "mc": {"nll": 0.9}}
    rounds: list[dict[str, Any]] = [{"round": 2, "clients": scores}, {"round": chosen.rounds}]
    assert clients_scores(rounds, chosen)["mc"] == {"nll": 0.9, "samples": chosen.eval_samples}
    rounds[1]["clients"] = scores
    assert clients_scores(rounds, chosen)["mc"] == {"nll": 0.9, "samples": chosen.test_samples}
    assert clients_scores([], chosen) == {}


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra 'tensorboard' is not installed")
    chosen = settings(tmp_path / "run", tensorboard=True)
    run(LocalGrid(chosen.to_config(), chosen.clients), chosen)
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize("method", strategies.STRATEGIES.names())
@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_what_flower_makes_of_the_config_is_what_we_sent(preset: str, method: str, tmp_path: Path) -> None:
    """``flwr run`` fills in the defaults of pyproject.toml: no option may be left to it."""
    ours = make_settings(preset, [], method=method, run_dir=str(tmp_path / "run"))
    defaults = dict(flatten(tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"]))
    fused = strategies.complete(Settings.from_config(defaults | ours.to_config()))
    assert fused == ours
    assert {key for key in ours.to_config() if "." in key} == {
        f"{method}.{key}" for key in strategies.STRATEGIES[method].options_type().model_dump(by_alias=True)
    }


def test_who_is_away_changes_nothing_for_the_others() -> None:
    for server_round in range(1, 50):
        everyone = draw(range(30), 6, seed=3, server_round=server_round)
        away = min(set(range(30)) - everyone)
        assert draw([c for c in range(30) if c != away], 6, seed=3, server_round=server_round) == everyone
        taken = min(everyone)
        without = draw([c for c in range(30) if c != taken], 6, seed=3, server_round=server_round)
        assert everyone - {taken} < without


def test_every_client_is_drawn_equally_often_and_not_to_evaluate_what_it_trained() -> None:
    counts = np.zeros(20)
    for server_round in range(2000):
        counts[list(draw(range(20), 5, 0, server_round))] += 1
    assert abs(counts - 500).max() < 5 * np.sqrt(2000 * 0.25 * 0.75)
    assert any(draw(range(20), 5, 0, r, "train") != draw(range(20), 5, 0, r, "evaluate") for r in range(3))


def test_a_run_that_gets_nowhere_ends_with_a_sentence(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "run", **{"fedivon.lr": 1e30, "fedivon.lr-final": 1e30})
    with pytest.raises(UserError, match=r"No reply could be used in 1 round"):
        run(LocalGrid(chosen.to_config(), chosen.clients), chosen)
    assert not (tmp_path / "run" / "summary.json").exists()


def test_json_is_valid_whatever_the_numbers() -> None:
    text = to_json({"a": float("nan"), "b": [1.0, float("inf")], "c": {"d": (2, float("-inf"))}})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [1.0, None], "c": {"d": [2, None]}}
