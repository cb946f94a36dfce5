"""What every server half shares: whom to ask, what to accept, when a round closes, and the loop of rounds.

A method's strategy is a subclass that says what to send (`train_config`), which replies to refuse beyond the
common checks (`refuse`) and how to combine the accepted ones (`combine`). It works with any model and any
ServerApp: all it assumes is the wire contract of `fedivon_flwr.records`.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from hashlib import blake2b
from heapq import nsmallest
from logging import INFO, WARNING
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from torch import nn

from fedivon_flwr.errors import UserError
from fedivon_flwr.metrics import Scores
from fedivon_flwr.posterior import DiagGaussian
from fedivon_flwr.records import (
    HESS,
    NUM_EXAMPLES,
    TRAIN_EXAMPLES,
    NDArrays,
    from_record,
    is_own,
    mismatch,
    model_arrays,
    nbytes,
    tensor,
    to_record,
)
from fedivon_flwr.settings import MethodOptions
from fedivon_flwr.timeline import ON_NODE, split_off, whole
from strategies.aggregation import weighted_mean

PARTITION_ID = "partition-id"
QUERY_SECONDS = 60.0  # for which a node may keep us waiting until it says who it is
MOST_PUSHES = 5  # of the same messages
MOST_VOID_ROUNDS = 10  # in a row; then the run ends
LARGEST = 1e15  # absolute value that is accepted in a reply
# Of the server's model; of the client's own, at the mean and by Monte Carlo.
PERSONAL_SCORES = {at: [f"{at}-{score.name}" for score in fields(Scores)] for at in ("global-mean", "mean", "mc")}
NO_QUERIES = "No query function registered"  # what Flower says for an app that does not answer queries


@dataclass(frozen=True)
class RoundSettings:
    """Whom a round asks and when it closes."""

    clients_per_round: int = 10
    min_replies: int = 1  # with fewer accepted replies the round is void and the posterior stays
    deadline: float = 3600.0  # seconds until a round closes with the replies that are there
    nodes: int = 0  # how many are expected, if more than a round asks; the first round waits for them
    node_wait: float = 300.0  # seconds to wait for nodes to connect
    max_examples: int = 10_000_000  # a client that claims more is refused: it would outweigh the rest
    evaluate_every: int = 0  # rounds between federated evaluations; 0 for none
    evaluate_clients: int = 10
    final_samples: int = 0  # weight samples of the last of them; 0: as many as of the others
    unseen: int = 0  # the last so many of `nodes` are never asked to train
    seed: int = 0


@dataclass(frozen=True)
class Reply:
    """A client's accepted answer."""

    client: int
    examples: int
    arrays: NDArrays
    metrics: Mapping[str, float]
    timeline: Mapping[str, float] = field(default_factory=dict)  # seconds by phase, if the client measures them


@dataclass(frozen=True)
class RoundReport:
    """What happened in a round."""

    round: int
    rounds: int
    train_loss: float | None
    seconds: float
    bytes_up: int
    bytes_down: int
    replies: int
    refused: int
    evaluation: Mapping[str, float] = field(default_factory=dict)
    timeline: Mapping[str, float] = field(default_factory=dict)  # of the client that worked the longest


Callback = Callable[[RoundReport, ArrayRecord], None]
Amiss = Callable[[Mapping[str, float]], str | None]  # why metrics are not acceptable; None when they are


class Roster:
    """Which node holds which partition: every node is asked when it appears.

    Flower draws node ids anew for each run, so nothing reproducible can hang on them. A node with a key keeps its id
    when it is started anew, maybe with another number, so who was away is asked again.
    """

    def __init__(self) -> None:
        self._client: dict[int, int] = {}  # node id → client, in the order in which they were first heard of
        self._doubles: set[int] = set()

    def online(self, grid: Grid, timeout: float) -> list[tuple[int, int]]:
        """``(client, node id)`` of the connected nodes, sorted; a node without a partition goes by its node id.

        Who does not say who it is (it is busy, or gone) does not count, and is asked again the next time. Whose app
        fails goes by its node id until then, so that a round finds out soon if all fail.
        """
        nodes = set(grid.get_node_ids())
        self._client = {node: client for node, client in self._client.items() if node in nodes}
        failing: dict[int, int] = {}
        if new := sorted(nodes - self._client.keys()):

            def messages() -> list[Message]:
                return [Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY) for node in new]

            for reply in send_and_receive(grid, messages, timeout):
                node = reply.metadata.src_node_id
                if not reply.has_error():
                    told = partition_of(reply.content)
                    self._client[node] = node if told is None else told
                elif NO_QUERIES in str(reply.error.reason):
                    self._client[node] = node
                else:
                    log(WARNING, "Node %d does not say who it is: %s", node, reply.error.reason)
                    if reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION:
                        failing[node] = node
        found = dict[int, int]()
        for node, client in (self._client | failing).items():
            if client in found and client not in self._doubles:
                self._doubles.add(client)
                log(WARNING, "Two nodes have the number %d; only the later is asked. Give each its own.", client)
            found[client] = node  # a node that was started anew without a key has a new id
        return sorted(found.items())


