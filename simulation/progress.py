"""A live line of progress, read from a run's metrics.jsonl: the same for every engine."""

import threading
import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedivon_flwr.runs import draws_done, read_metrics
from fedivon_flwr.settings import Settings
from simulation.report import number

POLL_SECONDS = 0.5
LINE_SECONDS = 10.0  # between lines where there is no terminal to redraw


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
                rows = list(read_metrics(Path(self.settings.run_dir)))
                done, state = self._describe(rows)
                bar.update(task, completed=done, state=state)
                if not self.console.is_terminal and (ending or time.monotonic() - last_line > LINE_SECONDS):
                    last_line = time.monotonic()
                    self.console.print(
                        f"{name}: round {done}/{self.settings.rounds}  {state}", highlight=False, soft_wrap=True
                    )
                if ending:
                    return

    def _describe(self, rows: list[dict[str, Any]]) -> tuple[int, str]:
        """Rounds done, and accuracy, ECE, speed and time left in words."""
        if not rows:
            return 0, "starting"
        done, now = rows[-1]["round"], time.monotonic()
        if self._began is None:
            self._began = (now, done)
        words = []
        if scored := next((row for row in reversed(rows) if "mean" in row), None):
            best = scored.get("mc", scored["mean"])
            words.append(f"accuracy {number(best['accuracy'], 3)}  ECE {number(best['ece'], 3)}")
        elif rows[-1]["train_loss"] is not None:
            words.append(f"loss {rows[-1]['train_loss']:.3f}")
        if done == self.settings.rounds:
            words.append("done" if self._stop.is_set() else self._evaluating())
        elif now > self._began[0] and done > self._began[1]:
            speed = (done - self._began[1]) / (now - self._began[0])
            words.append(f"{speed:.1f} rounds/s  {(self.settings.rounds - done) / speed:.0f} s left")
        return done, "  ".join(words)

    def _evaluating(self) -> str:
        draws = draws_done(Path(self.settings.run_dir))
        return "final evaluation" + (f" ({draws} of {self.settings.test_samples} weight samples)" if draws else "")
