"""Whole rounds of the strategies with the real ClientApp: who is asked, what is refused, when a round is void."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp.strategy import Result
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from grid import LocalGrid, Tamper
from numpy.typing import NDArray

import strategies
from fedivon_flwr.errors import UserError
from fedivon_flwr.models import build as build_model
from fedivon_flwr.records import NDArrays, from_record, to_record
from fedivon_flwr.settings import Settings
from strategies.base import MOST_PUSHES, FederatedStrategy, Roster, RoundReport, RoundSettings
from strategies.fedavg import FedAvg
from strategies.fedivon import FedIvon, Options

CONFIG: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "clients": 6,
    "clients-per-round": 3,
    "partitioner": "dirichlet",
    "evaluation": "none",
    "rounds": 2,
    "batch-size": 64,
    "device": "cpu",
    "node-wait": 0.1,
}
METHODS = ["fedivon", "fedavg", "fedlaplace"]


class Run:
    """A run of a strategy on a fresh grid, and all that can be seen of it."""

    def __init__(self, tamper: Tamper | None = None, *, shuffle: bool = True, **changes: Any) -> None:
        self.config = CONFIG | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
        self.settings = Settings.from_config(self.config)
        self.grid = LocalGrid(self.config, self.settings.clients, tamper=tamper, shuffle=shuffle)
        self.strategy: FederatedStrategy = strategies.build(self.settings)
        self.reports: list[RoundReport] = []
        self.history: list[NDArrays] = []

    def start(self, arrays: NDArrays | None = None, **more: Any) -> NDArrays:
        self.result = self.resulting(arrays, **more)
        return from_record(self.result.arrays)

    def resulting(self, arrays: NDArrays | None = None, **more: Any) -> Result:
        def keep(report: RoundReport, record: ArrayRecord) -> None:
            self.reports.append(report)
            self.history.append(from_record(record))

        config = ConfigRecord({"batch-size": 64, "eval-samples": 2})
        return self.strategy.start(
            self.grid,
            to_record(self.initial() if arrays is None else arrays),
            num_rounds=self.settings.rounds,
            train_config=config,
            evaluate_config=config,
            callbacks=[keep],
            **more,
        )

    def initial(self) -> NDArrays:
        return self.strategy.model_arrays(build_model("mlp", (1, 8, 8), 10, seed=1))


def assert_equal(a: NDArrays, b: NDArrays) -> None:
    assert list(a) == list(b)
    assert all(np.array_equal(a[key], b[key]) for key in a)


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What Flower's logger warns of."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flwr").addHandler(handler)
    yield heard
    logging.getLogger("flwr").removeHandler(handler)


# Who is asked


def test_of_two_nodes_with_one_number_the_later_is_asked(warnings: list[str]) -> None:
    run = Run(clients=6)
    first = next(node for node, client in run.grid.partitions.items() if client == 0)
    known = run.strategy.roster.online(run.grid, 1.0)
    later = max(run.grid.partitions) + 1
    run.grid.partitions[later] = 0
    assert run.strategy.roster.online(run.grid, 1.0) == [(0, later), *known[1:]]
    assert run.strategy.roster.online(run.grid, 1.0) == [(0, later), *known[1:]]
    assert [line for line in warnings if "Two nodes have the number 0" in line] == warnings != []
    assert len(warnings) == 1
    del run.grid.partitions[later]
    assert run.strategy.roster.online(run.grid, 1.0) == [(0, first), *known[1:]]


def test_a_node_that_comes_back_with_another_number_is_known_by_that() -> None:
    """With a key it has the id that it had."""
    run = Run(clients=6)
    (first, *others), roster = list(run.grid.partitions), run.strategy.roster
    everybody = dict(run.grid.partitions)
    roster.online(run.grid, 1.0)
    del run.grid.partitions[first]
    assert roster.online(run.grid, 1.0) == sorted((everybody[node], node) for node in others)
    run.grid.partitions[first] = 9
    assert (9, first) in roster.online(run.grid, 1.0)


def test_who_does_not_say_who_it_is_does_not_count_and_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(clients=6)
    silent = next(node for node, client in run.grid.partitions.items() if client == 2)
    send, gone = run.grid.send_and_receive, Error(ErrorCode.NODE_UNAVAILABLE, "gone")

    def without(messages: Iterable[Message], **more: Any) -> Iterable[Message]:
        asked = list(messages)
        yield from send([message for message in asked if message.metadata.dst_node_id != silent], **more)
        yield from (Message(gone, reply_to=message) for message in asked if message.metadata.dst_node_id == silent)

    monkeypatch.setattr(run.grid, "send_and_receive", without)
    assert [client for client, _ in run.strategy.roster.online(run.grid, 1.0)] == [0, 1, 3, 4, 5]
    monkeypatch.undo()
    assert [client for client, _ in run.strategy.roster.online(run.grid, 1.0)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("method", METHODS)
def test_the_seed_alone_decides_whatever_the_node_ids_and_the_order_of_replies(method: str) -> None:
    runs = [Run(method=method, rounds=3), Run(method=method, rounds=3)]
    assert set(runs[0].grid.partitions) != set(runs[1].grid.partitions)
    one, two = (run.start() for run in runs)
    assert runs[0].grid.clients() == runs[1].grid.clients()
    assert_equal(one, two)
    assert not any(np.array_equal(one[key], array) for key, array in runs[0].initial().items() if "mean" in key)


def test_another_seed_asks_other_clients() -> None:
    asked = set()
    for seed in range(4):
        run = Run(method="fedavg", seed=seed)
        run.start()
        asked.add(tuple(run.grid.clients()))
        for server_round in (1, 2):
            assert len({who for when, who in run.grid.clients() if when == server_round}) == 3
    assert len(asked) == 4


def test_every_node_is_asked_once_for_its_partition_and_all_are_told_the_same() -> None:
    run = Run(rounds=3, seed=5)
    run.start()
    assert sorted(who for kind, _, who, _ in run.grid.asked if kind == "query") == list(range(6))
    for kind, server_round, _, config in run.grid.asked:
        if kind == "train":
            assert config["seed"] == 5
            assert config["server-round"] == server_round
            assert config["batch-size"] == 64
            assert config["ess"] == 5000.0
            assert "rule" not in config


def test_nodes_without_a_partition_go_by_their_node_id() -> None:
    run = Run(method="fedavg", rounds=1, clients=3)
    run.grid.partitioned = False
    run.start()
    assert run.reports[0].replies == 3


@pytest.mark.parametrize("method", METHODS)
def test_the_learning_rate_decays_linearly(method: str) -> None:
    changes: dict[str, Any] = {f"{method}__lr": 0.1, f"{method}__lr-final": 0.04}
    run = Run(method=method, rounds=4, clients_per_round=1, **changes)
    run.start()
    rates = [config["lr"] for kind, _, _, config in run.grid.asked if kind == "train"]
    assert rates == pytest.approx([0.1, 0.08, 0.06, 0.04])


def test_too_few_nodes_are_said() -> None:
    run = Run(min_replies=3)
    run.grid.partitions = dict(list(run.grid.partitions.items())[:2])
    with pytest.raises(UserError, match=r"Only 2 nodes .* needs 3; start more nodes or lower min-replies"):
        run.start()


def test_nodes_that_leave_are_not_waited_for_and_who_comes_back_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(rounds=4, method="fedavg", node_wait=60.0, evaluation="clients", evaluate_every=2)
    everybody = list(run.grid.partitions)

    def ids() -> Iterable[int]:
        return everybody[:2] if len(run.reports) in (1, 2) else everybody

    monkeypatch.setattr(run.grid, "get_node_ids", ids)
    began = time.monotonic()
    run.start()
    assert [report.replies for report in run.reports] == [3, 2, 2, 3]
    assert time.monotonic() - began < 30


def test_nodes_that_come_late_are_waited_for() -> None:
    run = Run(rounds=1, method="fedavg", node_wait=30.0)
    there, seen = dict(run.grid.partitions), []

    def ids() -> Iterable[int]:
        seen.append(1)
        return list(there)[: 2 if len(seen) == 1 else 6]

    run.grid.get_node_ids = ids  # type: ignore[method-assign]
    run.start()
    assert run.reports[0].replies == 3
    assert sorted(who for kind, _, who, _ in run.grid.asked if kind == "query") == list(range(6))


def test_a_round_counts_when_all_have_left_before_its_evaluation(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    run = Run(rounds=2, method="fedavg", node_wait=0.5, evaluation="clients", evaluate_every=2)
    monkeypatch.setattr(
        run.grid,
        "get_node_ids",
        lambda: [] if len(run.grid.clients()) == 2 * 3 else list(run.grid.partitions),
    )
    run.start()
    assert [report.replies for report in run.reports] == [3, 3]
    assert run.reports[1].evaluation == {}
    assert any("Round 2 is not evaluated: Only 0 nodes" in line for line in warnings)


def test_who_does_not_say_who_it_is_costs_a_round_no_more_than_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(rounds=2, method="fedavg", round_deadline=40.0, node_wait=300.0)
    asked: list[float | None] = []
    send = run.grid.send_and_receive

    def note(messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        asked.append(timeout)
        return send(messages, timeout=timeout)

    monkeypatch.setattr(run.grid, "send_and_receive", note)
    run.start()
    assert set(asked) == {40.0}


# What is refused. Each case spoils the reply of one client; the round must end as if it had never come.


def spoil(
    arrays: Callable[[NDArrays], None] = lambda _: None, metrics: Mapping[str, Any] | None = None, drop: str = ""
) -> Tamper:
    """The first client's reply with other arrays, metrics or records."""

    def tamper(reply: Message, partition: int) -> list[Message]:
        if partition != victim():
            return [reply]
        changed = {key: array.copy() for key, array in from_record(reply.content.array_records["arrays"]).items()}
        arrays(changed)
        reply.content.array_records["arrays"] = to_record(changed)
        reply.content.metric_records["metrics"].update(metrics or {})
        if drop:
            del reply.content[drop]
        return [reply]

    return tamper