def partition_of(content: RecordDict) -> int | None:
    """The partition id that a node told, if it told one."""
    for record in content.metric_records.values():
        if isinstance(value := record.get(PARTITION_ID), int) and value >= 0:
            return value
    return None


class FederatedStrategy(Strategy):
    """The common half of all methods' strategies."""

    options_type: ClassVar[type[MethodOptions]]
    options: MethodOptions
    has_global: ClassVar[bool] = True  # whether the server's arrays are a model that can be used
    own: str | None = None  # prefix of the parameters that stay with the clients; None: all are shared

    def __init__(self, options: MethodOptions | None = None, rounds: RoundSettings | None = None) -> None:
        self.options = options or self.options_type()
        self.rounds = rounds or RoundSettings()
        self.num_rounds = 1
        self.roster = Roster()
        # nodes to wait for before the first round
        self._awaited = max(self.rounds.nodes - self.rounds.unseen, self.rounds.clients_per_round)
        self._asked: dict[int, int] = {}  # node id → client, of the round under way
        self._questions: list[Message] = []  # to these
        self._sent: NDArrays = {}
        self._refused = self._bytes_up = 0
        self._timeline: Mapping[str, float] = {}
        self._reason = ""  # of the last refusal

    # What a method decides

    def model_arrays(self, model: nn.Module) -> NDArrays:
        """What the server starts from: the model's weights and buffers."""
        return model_arrays(model)

    @abstractmethod
    def train_config(self, server_round: int) -> dict[str, Any]:
        """What the clients are told besides the round and the seed."""

    def decaying(self, server_round: int, *without: str) -> dict[str, Any]:
        """The options as clients are told them: with the round's learning rate, and without what is the server's."""
        options: Any = self.options
        told: dict[str, Any] = options.model_dump(by_alias=True, exclude={"lr_final", "personal_lr", *without})
        return {**told, "lr": linear_decay(options.lr, options.lr_final, server_round, self.num_rounds)}

    @property
    def remembers(self) -> bool:
        """Whether personal models need what the clients keep between rounds."""
        return self.own is not None

    def late_keys(self) -> set[str]:
        """The method's keys that do not matter before the last round, besides ``test-*`` and ``personal-*``."""
        return set()

    def evaluate_config(self, server_round: int) -> dict[str, Any]:
        """What clients that evaluate are told besides the round and the seed."""
        return self.train_config(server_round)

    def personal_config(self) -> dict[str, Any]:
        """What clients are told that make a personal model after the last round, and evaluate it."""
        told = self.train_config(self.num_rounds)
        return {**told, "lr": self.options.personal_lr or told["lr"], "personal": True}

    def draw(self, clients: Sequence[int], count: int, server_round: int, purpose: str) -> set[int]:
        """Whom a round asks: some of the connected clients, at random."""
        return draw(clients, count, self.rounds.seed, server_round, purpose)

    @abstractmethod
    def combine(self, replies: Sequence[Reply], sent: NDArrays) -> NDArrays:
        """The server's next arrays from the accepted replies, in the order of the clients."""

    def refuse(self, arrays: NDArrays) -> str | None:  # noqa: ARG002
        """Why a reply that passed the common checks is not acceptable; None when it is."""
        return None

    def refuse_metrics(self, metrics: Mapping[str, float]) -> str | None:  # noqa: ARG002
        """Why what a client tells besides its arrays is not acceptable; None when it is."""
        return None

    def posterior(self, arrays: NDArrays) -> DiagGaussian | None:  # noqa: ARG002
        """The Gaussian over the weights with which the method trains, if it does."""
        return None

    def predictive(self, arrays: NDArrays) -> DiagGaussian | None:
        """The Gaussian that predicts once training has ended: `posterior`, unless a method gives it another width.

        What only this depends on are keys that begin with ``test-``: they can be chosen after training.
        """
        return self.posterior(arrays)

    def scale(self) -> dict[str, float]:
        """What turns the arrays into a posterior besides themselves (λ and δ); kept with the outcome."""
        return {}

    def state(self) -> dict[str, float]:
        """What the strategy must remember between rounds besides its arrays."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Take up what `state` gave."""

    # Flower's Strategy

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t%s with %s", type(self).__name__, self.rounds)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the clients of this round to train."""
        self._sent = from_record(arrays)
        chosen = self._choose(grid, server_round, self.rounds.clients_per_round, "train")
        extra = self.train_config(server_round)
        return self._messages(chosen, arrays, config, server_round, MessageType.TRAIN, extra)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the acceptable replies; the posterior stays as it is when they are too few."""
        accepted = self._accept(replies, check_arrays=True)
        missing = len(self._asked) - len(accepted) - self._refused
        if len(accepted) < max(1, self.rounds.min_replies):
            log(
                WARNING,
                "Round %d is void: %d replies accepted, %d refused, %d missing (min-replies is %d)",
                *(server_round, len(accepted), self._refused, missing, self.rounds.min_replies),
            )
            return None, None
        combined = self._sent | self.combine(accepted, self.expected(self._sent))
        if reason := unusable(combined):
            log(WARNING, "Round %d is void: of the outcome, %s", server_round, reason)
            return None, None
        return to_record(combined), mean_metrics(accepted)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask clients to evaluate, in the rounds that are due."""
        every = self.rounds.evaluate_every
        if every == 0 or (server_round % every and server_round != self.num_rounds):
            return []
        try:
            chosen = self._choose(grid, server_round, self.rounds.evaluate_clients, "evaluate")
        except UserError as error:  # the round has been trained, and counts
            log(WARNING, "Round %d is not evaluated: %s", server_round, error)
            return []
        extra = self.evaluate_config(server_round)
        if self.rounds.final_samples and server_round == self.num_rounds:
            extra["eval-samples"] = self.rounds.final_samples
        return self._messages(chosen, arrays, config, server_round, MessageType.EVALUATE, extra)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:  # noqa: ARG002
        """The clients' metrics, averaged by their number of examples."""
        accepted = self._accept(replies, check_arrays=False)
        return mean_metrics(accepted) if accepted else None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        first_round: int = 1,
        callbacks: Sequence[Callback] = (),
    ) -> Result:
        """Flower's `start`, which can also begin at a later round (resume) and reports every round."""
        self.num_rounds = num_rounds
        deadline = self.rounds.deadline if timeout is None else timeout
        result, arrays, void = Result(), initial_arrays, 0
        result.arrays = arrays
        for server_round in range(first_round, num_rounds + 1):
            began = time.perf_counter()
            train = partial(self.configure_train, server_round, arrays, train_config or ConfigRecord(), grid)
            replies = list(send_and_receive(grid, train, deadline))
            combined, metrics = self.aggregate_train(server_round, replies)
            refused, accepted, bytes_up = self._refused, len(replies) - self._refused, self._bytes_up
            timeline = self._timeline
            if combined is not None:
                result.arrays = arrays = combined
            void = 0 if combined is not None else void + 1
            self._stop_if_hopeless(server_round, void)
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            evaluation = self._evaluate(server_round, arrays, evaluate_config or ConfigRecord(), grid, deadline, result)
            if evaluate_fn and (scores := evaluate_fn(server_round, arrays)) is not None:
                result.evaluate_metrics_serverapp[server_round] = scores
                evaluation |= numbers(scores)
            report = RoundReport(
                round=server_round,
                rounds=num_rounds,
                train_loss=numbers(metrics).get("train-loss") if metrics else None,
                seconds=time.perf_counter() - began,
                bytes_up=bytes_up,
                bytes_down=nbytes(self._sent) * len(self._asked),
                replies=accepted,
                refused=refused,
                evaluation=evaluation,
                timeline=timeline,
            )
            for callback in callbacks:
                callback(report, arrays)
        return result

    def everybody(self, grid: Grid, wait: bool = False) -> list[int]:
        """The connected clients; with `wait`, after all that are expected have had time to connect."""
        found = self._wait(lambda: self._online(grid), self.rounds.nodes if wait else 0)
        return [client for client, _ in found]

    def personal(self, grid: Grid, arrays: ArrayRecord, config: ConfigRecord, clients: Sequence[int]) -> list[Reply]:
        """Ask clients to make personal models of the server's arrays; what they tell of them."""
        chosen = [(client, node) for client, node in self._online(grid) if client in set(clients)]
        extra = self.personal_config()
        ask = partial(self._messages, chosen, arrays, config, self.num_rounds, MessageType.EVALUATE, extra)
        replies = send_and_receive(grid, ask, self.rounds.deadline)
        return self._accept(replies, check_arrays=False, amiss=scores_amiss)

    # Steps of a round

    def _stop_if_hopeless(self, server_round: int, void: int) -> None:
        """End a run whose every client failed in the very first round, or that has got nowhere for long."""
        if (server_round == 1 and void and self._refused >= len(self._asked) > 0) or void == MOST_VOID_ROUNDS:
            raise UserError(
                f"No reply could be used in {void} round(s), the last because of: {self._reason or 'silence'}."
            )

    def _evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
        deadline: float,
        result: Result,
    ) -> dict[str, float]:
        asked = dict(self._asked)
        ask = partial(self.configure_evaluate, server_round, arrays, config, grid)
        replies = list(send_and_receive(grid, ask, deadline))
        metrics = self.aggregate_evaluate(server_round, replies) if replies else None  # most rounds ask nobody
        self._asked = asked
        if metrics is None:
            return {}
        result.evaluate_metrics_clientapp[server_round] = metrics
        return {f"clients-{key}": value for key, value in numbers(metrics).items()}

    def _choose(self, grid: Grid, server_round: int, count: int, purpose: str) -> list[tuple[int, int]]:
        """Draw from the connected clients.

        Before the first round all of them are waited for, later only as many as a round needs: who has left is not.
        """
        least = max(1, self.rounds.min_replies)
        online = self._wait(lambda: self._taking_part(grid), max(least, self._awaited))
        if len(online) < least:
            hint = ", with numbers (--number), since unseen-clients is set" if self.rounds.unseen else ""
            raise UserError(
                f"Only {len(online)} nodes are connected after {self.rounds.node_wait:g} s but a round needs "
                f"{least}; start more nodes{hint} or lower min-replies."
            )
        self._awaited = 0
        chosen = self.draw([client for client, _ in online], count, server_round, purpose)
        return [(client, node) for client, node in online if client in chosen]

    def _wait(self, online: Callable[[], list[tuple[int, int]]], wanted: int) -> list[tuple[int, int]]:
        """Wait until as many nodes as wanted are connected, or for `node_wait`; those that are there then."""
        give_up = time.monotonic() + self.rounds.node_wait
        while len(found := online()) < wanted:
            if time.monotonic() > give_up:
                log(WARNING, "Going on with %d of %d nodes", len(found), wanted)
                break
            time.sleep(0.5)
        return found

    def _online(self, grid: Grid) -> list[tuple[int, int]]:
        """The connected clients; who is silent, e.g. busy with an old message, does not hold the others up for long."""
        return self.roster.online(grid, min(self.rounds.node_wait, self.rounds.deadline, QUERY_SECONDS))

    def _taking_part(self, grid: Grid) -> list[tuple[int, int]]:
        """The connected clients without those that shall stay unseen."""
        online = self._online(grid)
        return [who for who in online if not self.rounds.unseen or who[0] < self.rounds.nodes - self.rounds.unseen]

    def _messages(
        self,
        chosen: Sequence[tuple[int, int]],
        arrays: ArrayRecord,
        config: ConfigRecord,
        server_round: int,
        message_type: str,
        extra: Mapping[str, Any],
    ) -> list[Message]:
        self._asked = {node: client for client, node in chosen}
        own = {} if self.own is None else {"own": self.own}
        told = ConfigRecord({**config, **extra, **own, "server-round": server_round, "seed": self.rounds.seed})
        content = RecordDict({"arrays": arrays, "config": told})
        self._questions = [Message(content, dst_node_id=node, message_type=message_type) for _, node in chosen]
        return self._questions

    def _accept(self, messages: Iterable[Message], check_arrays: bool, amiss: Amiss = lambda _: None) -> list[Reply]:
        """The replies that can be trusted, in the order of the clients; the others are logged and counted."""
        accepted: dict[int, Reply] = {}
        self._refused = self._bytes_up = 0
        for message in messages:
            client = self._sender(message)
            reply = self._read(message, client, check_arrays, amiss)
            if isinstance(reply, Reply) and reply.client not in accepted:
                accepted[reply.client] = reply
                self._bytes_up += nbytes(reply.arrays)
                continue
            self._refused += 1
            reason = self._reason = "it answered twice" if isinstance(reply, Reply) else reply
            log(WARNING, "Refused the reply of client %s: %s", "?" if client is None else client, reason)
        longest = max(accepted.values(), key=worked, default=None)
        self._timeline = {"client": longest.client, **longest.timeline} if longest and longest.timeline else {}
        return [accepted[client] for client in sorted(accepted)]

    def _sender(self, reply: Message) -> int | None:
        """Whose reply it is; if Flower answers for a node that was lost, only the question tells."""
        node, answered = reply.metadata.src_node_id, reply.metadata.reply_to_message_id
        if reply.has_error() and answered:
            node = next((q.metadata.dst_node_id for q in self._questions if q.metadata.message_id == answered), node)
        return self._asked.get(node)

    def _read(self, message: Message, client: int | None, check_arrays: bool, amiss: Amiss) -> Reply | str:
        """A reply, or the reason to refuse it."""
        if message.has_error():
            return f"error {message.error.code}: {message.error.reason}"
        if client is None:
            return f"node {message.metadata.src_node_id} was not asked"
        try:
            metrics = numbers(only(message.content.metric_records, "MetricRecord"))
            arrays = from_record(only(message.content.array_records, "ArrayRecord")) if check_arrays else {}
        except Exception as error:  # whatever is in there: a reply must not end the run
            return f"it cannot be read ({error})"
        examples = metrics.pop(NUM_EXAMPLES, 0)
        if not (1 <= examples <= self.rounds.max_examples and examples == int(examples)):
            return f"{NUM_EXAMPLES} is {examples}, which is not a whole number from 1 to {self.rounds.max_examples}"
        if not all(np.isfinite(value) for value in metrics.values()):
            return "a metric is not finite"
        if reason := amiss(metrics):
            return reason
        if check_arrays and (reason := mismatch(arrays, self.expected(self._sent)) or unusable(arrays)):
            return reason
        if check_arrays and (reason := self.refuse(arrays) or self.refuse_metrics(metrics)):
            return reason
        return Reply(client, int(examples), arrays, metrics, self._timed(message, split_off(metrics)))

    def _timed(self, reply: Message, on_node: Mapping[str, float]) -> Mapping[str, float]:
        """The timeline of a reply whose node measured its part."""
        node = reply.metadata.src_node_id
        sent = next((q.metadata.created_at for q in self._questions if q.metadata.dst_node_id == node), None)
        if sent is None or len(on_node) < len(ON_NODE):
            return {}
        return whole(on_node, sent, reply.metadata.created_at, time.time())

    def expected(self, sent: NDArrays) -> NDArrays:
        """Arrays with the keys, shapes and types a reply must have: those that were sent and are shared."""
        return {key: array for key, array in sent.items() if not is_own(key, self.own)}


