"""Where the time of a deployed round goes.

Flower starts a process for every message on a node, so a client's answer takes

    push     from the server's message to the start of the node's process: transport, and how often the node asks
    start    Python and Flower start, and fetch the message
    import   our package and PyTorch are imported
    load     data and model
    train    (or evaluate)
    reply    from the node's answer to the server: transport, how often the server asks, and the slower clients

The node measures the middle four and the server has the rest from the messages' own times. These are of two clocks: if
one is ahead, `push` is too long and `reply` too short by that, and the sum is right. The processes of virtual nodes are
there before the messages: for these, `start` and `import` are 0.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the package must not import Flower where it is not needed
    from flwr.app import Message

PREFIX = "seconds-"
PROGRAM = "flwr-clientapp"  # with which Flower answers one message
ON_NODE = ("start", "import", "load", "train")
BEGAN = time.monotonic()  # this module is the first of the package that is imported


def process_age() -> float | None:
    """Seconds since this process was started; None where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return None


class Stopwatch:
    """A node's part of the timeline, for one message after the other."""

    def __init__(self) -> None:
        age, since = process_age(), time.monotonic() - BEGAN
        self._start = 0.0 if age is None else max(0.0, age - since)
        self._fresh = Path(sys.argv[0]).name == PROGRAM
        self._last, self._laps = BEGAN, dict[str, float]()

    def begin(self) -> None:
        """A message has come; a process of Flower's was started for it, and has imported the package."""
        now = time.monotonic()
        self._laps = {"start": self._start, "import": now - BEGAN} if self._fresh else {"start": 0.0, "import": 0.0}
        self._fresh, self._last = False, now

    def lap(self, phase: str) -> None:
        """A phase has ended."""
        now = time.monotonic()
        self._laps[phase], self._last = now - self._last, now

    def note(self, reply: "Message") -> "Message":
        """The reply, with the phases in its metrics."""
        self.lap("train")
        for record in reply.content.metric_records.values():
            record.update({PREFIX + phase: seconds for phase, seconds in self._laps.items()})
        return reply


def split_off(metrics: dict[str, float]) -> dict[str, float]:
    """Take what a node measured out of its metrics."""
    return {phase: metrics.pop(PREFIX + phase) for phase in ON_NODE if PREFIX + phase in metrics}


def whole(on_node: Mapping[str, float], sent: float, answered: float, received: float) -> dict[str, float]:
    """All phases, in seconds, from the node's own and the (Unix) times of question, answer and receipt.

    >>> whole({"start": 2.0, "import": 3.0, "load": 0.5, "train": 4.0}, 100.0, 111.0, 112.5)
    {'push': 1.5, 'start': 2.0, 'import': 3.0, 'load': 0.5, 'train': 4.0, 'reply': 1.5}
    """
    push = answered - sum(on_node.values()) - sent
    return {"push": push, **on_node, "reply": received - answered}