@cache
def victim() -> int:
    run = Run(method="fedavg", rounds=1)
    run.start()
    return run.grid.clients()[0][1]


def silent(reply: Message, partition: int) -> list[Message]:
    return [] if partition == victim() else [reply]


@cache
def without_the_victim(method: str) -> NDArrays:
    return Run(silent, method=method, rounds=1).start()


def changed(key: str, how: Callable[[NDArray[Any]], NDArray[Any]]) -> Tamper:
    return spoil(lambda arrays: arrays.update({key: how(arrays[key])}))


def put(key: str, value: float) -> Tamper:
    return spoil(lambda arrays: arrays[key].__setitem__((0,) * arrays[key].ndim, value))


def failing(reply: Message, partition: int) -> list[Message]:
    if partition != victim():
        return [reply]
    asked = Message(RecordDict(), dst_node_id=reply.metadata.src_node_id, message_type="train")
    return [Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "out of memory"), reply_to=asked)]


def with_objects(reply: Message, partition: int) -> list[Message]:
    if partition == victim():
        pickled = (
            b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': (), }".ljust(117) + b"\n"
        )
        reply.content.array_records["arrays"]["mean/head.bias"] = Array("object", (), "numpy.ndarray", pickled + b"N.")
    return [reply]


def extra_record(reply: Message, partition: int) -> list[Message]:
    if partition == victim():
        reply.content["more"] = to_record({"mean/x": np.zeros(1)})
    return [reply]