def send_and_receive(grid: Grid, messages: Callable[[], Iterable[Message]], timeout: float | None) -> Iterable[Message]:
    """The replies to messages, which are made and sent anew if the SuperLink ends while it takes them.

    Flower sends arrays in pieces, in a session that a restart of the SuperLink does not survive.
    """
    pushes = 0
    while asked := list(messages()):
        try:
            return grid.send_and_receive(asked, timeout=timeout)
        except ObjectPushError:
            pushes += 1
            if pushes == MOST_PUSHES:
                raise
            log(WARNING, "The SuperLink has lost what it was being sent; it is sent again.")
    return []


def worked(reply: Reply) -> float:
    """Seconds that a client's node was busy with its reply, by its own clock."""
    return sum(reply.timeline.get(phase, 0.0) for phase in ON_NODE)


def draw(clients: Sequence[int], count: int, seed: int, server_round: int, purpose: str = "train") -> set[int]:
    """Some of the clients, at random by seed and round alone.

    Every client has a random rank of its own and the lowest are drawn, so that a client that is not there changes
    nothing for the others.

    >>> sorted(draw(range(20), 4, seed=0, server_round=1))
    [11, 12, 16, 18]
    >>> sorted(draw(range(12), 4, seed=0, server_round=1) & {11})
    [11]
    """

    def rank(client: int) -> bytes:
        return blake2b(f"{seed}/{server_round}/{purpose}/{client}".encode(), digest_size=8).digest()

    return set(nsmallest(count, clients, key=rank))


