"""How far a run is, read from its folder: the same for every engine."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedivon_flwr.runs import draws_done, read_metrics
from fedivon_flwr.settings import Settings
from simulation.report import number

POLL_SECONDS = 0.5
LINE_SECONDS = 10.0  # between lines where there is no terminal to redraw
RECENT = 50  # rounds that the pace is measured on


@dataclass(frozen=True)
class RunState:
    """A run under way."""

    settings: Settings
    rows: list[dict[str, Any]]  # of metrics.jsonl
    draws: int  # of the final evaluation
    finished: bool

    @classmethod
    def of(cls, settings: Settings) -> "RunState":
        """As the run's folder has it now."""
        path = Path(settings.run_dir)
        return cls(settings, list(read_metrics(path)), draws_done(path), (path / "summary.json").exists())

    @property
    def rounds_done(self) -> int:
        """The last round."""
        return int(self.rows[-1]["round"]) if self.rows else 0

    def pace(self) -> tuple[float, float] | None:
        """Seconds of a round without evaluation, and of one weight sample's pass over the test data; None at first."""
        recent = self.rows[-RECENT:]
        plain = [row["seconds"] for row in recent if "mean" not in row]
        scored = [row for row in recent if "mean" in row]
        if not plain:
            return None
        extra = median(row["seconds"] for row in scored) - median(plain) if scored else 0.0
        passes = 1 + (self.settings.eval_samples if scored and "mc" in scored[-1] else 0)
        return median(plain), max(0.0, extra) / passes

    def total_seconds(self) -> float | None:
        """What the whole run takes at its present pace; None before that is known."""
        if (pace := self.pace()) is None:
            return None
        a_round, a_pass = pace
        sampled = any("mc" in row for row in self.rows)
        evaluations = self.settings.rounds / self.settings.evaluate_every
        passes = evaluations * (1 + self.settings.eval_samples * sampled) + 1 + self.settings.test_samples * sampled
        return self.settings.rounds * a_round + passes * a_pass

    def fraction(self, whole: float) -> float:
        """The part of a run's time, `whole` seconds, that is behind it."""
        if self.finished:
            return 1.0
        pace = self.pace()
        if pace is None:
            return 0.0
        final = min(whole, self.settings.test_samples * pace[1])
        rounds = (whole - final) * self.rounds_done / self.settings.rounds
        return (rounds + final * self.draws / self.settings.test_samples) / whole if whole else 1.0

    def scores(self) -> str:
        """Accuracy and ECE of the last evaluation, or else the training loss."""
        if scored := next((row for row in reversed(self.rows) if "mean" in row), None):
            best = scored.get("mc", scored["mean"])
            return f"accuracy {number(best['accuracy'], 3)}  ECE {number(best['ece'], 3)}"
        loss = self.rows[-1]["train_loss"] if self.rows else None
        return "" if loss is None else f"loss {loss:.3f}"

    def words(self) -> str:
        """For a line of progress."""
        if not self.rows:
            return "starting"
        return "  ".join(part for part in (f"round {self.rounds_done}", self.scores(), self.evaluating()) if part)

    def evaluating(self) -> str:
        """How far the final evaluation is, once the rounds are done."""
        if self.rounds_done < self.settings.rounds or self.finished:
            return ""
        return "final evaluation" + (f" ({self.draws} of {self.settings.test_samples})" if self.draws else "")


class Watch:
    """Follows a run while it is open."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self.settings, self.console = settings, console
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._began: tuple[float, int] | None = None  # when, and at which round, this watch saw the first round

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        name = f"{self.settings.method} on {Path(self.settings.dataset).stem}"
        columns = (
            TextColumn("{task.description}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as bar:
            task = bar.add_task(name, total=self.settings.rounds, state="starting")
            last_line = time.monotonic()
            while True:
                ending = self._stop.wait(POLL_SECONDS)
                state = RunState.of(self.settings)
                words = self._describe(state)
                bar.update(task, completed=state.rounds_done, state=words)
                if not self.console.is_terminal and (ending or time.monotonic() - last_line > LINE_SECONDS):
                    last_line = time.monotonic()
                    line = f"{name}: round {state.rounds_done}/{self.settings.rounds}  {words}"
                    self.console.print(line, highlight=False, soft_wrap=True)
                if ending:
                    return

    def _describe(self, state: RunState) -> str:
        """Accuracy, ECE, speed and time left in words."""
        if not state.rows:
            return "starting"
        done, now = state.rounds_done, time.monotonic()
        if self._began is None:
            self._began = (now, done)
        words = [state.scores()]
        if done == self.settings.rounds:
            words.append(state.evaluating() or "done")
        elif now > self._began[0] and done > self._began[1]:
            speed = (done - self._began[1]) / (now - self._began[0])
            words.append(f"{speed:.1f} rounds/s  {duration((self.settings.rounds - done) / speed)} left")
        return "  ".join(word for word in words if word)


def duration(seconds: float) -> str:
    """For people.

    >>> duration(42.4), duration(700), duration(8000)
    ('42 s', '12 min', '2 h 13 min')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