REFUSED: dict[str, tuple[Tamper, str]] = {
    "error": (failing, "out of memory"),
    "no arrays": (spoil(drop="arrays"), "exactly one ArrayRecord, found 0"),
    "no metrics": (spoil(drop="metrics"), "exactly one MetricRecord, found 0"),
    "two records": (extra_record, "exactly one ArrayRecord, found 2"),
    "missing key": (spoil(lambda arrays: arrays.__delitem__("mean/head.bias")), "missing mean/head.bias"),
    "extra key": (spoil(lambda arrays: arrays.update(x=np.zeros(1))), "unexpected x"),
    "shape": (changed("mean/head.weight", np.transpose), r"shape (64, 10) instead of (10, 64)"),
    "broadcast": (changed("mean/head.bias", lambda a: a[:1]), "shape (1,) instead of (10,)"),
    "dtype": (changed("mean/head.bias", lambda a: a.astype(np.float64)), "float64 instead of float32"),
    "whole numbers": (changed("mean/head.bias", lambda a: a.astype(np.int32)), "int32 instead of float32"),
    "objects": (with_objects, "Python objects"),
    "nan": (put("mean/head.weight", np.nan), "mean/head.weight has a value that is not a number"),
    "inf": (put("mean/head.weight", np.inf), "mean/head.weight has a value that is not a number"),
    "-inf": (put("mean/head.bias", -np.inf), "mean/head.bias has a value that is not a number"),
    "no examples": (spoil(metrics={"num-examples": 0}), "num-examples is 0"),
    "negative": (spoil(metrics={"num-examples": -5}), "num-examples is -5"),
    "huge": (spoil(metrics={"num-examples": 10**12}), "num-examples is 1000000000000"),
    "fraction": (spoil(metrics={"num-examples": 10.5}), "num-examples is 10.5"),
    "nan examples": (spoil(metrics={"num-examples": float("nan")}), "num-examples is nan"),
    "inf examples": (spoil(metrics={"num-examples": float("inf")}), "num-examples is inf"),
    "list of examples": (spoil(metrics={"num-examples": [3, 4]}), "num-examples is"),
    "loss": (spoil(metrics={"train-loss": float("nan")}), "a metric is not finite"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_reply_is_refused_and_the_round_goes_on(method: str, case: str, warnings: list[str]) -> None:
    tamper, reason = REFUSED[case]
    run = Run(tamper, method=method, rounds=1)
    arrays = run.start()
    assert (run.reports[0].replies, run.reports[0].refused) == (2, 1)
    assert_equal(arrays, without_the_victim(method))
    [warning] = [text for text in warnings if "Refused" in text]
    assert f"client {victim()}" in warning
    assert reason in warning


@pytest.mark.parametrize("value", [-2e-4, -1.0])
def test_a_precision_that_is_not_positive_is_refused(value: float, warnings: list[str]) -> None:
    run = Run(put("hess/head.weight", value), rounds=1)
    assert_equal(run.start(), without_the_victim("fedivon"))
    assert any("hess/head.weight gives a precision that is not positive" in text for text in warnings)


def test_a_slightly_negative_hessian_is_accepted() -> None:
    run = Run(put("hess/head.weight", -1e-4), rounds=1)
    run.start()
    assert (run.reports[0].replies, run.reports[0].refused) == (3, 0)


@pytest.mark.parametrize("key", ["hess/head.weight", "mean/head.weight"])
@pytest.mark.parametrize("value", [1e30, 3e38])
def test_absurd_but_finite_values_leave_the_posterior_finite(key: str, value: float) -> None:
    arrays = Run(put(key, value), rounds=1).start()
    assert all(np.isfinite(array).all() for array in arrays.values())


def test_a_second_answer_of_a_node_is_refused(warnings: list[str]) -> None:
    def twice(reply: Message, partition: int) -> list[Message]:
        asked = Message(RecordDict(), dst_node_id=reply.metadata.src_node_id, message_type="train")
        zeros = {key: array * 0 for key, array in from_record(reply.content.array_records["arrays"]).items()}
        content = RecordDict({"arrays": to_record(zeros), "metrics": MetricRecord({"num-examples": 1000})})
        return [reply, Message(content, reply_to=asked)] if partition == victim() else [reply]

    run = Run(twice, shuffle=False, method="fedavg", rounds=1)
    assert_equal(run.start(), Run(method="fedavg", rounds=1).start())
    assert (run.reports[0].replies, run.reports[0].refused) == (3, 1)
    assert f"Refused the reply of client {victim()}: it answered twice" in warnings


def test_an_answer_of_a_node_that_was_not_asked_is_refused(warnings: list[str]) -> None:
    def from_elsewhere(reply: Message, partition: int) -> list[Message]:
        asked = Message(RecordDict(), dst_node_id=77, message_type="train")
        return [reply, Message(reply.content, reply_to=asked)] if partition == victim() else [reply]

    run = Run(from_elsewhere, method="fedavg", rounds=1)
    assert_equal(run.start(), Run(method="fedavg", rounds=1).start())
    assert "Refused the reply of client ?: node 77 was not asked" in warnings


def test_an_error_that_flower_gives_for_a_lost_node_is_laid_to_that_node(warnings: list[str]) -> None:
    """It comes from Flower's own node id, and names the question only."""

    def lost(reply: Message, partition: int) -> list[Message]:
        if partition != victim():
            return [reply]
        error = Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=question_of(reply))
        error.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
        return [error]

    run = Run(lost, method="fedavg", rounds=1)
    run.start()
    assert (run.reports[0].replies, run.reports[0].refused) == (2, 1)
    assert f"Refused the reply of client {victim()}: error {ErrorCode.NODE_UNAVAILABLE}: gone" in warnings


def question_of(reply: Message) -> Message:
    question = Message(RecordDict(), dst_node_id=reply.metadata.src_node_id, message_type="train")
    question.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return question


def test_a_round_tells_where_its_time_went() -> None:
    run = Run(method="fedivon", rounds=2, evaluation="clients", evaluate_every=1)
    began = time.time()
    run.start()
    for report in run.reports:
        client, *phases = report.timeline.items()
        assert client[1] in {who for when, who in run.grid.clients() if when == report.round}
        assert [name for name, _ in phases] == ["push", "start", "import", "load", "train", "reply"]
        assert sum(seconds for _, seconds in phases) <= time.time() - began
        assert report.timeline["train"] > 0
        assert not [key for key in report.evaluation if "seconds" in key]


def test_clients_that_measure_nothing_are_no_error() -> None:
    def bare(reply: Message, partition: int) -> list[Message]:
        for record in reply.content.metric_records.values():
            for key in [key for key in record if key.startswith("seconds-")]:
                del record[key]
        return [reply]

    run = Run(bare, method="fedavg", rounds=1)
    run.start()
    assert run.reports[0].timeline == {}


# When a round is void


@pytest.mark.parametrize("method", METHODS)
def test_a_void_round_keeps_the_arrays_and_the_next_goes_on(method: str, warnings: list[str]) -> None:
    def early(reply: Message, partition: int) -> list[Message]:
        return [reply] if any(when == 2 for when, _ in run.grid.clients()) else silent(reply, partition)

    run = Run(early, method=method, min_replies=3)
    arrays = run.start()
    assert_equal(run.history[0], run.initial())
    assert not np.array_equal(arrays["mean/head.bias"], run.initial()["mean/head.bias"])
    assert any("Round 1 is void: 2 replies accepted, 0 refused, 1 missing" in text for text in warnings)
    assert [report.replies for report in run.reports] == [2, 3]
    assert run.reports[0].train_loss is None
    assert list(run.result.train_metrics_clientapp) == [2]


def test_no_reply_at_all_is_a_void_round() -> None:
    run = Run(lambda *_: [])
    assert_equal(run.start(), run.initial())
    assert [report.replies for report in run.reports] == [0, 0]


def fail_from(first: int) -> Callable[[], Run]:
    def make() -> Run:
        def fail(reply: Message, partition: int) -> list[Message]:
            if max(when for when, _ in run.grid.clients()) < first:
                return [reply]
            asked = Message(RecordDict(), dst_node_id=reply.metadata.src_node_id, message_type="train")
            return [Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "no such model"), reply_to=asked)]

        run = Run(fail, method="fedavg")
        return run

    return make