def unusable(arrays: NDArrays) -> str | None:
    """Which array has NaN, infinity or a number so large that sums of float32 would overflow."""
    for key, array in arrays.items():
        # Smallest and largest need no temporary array, and are NaN when there is one.
        if array.dtype.kind == "f" and array.size and not (-LARGEST < array.min() <= array.max() < LARGEST):
            return f"{key} has a value that is not a number from -{LARGEST:g} to {LARGEST:g}"
    return None


def scores_amiss(metrics: Mapping[str, float]) -> str | None:
    """Why what a client tells of its personal model is not acceptable; None when it is.

    >>> scores_amiss({"train-examples": 5, "mean-accuracy": 0.5})
    'mean-ece, mean-nll, mean-brier missing'
    """
    if not metrics.get(TRAIN_EXAMPLES, 0) >= 1:
        return f"{TRAIN_EXAMPLES} is {metrics.get(TRAIN_EXAMPLES)}, which is not a number of examples"
    for keys in PERSONAL_SCORES.values():
        if 0 < len(missing := [key for key in keys if key not in metrics]) < len(keys):
            return f"{', '.join(missing)} missing"
    return None


def without_width(arrays: NDArrays, bound: float = 0.0) -> str | None:
    """Which Hessian is somewhere not above the bound, below which there is no Gaussian."""
    for key, array in arrays.items():
        if key.startswith(HESS) and array.size and not array.min() > bound:
            return f"{key} gives a precision that is not positive"
    return None


