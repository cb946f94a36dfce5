"""The Ray-backed engine: Flower's `Grid` directly on Ray actors, without a SuperLink.

The same ServerApp, Strategy and ClientApp as under ``flwr run``, only the transport differs: a few persistent
actors (each with its caches of data and model) work through the messages of all virtual nodes. What the messages of a
round share (the server's arrays) is put into Ray's object store once and read by all actors without a copy; the
arrays of the replies come back the same way. Short tasks are sent in bunches, long ones one by one to whichever
actor is free, so that neither the calls nor an unequal split cost time.
"""

import logging
import math
import os
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import ray
import torch
from flwr.app import Context, Error, Message, Metadata, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedivon_flwr.errors import UserError

FIRST_NODE_ID = 1000  # above the ids that Flower keeps for itself
PATIENCE_SECONDS = 0.5  # a bunch that lasts longer is broken up
INLINE_BYTES = 1_500_000
BUNCH_SECONDS = 0.02  # a call should last at least this long, so that its overhead does not matter


@dataclass(frozen=True)
class Resources:
    """What a virtual client gets, and where Ray is."""

    cpus: float = 1.0
    gpus: float = 0.0
    address: str | None = None  # of a running Ray cluster; None starts Ray on this machine


class Task(NamedTuple):
    """A message for a node, without its content."""

    metadata: Metadata
    content: int  # which of the call's contents
    state: RecordDict  # the node's memory between messages


class Outcome(NamedTuple):
    """What became of a task."""

    reply: Message
    state: RecordDict
    seconds: float


class Worker:
    """Runs a ClientApp for one virtual node after the other; becomes a Ray actor."""

    def __init__(self, client_app: str | ClientApp, run_config: Mapping[str, Any], nodes: int) -> None:
        self.run_config, self.nodes = dict(run_config), nodes
        self.lock = threading.Lock()
        self.number, self.started = 0, 0  # of the call under way, and of its messages that were begun
        self.done: list[Outcome] = []
        self.stopped: set[int] = set()  # calls that shall not begin another message
        self.app = load_app(client_app) if isinstance(client_app, str) else client_app

    def work(self, number: int, tasks: Sequence[Task], *contents: RecordDict) -> list[Outcome]:
        """Work through some messages, unless told to stop after the one under way."""
        with self.lock:
            self.number, self.started, self.done = number, 0, []
        for task in tasks:
            with self.lock:
                if number in self.stopped:
                    break
                self.started += 1
            self.done.append(self._one(task, contents[task.content]))
        return self.done

    @ray.method(concurrency_group="beside")
    def surrender(self, number: int) -> tuple[list[Outcome], int]:
        """Begin no further message of a call; what it has done, and how many were begun. Answered beside `work`."""
        with self.lock:
            self.stopped.add(number)
            if number == self.number:
                return list(self.done), self.started
            return [], 0 if number > self.number else sys.maxsize  # still to come, or over: its result is on the way

    def _one(self, task: Task, content: RecordDict) -> Outcome:
        began, node = time.perf_counter(), task.metadata.dst_node_id
        message = Message(content=content, metadata=task.metadata)  # type: ignore[call-overload]  # Flower's own way
        context = Context(
            run_id=task.metadata.run_id,
            node_id=node,
            node_config={"partition-id": node - FIRST_NODE_ID, "num-partitions": self.nodes},
            state=task.state,
            run_config=dict(self.run_config),
        )
        try:
            reply = self.app(message, context)
        except Exception as error:  # whatever the app does, only this client is lost
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, describe(error)), reply_to=message)
        return Outcome(reply, context.state, time.perf_counter() - began)


def load_app(reference: str) -> Any:
    """``package.module:name`` as an object."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def describe(error: BaseException) -> str:
    """An exception as one line; our own sentences stand for themselves."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


@dataclass
class Call:
    """Messages that were given to an actor together."""

    number: int
    result: Any
    messages: list[Message]


@dataclass
class Actor:
    """An actor and its calls: the one under way, and maybe a next one, so that it never waits for the driver."""

    handle: Any
    calls: list[Call] = field(default_factory=list)