def test_a_run_ends_when_all_fail_in_the_first_round() -> None:
    with pytest.raises(UserError, match=r"No reply could be used in 1 round.*no such model"):
        fail_from(1)().start()


def test_a_run_goes_on_when_some_fail_in_the_first_round() -> None:
    """Even if the others are too few for it: whoever was lost may come back."""
    lost: list[int] = []

    def lose_one(reply: Message, partition: int) -> list[Message]:
        if lost:
            return [reply]
        lost.append(partition)
        asked = Message(RecordDict(), dst_node_id=reply.metadata.src_node_id, message_type="train")
        return [Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=asked)]

    run = Run(lose_one, method="fedavg", min_replies=3)
    run.start()
    assert [(report.replies, report.refused) for report in run.reports] == [(2, 1), (3, 0)]
    assert_equal(run.history[0], run.initial())


def full_disk(message: Message, context: Context) -> Message:
    raise RuntimeError("disk full")


def test_a_node_whose_app_fails_once_is_known_by_its_number_later(warnings: list[str]) -> None:
    run = Run(method="fedavg")
    online, failing, roster = LocalGrid(run.config, 3), LocalGrid(run.config, 3, app=ClientApp()), Roster()
    failing.partitions = online.partitions
    failing._app.query()(full_disk)
    assert [client for client, _ in roster.online(failing, 1.0)] == sorted(online.partitions)
    assert ["disk full" in line for line in warnings] == [True] * 3
    assert [client for client, _ in roster.online(online, 1.0)] == [0, 1, 2]
    assert len(online.asked) == 3
    roster.online(online, 1.0)
    assert len(online.asked) == 3


