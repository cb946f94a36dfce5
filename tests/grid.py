"""A federation inside the test's own process: Flower's `Grid`, calling the real ClientApp node by node.

Node ids are drawn anew for every grid and replies come back in any order, as in a real federation.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedivon_flwr.client_app import app as fedivon_app

SMALL: dict[str, Any] = {  # settings of a run of a second
    "clients": 6,
    "clients-per-round": 3,
    "rounds": 4,
    "evaluate-every": 2,
    "eval-samples": 2,
    "test-samples": 3,
    "local-epochs": 1,
    "partitioner": "iid",
}
Tamper = Callable[[Message, int], Iterable[Message]]  # what arrives instead of the reply of a partition


class LocalGrid(Grid):
    """`nodes` virtual nodes with the partitions 0, 1, … under random ids."""

    def __init__(
        self,
        run_config: Mapping[str, Any],
        nodes: int,
        *,
        app: ClientApp = fedivon_app,
        tamper: Tamper | None = None,
        shuffle: bool = True,
        partitioned: bool = True,
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1
        self._random = random.SystemRandom()
        ids = self._random.sample(range(1000, 2**62), nodes)
        self.partitions = {node: partition for partition, node in enumerate(ids)}
        self.asked: list[tuple[str, int, int, dict[str, Any]]] = []  # (type, round, partition, config) of all messages
        self.tamper, self.shuffle, self.partitioned = tamper, shuffle, partitioned
        self._run_config, self._app = dict(run_config), app
        self._run = Run.create_empty(run_id=1)
        self._count = 0
        self.states: dict[int, RecordDict] = {}
        self.node_config: Callable[[int], dict[str, Any]] = lambda _: {}  # what else a node knows of itself

    def clients(self, message_type: str = "train") -> list[tuple[int, int]]:
        """Who was asked: ``(round, partition)``, sorted."""
        return sorted((server_round, who) for kind, server_round, who, _ in self.asked if kind == message_type)

    # Flower's Grid

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return self._random.sample(list(self.partitions), len(self.partitions))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = [reply for message in messages for reply in self._deliver(message)]
        if self.shuffle:
            self._random.shuffle(replies)
        return replies

    def _deliver(self, message: Message) -> Iterable[Message]:
        self._count += 1
        message.metadata.__dict__["_message_id"] = str(self._count)
        node = message.metadata.dst_node_id
        partition, kind = self.partitions[node], message.metadata.message_type
        config = message.content.config_records.get("config", ConfigRecord())
        self.asked.append((kind, int(config.get("server-round", 0)), partition, dict(config)))  # type: ignore[arg-type]
        mine: dict[str, Any] = {"partition-id": partition, "num-partitions": len(self.partitions)}
        mine |= self.node_config(partition)
        state = self.states.setdefault(node, RecordDict())
        context = Context(1, node, mine if self.partitioned else {}, state, dict(self._run_config))
        try:
            reply = self._app(message, context)
            self.states[node] = context.state
        except Exception as error:
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)
        return self.tamper(reply, partition) if self.tamper and kind == "train" else [reply]