def only(records: Mapping[str, Any], kind: str) -> Any:
    """The one record of its kind."""
    if len(records) != 1:
        raise ValueError(f"expected exactly one {kind}, found {len(records)}")
    return next(iter(records.values()))


def numbers(record: MetricRecord) -> dict[str, float]:
    """The single numbers of a metric record (it may also hold lists)."""
    return {key: value for key, value in record.items() if isinstance(value, int | float)}


def mean_metrics(replies: Sequence[Reply]) -> MetricRecord:
    """Each metric that all replies have, averaged by the number of examples."""
    keys = [key for key in replies[0].metrics if all(key in reply.metrics for reply in replies)]
    total = sum(reply.examples for reply in replies)
    return MetricRecord({key: sum(reply.examples * reply.metrics[key] for reply in replies) / total for key in keys})


def weights(replies: Sequence[Reply]) -> list[float]:
    """``w_k = N_k / Σ N``."""
    total = sum(reply.examples for reply in replies)
    return [reply.examples / total for reply in replies]


def average(replies: Sequence[Reply], keys: Sequence[str]) -> NDArrays:
    """``Σ w_k x_k`` for each of the keys."""
    share = weights(replies)
    return {key: weighted_mean(share, [tensor(reply.arrays[key]) for reply in replies]).numpy() for key in keys}


def linear_decay(first: float, last: float, server_round: int, num_rounds: int) -> float:
    """From `first` in round 1 to `last` in the last round.

    >>> [round(linear_decay(0.1, 0.01, r, 4), 3) for r in (1, 2, 3, 4)]
    [0.1, 0.07, 0.04, 0.01]
    """
    done = (server_round - 1) / (num_rounds - 1) if num_rounds > 1 else 0.0
    return first + (last - first) * min(1.0, done)