def test_a_node_whose_app_answers_no_queries_goes_by_its_id() -> None:
    silent, roster = LocalGrid({}, 3, app=ClientApp()), Roster()
    for _ in range(2):
        assert [client for client, _ in roster.online(silent, 1.0)] == sorted(silent.partitions)
    assert len(silent.asked) == 3


def test_a_run_goes_on_when_all_fail_later() -> None:
    run = fail_from(2)()
    assert_equal(run.start(), run.history[0])
    assert [report.refused for report in run.reports] == [0, 3]


def test_the_wrong_model_on_the_nodes_is_said() -> None:
    run = Run(method="fedavg")
    run.grid = LocalGrid(run.config | {"method": "fedivon"}, 6)
    with pytest.raises(UserError, match="must use the same method"):
        run.start()


# Resume, evaluation, reports


@pytest.mark.parametrize("changes", [{}, {"fedivon__ess": "local", "fedivon__rule": "dwc"}, {"method": "fedavg"}])
def test_a_run_that_was_stopped_goes_on_to_the_same_end(changes: dict[str, Any]) -> None:
    whole = Run(rounds=4, **changes)
    end = whole.start()

    stopped = Run(rounds=4, **changes)
    stopped.grid.get_node_ids = lambda: [] if len(stopped.reports) == 2 else list(stopped.grid.partitions)  # type: ignore[method-assign]
    with pytest.raises(UserError):
        stopped.start()
    resumed = Run(rounds=4, **changes)
    resumed.strategy.load_state(stopped.strategy.state())
    assert_equal(resumed.start(stopped.history[-1], first_round=3), end)
    assert [report.round for report in resumed.reports] == [3, 4]
    assert resumed.strategy.state() == whole.strategy.state()


