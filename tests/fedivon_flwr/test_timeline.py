"""Where the time of a round goes: what a node measures, and what the server makes of it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st

import strategies
from fedivon_flwr.settings import Settings
from fedivon_flwr.timeline import ON_NODE, Stopwatch, process_age, split_off, whole

seconds = st.floats(0, 1e4)
# What a node's process must not wait for: it is started anew for every message.
NOT_FOR_NODES = (
    "ray",
    "matplotlib",
    "sklearn",
    "scipy",
    "pandas",
    "torchvision",
    "torchmetrics",
    "simulation",
    "deploy",
)


def reply() -> Message:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    question = Message(RecordDict(), dst_node_id=7, message_type="train")
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 3})}), reply_to=question)


def laps(watch: Stopwatch, load: float, train: float) -> dict[str, float]:
    watch.begin()
    time.sleep(load)
    watch.lap("load")
    time.sleep(train)
    record = watch.note(reply()).content.metric_records["metrics"]
    metrics = {key: value for key, value in record.items() if isinstance(value, int | float)}
    found = split_off(metrics)
    assert metrics == {"num-examples": 3}
    return found


def test_a_node_measures_its_phases_and_starts_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/flwr-clientapp", "--insecure"])
    watch = Stopwatch()
    began = time.monotonic()
    first = laps(watch, 0.02, 0.05)
    took = time.monotonic() - began
    second = laps(watch, 0.0, 0.0)
    assert tuple(first) == tuple(second) == ON_NODE
    assert first["start"] > 0
    assert first["import"] > 0
    assert first["load"] >= 0.02
    assert first["train"] >= 0.05
    assert first["load"] + first["train"] <= took  # no bound of its own: a busy machine wakes a sleeper late
    assert second["start"] == second["import"] == 0


def test_a_virtual_nodes_process_is_not_started_for_a_message() -> None:
    first = laps(Stopwatch(), 0.01, 0.0)
    assert first["start"] == first["import"] == 0
    assert first["load"] >= 0.01


def test_the_process_age_is_that_of_the_process() -> None:
    code = "import time; time.sleep(0.3); from fedivon_flwr.timeline import process_age; print(process_age())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if done.stdout.strip() == "None":
        pytest.skip("this system does not tell when a process began")
    assert 0.3 <= float(done.stdout) <= time.monotonic() - began + 0.02


def test_a_system_that_does_not_tell_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["flwr-clientapp"])
    monkeypatch.setattr(os, "sysconf", lambda _: (_ for _ in ()).throw(OSError))
    assert process_age() is None
    assert laps(Stopwatch(), 0.0, 0.0)["start"] == 0


@given(st.fixed_dictionaries(dict.fromkeys(ON_NODE, seconds)), seconds, seconds, st.floats(-1e3, 1e3))
def test_the_phases_add_up_whatever_the_nodes_clock_says(
    on_node: dict[str, float], push: float, reply: float, ahead: float
) -> None:
    sent = 1e9
    answered = sent + push + sum(on_node.values())
    received = answered + reply
    found = whole(on_node, sent, answered + ahead, received)
    assert sum(found.values()) == pytest.approx(received - sent, abs=1e-4)
    assert found["push"] == pytest.approx(push + ahead, abs=1e-4)
    assert found["reply"] == pytest.approx(reply - ahead, abs=1e-4)


def test_a_nodes_process_imports_nothing_that_it_does_not_need() -> None:
    code = f"import sys, fedivon_flwr.client_app; print([m for m in {NOT_FOR_NODES} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_training_on_a_node_imports_nothing_more(tmp_path: Path) -> None:
    """The whole answer to a message, with data of the node's own, in a process of its own."""
    x, y = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32), np.arange(40) % 2
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    settings = Settings.from_config(
        {"dataset": "nodes", "input-shape": "5", "classes": 2, "model": "mlp", "evaluation": "clients"}
    )
    told = {**strategies.build(settings).train_config(1), "server-round": 1}
    code = f"""
import sys
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from fedivon_flwr.client_app import app
from fedivon_flwr.models import build
from fedivon_flwr.records import model_arrays, to_record
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
arrays = to_record(model_arrays(build("mlp", (5,), 2, 0), 1.0))
content = RecordDict({{"arrays": arrays, "config": ConfigRecord({told})}})
question = Message(content, dst_node_id=1, message_type="train")
reply = app(question, Context(1, 1, {{"data": {str(tmp_path / "own.npz")!r}}}, RecordDict(), {settings.to_config()}))
assert reply.content.metric_records["metrics"]["seconds-train"] > 0
print([m for m in {NOT_FOR_NODES} if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