class RayGrid(Grid):
    """Flower's `Grid` on Ray actors; use it through `ray_grid`, which cleans up."""

    def __init__(
        self,
        client_app: str | ClientApp,
        run_config: Mapping[str, Any],
        nodes: int,
        resources: Resources,
    ) -> None:
        self._run = Run.create_empty(run_id=1)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1
        self._nodes = range(FIRST_NODE_ID, FIRST_NODE_ID + nodes)
        self._app = ray.put(client_app)
        self._arguments, self._resources = (dict(run_config), nodes), resources
        self._actors = [Actor(self._new_actor()) for _ in range(min(nodes, capacity(resources)))]
        self._queue: deque[Message] = deque()
        self._contents: dict[int, tuple[RecordDict, Any]] = {}  # what the queued messages share, by identity
        self._replies: dict[str, Message] = {}
        self._wanted: set[str] = set()  # messages that nobody has given up on
        self._suspects: set[str] = set()  # messages that were with one whose process died: to be tried alone
        self._states: dict[int, RecordDict] = {}
        self._seconds: dict[int, float] = {}  # how long a node's last training took
        self._typical = 0.0  # seconds of a message, lately
        self._count = self._calls = 0

    # Flower's Grid

    def set_run(self, run: Run) -> None:
        """Keep information about the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """Information about the run."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Flower's older way to make a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All virtual nodes are always there."""
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages; their contents are put into the object store when they are first needed."""
        ids = []
        for message in messages:
            self._count += 1
            message.metadata.__dict__["_message_id"] = str(self._count)
            self._queue.append(message)
            ids.append(message.metadata.message_id)
        self._wanted.update(ids)
        # The longest first: the short ones fill the gaps at the end.
        self._queue = deque(sorted(self._queue, key=lambda m: -self._seconds.get(m.metadata.dst_node_id, 0.0)))
        self._dispatch()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are there."""
        self._collect(0.0)
        return self._take(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for all replies, or until the timeout for those that are there by then."""
        ids = list(self.push_messages(messages))
        deadline = None if timeout is None else time.monotonic() + timeout
        while waiting := [i for i in ids if i not in self._replies]:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                self._give_up(waiting)
                break
            self._collect(left)
        return self._take(ids)

    # How it works

    def _new_actor(self) -> Any:
        kind = ray.remote(concurrency_groups={"beside": 1})(Worker)  # type: ignore[call-overload]
        options = {"num_cpus": self._resources.cpus, "num_gpus": self._resources.gpus}
        return kind.options(**options).remote(self._app, *self._arguments)

    def _dispatch(self) -> None:
        """Give queued messages to idle actors and, while there are plenty of long ones, one ahead to busy actors."""
        idle = [actor for actor in self._actors if not actor.calls]
        for others, actor in zip(reversed(range(len(idle))), idle, strict=True):
            if self._queue:
                share = math.ceil(len(self._queue) / (others + 1))
                self._send(actor, 1 if self._suspect(self._queue[0]) else min(share, self._bunch()))
        for actor in self._actors:
            plenty = len(self._queue) > len(self._actors) and self._bunch() == 1
            if (
                plenty
                and len(actor.calls) == 1
                and not any(map(self._suspect, [self._queue[0], *actor.calls[0].messages]))
            ):
                self._send(actor, 1)
        if not self._queue:
            self._contents.clear()

    def _send(self, actor: Actor, count: int) -> None:
        messages = [self._queue.popleft() for _ in range(count)]
        contents = {id(m.content): self._shared(m.content) for m in messages}
        place = {key: i for i, key in enumerate(contents)}
        tasks = [
            Task(m.metadata, place[id(m.content)], self._states.get(m.metadata.dst_node_id) or RecordDict())
            for m in messages
        ]
        self._calls += 1
        result = actor.handle.work.remote(self._calls, tasks, *contents.values())
        actor.calls.append(Call(self._calls, result, messages))

    def _suspect(self, message: Message) -> bool:
        return message.metadata.message_id in self._suspects

    def _bunch(self) -> int:
        """How many messages make a call long enough."""
        return math.ceil(BUNCH_SECONDS / self._typical) if self._typical else 1

    def _shared(self, content: RecordDict) -> Any:
        """A content in the object store, put there once however many messages carry it."""
        if id(content) not in self._contents:
            self._contents[id(content)] = (content, ray.put(content))
        return self._contents[id(content)][1]

    def _collect(self, timeout: float | None) -> None:
        """Wait for a call to end, keep its replies, and give the actor the next messages."""
        calls = {call.result: (actor, call) for actor in self._actors for call in actor.calls}
        if not calls:
            return
        left = math.inf if timeout is None else timeout
        waiting = self._not_begun() if any(not actor.calls for actor in self._actors) else []
        patience = PATIENCE_SECONDS if waiting else math.inf
        wait = min(left, patience)
        done, _ = ray.wait(list(calls), num_returns=1, timeout=None if wait == math.inf else wait)
        if not done and patience <= left:
            self._break_up(waiting)
        for result in done:
            actor, call = calls[result]
            try:
                outcomes = ray.get(result)
            except ray.exceptions.RayError as error:
                self._bury(actor, error)
                continue
            actor.calls.remove(call)
            self._keep(outcomes)
            answered = {outcome.reply.metadata.reply_to_message_id for outcome in outcomes}
            # Not begun, because the actor was told so after nobody waited for its answer any more.
            self._queue.extendleft(m for m in call.messages if m.metadata.message_id not in answered)
        self._dispatch()

    def _not_begun(self) -> list[tuple[Actor, Call]]:
        """Calls with messages that wait for others of the same actor."""
        return [
            (actor, call)
            for actor in self._actors
            for place, call in enumerate(actor.calls)
            if place > 0 or len(call.messages) > 1
        ]

    def _keep(self, outcomes: Sequence[Outcome]) -> None:
        for reply, state, seconds in outcomes:
            node, answered = reply.metadata.src_node_id, reply.metadata.reply_to_message_id
            self._seconds[node] = seconds
            self._typical += 0.1 * (seconds - self._typical)
            if answered in self._wanted:  # otherwise it is late, and the node may be further on by now
                self._replies[answered] = reply
                if len(state):
                    self._states[node] = state

    def _bury(self, actor: Actor, error: BaseException) -> None:
        """An actor's process died: a message that was alone there is lost, several get another try, each alone."""
        lost = [message for call in actor.calls for message in call.messages]
        actor.handle, actor.calls = self._new_actor(), []
        if len(lost) == 1:
            self._keep([Outcome(crashed(lost[0], error), RecordDict(), 0.0)])
            return
        again = [message for message in lost if message.metadata.message_id in self._wanted]
        self._suspects.update(message.metadata.message_id for message in again)
        self._queue.extendleft(again)

    def _break_up(self, waiting: Sequence[tuple[Actor, Call]]) -> None:
        """Some actor is idle while messages wait for a long one elsewhere: take back what is not begun."""
        for actor, call in waiting:
            try:
                outcomes, begun = ray.get(actor.handle.surrender.remote(call.number), timeout=PATIENCE_SECONDS)
            except ray.exceptions.RayError:  # it died meanwhile, or is still starting: the next look will tell
                continue
            self._keep(outcomes)
            self._queue.extendleft(call.messages[begun:])
            call.messages = call.messages[len(outcomes) : begun]

    def _give_up(self, ids: Iterable[str]) -> None:
        """Drop messages that nobody waits for any more; those under way run to their end unheard."""
        self._wanted.difference_update(ids)
        self._queue = deque(m for m in self._queue if m.metadata.message_id in self._wanted)

    def _take(self, ids: Iterable[str]) -> list[Message]:
        there = [i for i in ids if i in self._replies]
        self._wanted.difference_update(there)
        return [self._replies.pop(i) for i in there]


def crashed(message: Message, error: BaseException) -> Message:
    """The reply on behalf of a client whose process died."""
    reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return Message(Error(ErrorCode.CLIENT_APP_CRASHED, f"the client's process died: {reason}"), reply_to=message)


def gpu_share(cpus: float) -> float:
    """This machine's GPUs, divided among as many clients as its CPUs carry at once."""
    actors = max(1, int((os.cpu_count() or 1) / cpus)) if cpus else 1
    return torch.cuda.device_count() / actors


def capacity(resources: Resources) -> int:
    """How many actors fit into the cluster at once, machine by machine."""
    count = 0
    for machine in ray.nodes():  # type: ignore[no-untyped-call]
        there = machine["Resources"] if machine["Alive"] else {}
        limits = [there.get("CPU", 0.0) / resources.cpus] if resources.cpus else []
        limits += [there.get("GPU", 0.0) / resources.gpus] if resources.gpus else []
        count += int(min(limits, default=1))
    if count == 0:
        raise UserError(
            f"No machine of the Ray cluster has the {resources.cpus:g} CPUs and {resources.gpus:g} GPUs that a client "
            "asks for; lower --client-cpus or --client-gpus."
        )
    return count


@contextmanager
def ray_grid(
    client_app: str | ClientApp, run_config: Mapping[str, Any], nodes: int, resources: Resources | None = None
) -> Iterator[RayGrid]:
    """A grid of virtual nodes; Ray is started (or joined) and left as it was found."""
    resources = resources or Resources()
    started_here = not ray.is_initialized()
    if started_here:
        start_ray(resources.address)
    try:
        yield RayGrid(client_app, run_config, nodes, resources)
    finally:
        if started_here:
            ray.shutdown()


def start_ray(address: str | None) -> None:
    """Start Ray on this machine, or join the cluster at an address."""
    if address and ":" in address and "://" not in address:
        check_reachable(address)  # Ray itself would try for minutes
    # Workers must find the same code as this process, wherever that was imported from.
    path = os.pathsep.join(p for p in sys.path if p)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about GPUs and num_gpus=0: what it does now is right
            ray.init(
                address=address or "local",  # without an address Ray would join whatever cluster it finds
                include_dashboard=None if address else False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": {"PYTHONPATH": path}},
                # Up to this size an object travels inside the call: fetching it from the store takes longer.
                _system_config=None if address else {"max_direct_call_object_size": INLINE_BYTES},
            )
    except ConnectionError:
        raise UserError(f"There is no Ray cluster at '{address}'; start one with `ray start --head`.") from None


def check_reachable(address: str) -> None:
    """Refuse an address at which nobody listens."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError):
        raise UserError(f"There is no Ray cluster at '{address}'; start one with `ray start --head`.") from None