def test_federated_evaluation_in_the_rounds_that_are_due() -> None:
    run = Run(rounds=3, evaluation="clients", evaluate_every=2, test_samples=3)
    run.start()
    assert sorted({when for when, _ in run.grid.clients("evaluate")}) == [2, 3]
    assert list(run.result.evaluate_metrics_clientapp) == [2, 3]
    assert [sorted(report.evaluation) != [] for report in run.reports] == [False, True, True]
    scores = run.reports[2].evaluation
    assert {"clients-loss", "clients-mean-accuracy", "clients-mc-accuracy", "clients-mc-ece"} <= set(scores)
    assert 0 <= scores["clients-mc-accuracy"] <= 1
    assert scores["clients-loss"] == pytest.approx(scores["clients-mean-nll"])
    assert [report.replies for report in run.reports] == [3, 3, 3]
    samples = {(when, told["eval-samples"]) for kind, when, _, told in run.grid.asked if kind == "evaluate"}
    assert samples == {(2, 2), (3, 3)}  # the last with test-samples


def test_evaluation_does_not_change_the_training() -> None:
    assert_equal(Run(evaluation="clients", evaluate_every=1).start(), Run().start())


def test_the_servers_own_evaluation_is_reported() -> None:
    seen = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        seen.append((server_round, from_record(arrays)["mean/head.bias"]))
        return MetricRecord({"accuracy": 0.25 * server_round}) if server_round == 2 else None

    run = Run()
    run.start(evaluate_fn=evaluate)
    assert [report.evaluation for report in run.reports] == [{}, {"accuracy": 0.5}]
    assert [server_round for server_round, _ in seen] == [1, 2]
    assert np.array_equal(seen[1][1], run.history[1]["mean/head.bias"])


