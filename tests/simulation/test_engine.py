"""The Ray engine carries every message, survives what clients do, and a killed run ends as one never killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from outcome import rounds

from fedivon_flwr.errors import UserError
from fedivon_flwr.records import from_record, to_record
from fedivon_flwr.runs import load_arrays, read_json, read_metrics
from simulation.engine import RayGrid, Resources, ray_grid

pytestmark = pytest.mark.slow

NODES = 6


def client_app() -> ClientApp:
    """A client that does what the message asks for; made in a function, so that it travels to the actors by value."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        told: Any = {key: int(context.node_config[key]) for key in ("partition-id", "num-partitions")}
        told |= {"node": context.node_id, "pid": os.getpid(), "answer": int(context.run_config["answer"])}
        return Message(RecordDict({"metrics": MetricRecord(told)}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config: Any = message.content.config_records["config"]
        state: Any = context.state
        number = context.node_config["partition-id"]
        if number in config.get("raise", []):
            raise ArithmeticError(f"node {number} cannot count")
        if number in config.get("die", []):
            os._exit(1)
        if number in config.get("sleep", []):
            time.sleep(config["seconds"])
        calls = state["calls"]["n"] + 1 if "calls" in state else 1
        state["calls"] = MetricRecord({"n": calls})
        told = MetricRecord({"calls": calls, "tag": config.get("tag", 0), "pid": os.getpid()})
        return Message(RecordDict({"metrics": told}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        arrays = from_record(message.content.array_records["arrays"])
        writeable = sum(array.flags.writeable for array in arrays.values())
        total = float(sum(array.sum(dtype=np.float64) for array in arrays.values()))
        told = MetricRecord({"writeable": int(writeable), "total": total})
        changed = to_record({key: array + 1 for key, array in arrays.items()})
        return Message(RecordDict({"arrays": changed, "metrics": told}), reply_to=message)

    return app


@pytest.fixture(scope="module")
def grid() -> Iterator[RayGrid]:
    with ray_grid(client_app(), {"answer": 42}, NODES, Resources(cpus=1.0)) as grid:
        yield grid


def ask(
    grid: RayGrid, kind: str, content: RecordDict | None = None, nodes: Iterable[int] | None = None
) -> list[Message]:
    content = content or RecordDict()
    return [Message(content, dst_node_id=node, message_type=kind) for node in nodes or grid.get_node_ids()]


def train(grid: RayGrid, timeout: float | None = 120.0, **config: Any) -> dict[int, Message]:
    """The replies of all nodes to one message, by node."""
    content = RecordDict({"config": ConfigRecord(config)})
    replies = list(grid.send_and_receive(ask(grid, MessageType.TRAIN, content), timeout=timeout))
    assert len({reply.metadata.src_node_id for reply in replies}) == len(replies)
    return {reply.metadata.src_node_id: reply for reply in replies}


def metrics(reply: Message) -> dict[str, Any]:
    assert not reply.has_error(), reply.error
    return dict(reply.content.metric_records["metrics"])


def several_actors() -> bool:
    return bool(ray.cluster_resources()["CPU"] >= 2)  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- messages


def test_every_node_answers_for_itself(grid: RayGrid) -> None:
    messages = ask(grid, MessageType.QUERY)
    replies = list(grid.send_and_receive(messages, timeout=120))
    sent = {message.metadata.dst_node_id: message.metadata.message_id for message in messages}
    assert len(set(sent.values())) == NODES
    assert {r.metadata.src_node_id: r.metadata.reply_to_message_id for r in replies} == sent
    partitions = {reply.metadata.src_node_id: metrics(reply)["partition-id"] for reply in replies}
    assert [partitions[node] for node in grid.get_node_ids()] == list(range(NODES))
    for reply in replies:
        assert metrics(reply)["node"] == reply.metadata.src_node_id
        assert (metrics(reply)["num-partitions"], metrics(reply)["answer"]) == (NODES, 42)
        assert metrics(reply)["pid"] != os.getpid()
        assert reply.metadata.message_type == MessageType.QUERY


def test_many_messages_to_one_node(grid: RayGrid) -> None:
    node = next(iter(grid.get_node_ids()))
    messages = ask(grid, MessageType.QUERY, nodes=[node] * 50)
    replies = list(grid.send_and_receive(messages, timeout=120))
    asked = [message.metadata.message_id for message in messages]
    assert [reply.metadata.reply_to_message_id for reply in replies] == asked


def test_no_messages_no_replies(grid: RayGrid) -> None:
    assert list(grid.send_and_receive([], timeout=10)) == []


@pytest.mark.parametrize("size", [10, 5_000_000 // 4])
def test_arrays_travel_unchanged_both_ways(grid: RayGrid, size: int) -> None:
    rng = np.random.default_rng(size)
    arrays = {"mean/b": rng.standard_normal(size).astype(np.float32), "mean/a": np.arange(6.0).reshape(2, 3)}
    before = {key: array.copy() for key, array in arrays.items()}
    content = RecordDict({"arrays": to_record(arrays)})
    replies = list(grid.send_and_receive(ask(grid, MessageType.EVALUATE, content), timeout=120))
    assert len(replies) == NODES
    for reply in replies:
        assert metrics(reply)["writeable"] == 0
        assert metrics(reply)["total"] == sum(array.sum(dtype=np.float64) for array in before.values())
        found = from_record(reply.content.array_records["arrays"])
        assert list(found) == ["mean/b", "mean/a"]
        for key, array in found.items():
            np.testing.assert_array_equal(array, before[key] + 1)
    for key, array in arrays.items():
        np.testing.assert_array_equal(array, before[key])


def test_arrays_of_stock_flower_travel_too(grid: RayGrid) -> None:
    content = RecordDict({"arrays": ArrayRecord([np.arange(5, dtype=np.float32)])})
    (reply, *_) = grid.send_and_receive(ask(grid, MessageType.EVALUATE, content), timeout=120)
    assert metrics(reply)["total"] == 10


def test_push_and_pull(grid: RayGrid) -> None:
    ids = list(grid.push_messages(ask(grid, MessageType.QUERY)))
    assert len(set(ids)) == NODES
    found: list[Message] = []
    give_up = time.monotonic() + 120
    while len(found) < NODES and time.monotonic() < give_up:
        found += grid.pull_messages(ids)
        time.sleep(0.02)
    assert sorted(reply.metadata.reply_to_message_id for reply in found) == sorted(ids)
    assert list(grid.pull_messages(ids)) == []  # each reply is given once
    assert list(grid.pull_messages(["no such message"])) == []


def test_state_stays_with_its_node_whichever_actor_works(grid: RayGrid) -> None:
    before = {node: metrics(reply)["calls"] for node, reply in train(grid).items()}
    pids: dict[int, set[Any]] = {node: set() for node in before}
    for more in range(1, 6):
        # A sleeping node keeps one actor busy, so that the others change places.
        replies = train(grid, sleep=[more % NODES], seconds=0.1)
        assert {node: metrics(reply)["calls"] for node, reply in replies.items()} == {
            node: calls + more for node, calls in before.items()
        }
        for node, reply in replies.items():
            pids[node].add(metrics(reply)["pid"])
    if several_actors():
        assert any(len(seen) > 1 for seen in pids.values())


# ---------------------------------------------------------------- faults


def test_a_client_that_raises_is_an_error_reply(grid: RayGrid) -> None:
    replies = train(grid, 120.0, **{"raise": [1, 4]})
    nodes = list(grid.get_node_ids())
    failed = {node for node, reply in replies.items() if reply.has_error()}
    assert replies.keys() == set(nodes)
    assert failed == {nodes[1], nodes[4]}
    error = replies[nodes[4]].error
    assert error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION == 2
    assert "node 4 cannot count" in str(error.reason)
    assert not any(reply.has_error() for reply in train(grid).values())


def test_a_client_that_dies_is_an_error_reply_and_the_grid_goes_on(grid: RayGrid) -> None:
    before = {node: metrics(reply)["calls"] for node, reply in train(grid).items()}
    nodes = list(grid.get_node_ids())
    replies = train(grid, die=[2])
    assert replies.keys() == set(nodes)
    assert replies[nodes[2]].has_error()
    assert "died" in str(replies[nodes[2]].error.reason)
    after = train(grid)
    assert not any(reply.has_error() for reply in after.values())
    assert metrics(after[nodes[2]])["calls"] == before[nodes[2]] + 1  # its memory survived


def test_only_the_client_that_dies_is_lost(grid: RayGrid) -> None:
    nodes = list(grid.get_node_ids())
    for _ in range(3):  # short messages, which are sent in bunches
        list(grid.send_and_receive(ask(grid, MessageType.QUERY, nodes=nodes * 30), timeout=120))
    replies = train(grid, die=[2])
    assert {node for node, reply in replies.items() if reply.has_error()} == {nodes[2]}


def test_after_the_deadline_a_reply_is_missing_and_never_comes(grid: RayGrid) -> None:
    train(grid)  # all actors are up
    nodes = list(grid.get_node_ids())
    began = time.monotonic()
    replies = train(grid, timeout=2.0, tag=1, sleep=[3], seconds=4.0)
    assert 1.9 < time.monotonic() - began < 3.5
    assert nodes[3] not in replies
    assert replies.keys() == set(nodes) - {nodes[3]} or not several_actors()
    for tag in (2, 3):
        replies = train(grid, tag=tag)
        assert replies.keys() == set(nodes)
        assert {metrics(reply)["tag"] for reply in replies.values()} == {tag}


# ---------------------------------------------------------------- Ray itself


def test_resources_that_do_not_fit(grid: RayGrid) -> None:
    for resources in (Resources(cpus=10_000), Resources(gpus=10_000)):
        with (
            pytest.raises(UserError, match=r"10000 .PUs.*lower --client-cpus or --client-gpus"),
            ray_grid(client_app(), {}, 2, resources),
        ):
            pass
    assert len(train(grid)) == NODES  # a Ray that was found running is left running


def test_leaving_ends_all_processes() -> None:
    """In a process of its own: started there, and nothing is left when the grid is closed."""
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "during: True\nafter: []\n", "")


LEAVE = """
import time
import psutil
from flwr.app import Message, RecordDict
from simulation.engine import ray_grid

def children():
    found = psutil.Process().children(recursive=True)
    return [p.name() for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

with ray_grid("simulation.noop:client_app", {}, 2) as grid:
    messages = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in grid.get_node_ids()]
    assert len(grid.send_and_receive(messages, timeout=60)) == 2
    print("during:", any("ray" in name for name in children()))
give_up = time.monotonic() + 20
while children() and time.monotonic() < give_up:
    time.sleep(0.2)
print("after:", children())
"""


# ---------------------------------------------------------------- killed and continued

SETTINGS = (
    *("--rounds", "12", "--seed", "3", "-s", "checkpoint-every=3", "-s", "evaluate-every=4", "-s", "eval-samples=2"),
    *("-s", "test-samples=4", "-s", "clients=30", "-s", "clients-per-round=6"),
)


def start(run_dir: Path, cache: Path) -> "subprocess.Popen[str]":
    command = [
        str(Path(sys.executable).with_name("fedivon")),
        "simulate",
        "digits",
        *SETTINGS,
        "--run-dir",
        str(run_dir),
    ]
    env = {**os.environ, "FEDIVON_CACHE": str(cache)}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> None:
    _, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (0, "")


def kill_tree(process: "subprocess.Popen[str]") -> None:
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in reversed(family):  # the run itself first: it must not see its clients go
        try:
            member.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=20)
    process.communicate(timeout=20)


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    give_up = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_killed_run_ends_bit_identical(tmp_path: Path, shared_cache: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    first = start(killed, shared_cache)
    try:
        wait_for(lambda: sum(1 for _ in read_metrics(killed)) >= 5, first)
    finally:
        kill_tree(first)
    assert not (killed / "summary.json").exists()
    assert sum(1 for _ in read_metrics(killed)) < 12
    checkpoints = sorted(path.name for path in (killed / "checkpoints").glob("round-*"))
    assert checkpoints[-1] >= "round-000003.safetensors"
    for process in [start(path, shared_cache) for path in (killed, whole)]:
        finish(process)

    arrays, about = load_arrays(killed / "posterior.safetensors")
    expected, expected_about = load_arrays(whole / "posterior.safetensors")
    assert list(arrays) == list(expected)
    for key, array in arrays.items():
        assert array.tobytes() == expected[key].tobytes(), key
    drop = {"settings"}
    assert {k: v for k, v in about.items() if k not in drop} == {
        k: v for k, v in expected_about.items() if k not in drop
    }
    assert rounds(killed) == rounds(whole)
    assert [row["round"] for row in rounds(killed)] == list(range(1, 13))
    assert read_json(killed / "summary.json")["metrics"] == read_json(whole / "summary.json")["metrics"]
    assert {p.name for p in whole.iterdir()} == {p.name for p in killed.iterdir() if p.suffix != ".part"}


def test_what_an_actor_gave_back_unheard_is_done_all_the_same(grid: RayGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may stop waiting for an answer that the actor then acts upon; no message gets lost by that."""
    train(grid)  # all actors are up, and messages are known to be short: they go in bunches
    monkeypatch.setattr("simulation.engine.PATIENCE_SECONDS", 0.0)
    for _ in range(20):
        assert train(grid, timeout=60.0).keys() == set(grid.get_node_ids())
