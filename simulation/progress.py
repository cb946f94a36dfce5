"""How far a run is, read from its folder: the same for every engine."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from clients import CLIENTS
from fedivon_flwr.runs import draws_done, read_lines, read_metrics
from fedivon_flwr.settings import Settings
from simulation.report import number, with_scores

POLL_SECONDS = 0.5
LINE_SECONDS = 10.0  # between lines where there is no terminal to redraw
RECENT = 20  # rounds, and evaluations, that the pace is measured on


@dataclass(frozen=True)
class RunState:
    """A run under way."""

    settings: Settings
    rows: list[dict[str, Any]]  # of metrics.jsonl
    draws: int  # of the final evaluation
    finished: bool
    people: Sequence[Mapping[str, Any]] = ()  # of clients.jsonl

    @classmethod
    def of(cls, settings: Settings) -> "RunState":
        """As the run's folder has it now."""
        path = Path(settings.run_dir)
        finished, people = (path / "summary.json").exists(), list(read_lines(path / "clients.jsonl"))
        return cls(settings, [with_scores(row) for row in read_metrics(path)], draws_done(path), finished, people)

    @property
    def rounds_done(self) -> int:
        """The last round."""
        return int(self.rows[-1]["round"]) if self.rows else 0

    @property
    def passes(self) -> int:
        """Passes over the test data of an evaluation on the way: at the mean, and one for each weight sample."""
        return 1 + self.settings.eval_samples * any("mc" in row for row in self.rows)

    @property
    def final_draws(self) -> int:
        """Weight samples of the server's final evaluation; none for a method without a posterior."""
        draws = self.settings.evaluation == "server" and CLIENTS[self.settings.method].first_hess is not None
        return self.settings.test_samples if draws else 0

    def pace(self) -> tuple[float, float] | None:
        """Seconds of a round without evaluation, and of one pass over the test data; None before the first round."""
        plain = [row["seconds"] for row in self.rows if "mean" not in row][-RECENT:]
        scored = [row["seconds"] for row in self.rows if "mean" in row][-RECENT:]
        if not plain:
            return (median(scored), 0.0) if scored else None
        extra = median(scored) - median(plain) if scored else 0.0
        return median(plain), max(0.0, extra) / self.passes

    @property
    def personal_models(self) -> int:
        """Personal models to be made in the end."""
        return self.settings.clients if self.settings.personal else 0

    def seconds(self, rounds: int, draws: int, people: int) -> float | None:
        """What so many rounds, weight samples of the final evaluation and personal models take.

        None before the pace is known; that of personal models is 0 until there is one.
        """
        if (pace := self.pace()) is None:
            return None
        a_round, a_pass = pace
        a_client = median(row.get("seconds", 0.0) for row in self.people) if self.people else 0.0
        evaluations = rounds / self.settings.evaluate_every * self.passes + draws
        return rounds * a_round + evaluations * a_pass + people * a_client

    def seconds_left(self) -> float | None:
        """Until the run is finished; None before the pace is known."""
        if self.finished:
            return 0.0
        rounds, people = self.settings.rounds - self.rounds_done, self.personal_models - len(self.people)
        return self.seconds(rounds, self.final_draws - self.draws, people)

    def scores(self) -> str:
        """Accuracy and ECE of the last evaluation, or else the training loss."""
        if scored := next((row for row in reversed(self.rows) if "mean" in row), None):
            best = scored.get("mc", scored["mean"])
            return f"accuracy {number(best['accuracy'], 3)}  ECE {number(best['ece'], 3)}"
        loss = self.rows[-1]["train_loss"] if self.rows else None
        return "" if loss is None else f"loss {loss:.3f}"

    def words(self) -> str:
        """For a line of progress: the last scores, the phase, the time left."""
        if not self.rows:
            return "starting"
        if self.finished:
            return f"{self.scores()}  done"
        phase, then, trained = "", "", self.rounds_done == self.settings.rounds
        if trained and len(self.people) < self.personal_models:
            phase = f"personal models ({len(self.people)} of {self.personal_models})"
        elif trained:
            phase = "final evaluation" + (f" ({self.draws} of {self.settings.test_samples})" if self.draws else "")
        elif self.personal_models:
            then = f", then {self.personal_models} personal models"
        left = f"{duration(self.seconds_left() or 0.0)} left{then}"
        return "  ".join(part for part in (self.scores(), phase, left) if part)


class Watch:
    """Follows a run while it is open."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self.settings, self.console = settings, console
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

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
                words = state.words()
                bar.update(task, completed=state.rounds_done, state=words)
                if not self.console.is_terminal and (ending or time.monotonic() - last_line > LINE_SECONDS):
                    last_line = time.monotonic()
                    line = f"{name}: round {state.rounds_done}/{self.settings.rounds}  {words}"
                    self.console.print(line, highlight=False, soft_wrap=True)
                if ending:
                    return


def duration(seconds: float) -> str:
    """For people.

    >>> duration(42.4), duration(700), duration(8000)
    ('42 s', '12 min', '2 h 13 min')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