# FedIvon's options


def test_local_sample_sizes_become_the_servers() -> None:
    sizes: dict[int, int] = {}

    def note(reply: Message, partition: int) -> list[Message]:
        sizes[partition] = int(reply.content.metric_records["metrics"]["num-examples"])  # type: ignore[arg-type]
        return [reply]

    run = Run(note, rounds=1, fedivon__ess="local")
    arrays = run.start()
    ess = sum(n * n for n in sizes.values()) / sum(sizes.values())
    assert run.strategy.scale() == {"ess": pytest.approx(ess), "test_ess": pytest.approx(ess), "weight_decay": 2e-4}
    posterior = run.strategy.posterior(arrays)
    assert posterior is not None
    hess = np.concatenate([array.ravel() for key, array in arrays.items() if key.startswith("hess/")])
    np.testing.assert_allclose(posterior.precision.numpy(), ess * (hess + 2e-4), rtol=1e-5)


def test_the_posterior_that_predicts_may_be_wider() -> None:
    run, narrow = Run(rounds=1, fedivon__ess=1000.0, fedivon__test_ess=250.0), Run(rounds=1, fedivon__ess=1000.0)
    arrays, same = run.start(), narrow.start()
    assert all(np.array_equal(arrays[key], same[key]) for key in arrays)  # training knows nothing of it
    trained, predicts = run.strategy.posterior(arrays), run.strategy.predictive(arrays)
    assert trained is not None
    assert predicts is not None
    torch.testing.assert_close(predicts.std, 2 * trained.std)
    assert torch.equal(predicts.mean, trained.mean)
    unchanged = narrow.strategy.predictive(arrays)
    assert unchanged is not None
    assert torch.equal(unchanged.precision, trained.precision)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 10.0])
def test_the_servers_posterior_as_prior(temperature: float) -> None:
    run = Run(fedivon__prior="server", fedivon__temperature=temperature)
    arrays = run.start()
    assert [report.replies for report in run.reports] == [3, 3]
    assert not np.array_equal(arrays["mean/head.bias"], run.initial()["mean/head.bias"])
    assert all(np.isfinite(array).all() for array in arrays.values())


def test_an_infinite_temperature_keeps_the_servers_posterior() -> None:
    run = Run(fedivon__prior="server", fedivon__temperature=float("inf"))
    arrays = run.start()
    for key, array in run.initial().items():
        np.testing.assert_allclose(arrays[key], array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["hessian", "lp", "w2", "dwc"])
def test_every_kind_of_rule_runs(rule: str) -> None:
    run = Run(fedivon__rule=rule)
    arrays = run.start()
    assert [report.replies for report in run.reports] == [3, 3]
    assert all(np.isfinite(array).all() for array in arrays.values())


# Someone else's ClientApp, without our model: all that counts is the wire


other = ClientApp()


@other.query()
def _which(message: Message, context: Context) -> Message:
    number = int(context.node_config["partition-id"])
    return Message(RecordDict({"m": MetricRecord({"partition-id": number})}), reply_to=message)


@other.train()
def _learn(message: Message, context: Context) -> Message:
    """Client k has k + 1 examples, adds k to every number, and has a loss of k."""
    number = int(context.node_config["partition-id"])
    [record] = message.content.array_records.values()
    arrays = {key: array + np.asarray(number, array.dtype) for key, array in from_record(record).items()}
    metrics = MetricRecord({"num-examples": number + 1, "train-loss": float(number)})
    return Message(RecordDict({"a": to_record(arrays), "m": metrics}), reply_to=message)


def by_hand(strategy: FederatedStrategy, arrays: NDArrays) -> tuple[NDArrays, RoundReport]:
    reports: list[RoundReport] = []
    grid = LocalGrid({}, 3, app=other)
    result = strategy.start(grid, to_record(arrays), 1, callbacks=[lambda report, _: reports.append(report)])
    return from_record(result.arrays), reports[0]


ROUNDS = RoundSettings(clients_per_round=3)
WIRE = {
    "mean/x": np.array([[1.0, 2.0]], np.float32),
    "hess/x": np.array([[0.5, 3.0]], np.float32),
    "buffer/mean": np.array([1.0], np.float32),
    "buffer/count": np.array(10),
}


def test_fedavg_by_hand() -> None:
    arrays, report = by_hand(FedAvg(rounds=ROUNDS), {key: WIRE[key] for key in WIRE if key != "hess/x"})
    shift = (0 * 1 + 1 * 2 + 2 * 3) / 6
    np.testing.assert_allclose(arrays["mean/x"], WIRE["mean/x"] + shift, rtol=1e-6)
    np.testing.assert_allclose(arrays["buffer/mean"], WIRE["buffer/mean"] + shift, rtol=1e-6)
    assert arrays["buffer/count"] == 12
    assert arrays["buffer/count"].dtype == np.int64
    assert report.train_loss == pytest.approx(shift)
    assert (report.round, report.rounds, report.replies, report.refused) == (1, 1, 3, 0)
    assert report.bytes_up == report.bytes_down == 3 * (8 + 4 + 8)


def test_fedivon_by_hand() -> None:
    arrays, _ = by_hand(FedIvon(Options(weight_decay=0.1), ROUNDS), WIRE)
    weights = np.array([1, 2, 3])[:, None, None] / 6
    steps = np.array([0, 1, 2])[:, None, None]
    precision = weights * (WIRE["hess/x"] + steps + 0.1)
    np.testing.assert_allclose(arrays["hess/x"], precision.sum(0) - 0.1, rtol=1e-6)
    mean = (precision * (WIRE["mean/x"] + steps)).sum(0) / precision.sum(0)
    np.testing.assert_allclose(arrays["mean/x"], mean, rtol=1e-6)
    assert list(arrays) == list(WIRE)
    assert arrays["buffer/count"] == 12


def test_an_evaluation_that_fails_changes_nothing() -> None:
    """This app cannot evaluate. What was sent down is that of the three that trained, not of the one asked here."""
    _, report = by_hand(
        FedAvg(rounds=replace(ROUNDS, evaluate_every=1, evaluate_clients=1)), {"mean/x": WIRE["mean/x"]}
    )
    assert report.evaluation == {}
    assert (report.replies, report.refused) == (3, 0)
    assert report.bytes_up == report.bytes_down == 3 * 8


def test_a_bound_on_examples_can_be_set() -> None:
    _, report = by_hand(FedAvg(rounds=replace(ROUNDS, max_examples=2)), {"mean/x": WIRE["mean/x"]})
    assert (report.replies, report.refused) == (2, 1)


def test_the_initial_posterior_is_the_model_with_h0_everywhere() -> None:
    strategy = FedIvon(Options(hess_init=0.7))
    arrays = strategy.model_arrays(torch.nn.Linear(2, 3))
    assert list(arrays) == ["mean/weight", "mean/bias", "hess/weight", "hess/bias"]
    assert all((array == np.float32(0.7)).all() for key, array in arrays.items() if key.startswith("hess"))
    assert list(FedAvg().model_arrays(torch.nn.Linear(2, 3))) == ["mean/weight", "mean/bias"]


@pytest.mark.parametrize("lost", [1, MOST_PUSHES])
def test_messages_are_sent_again_when_the_superlink_is_restarted_meanwhile(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every exchange fails so many times, before any node has heard of it."""
    undisturbed, run = Run().start(), Run()
    deliver, times = run.grid.send_and_receive, iter(range(1000))

    def losing(messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        if next(times) % (lost + 1) < lost:
            raise ObjectPushError("object", 1, "session")
        return deliver(messages, timeout=timeout)

    monkeypatch.setattr(run.grid, "send_and_receive", losing)
    if lost == MOST_PUSHES:
        with pytest.raises(ObjectPushError):
            run.start()
        assert run.grid.asked == []
    else:
        assert_equal(run.start(), undisturbed)
