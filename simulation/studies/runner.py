"""Run a study: several runs at a time, each in a process of its own, skipping what is done.

Everything that lasts is in the runs' folders (``runs/studies/…``, shared by all studies) and in the study's results, so
a study that was killed goes on with the same command.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fedivon_flwr.errors import UserError
from fedivon_flwr.runs import read_json, write_json
from simulation.engine import Resources, gpu_share
from simulation.launch import check, stop_tree, with_ray
from simulation.progress import LINE_SECONDS, RunState, duration
from simulation.studies.reports import check_reports, collect, is_collected, write_reports
from simulation.studies.spec import Job, Study, jobs

POLL_SECONDS = 1.0


@dataclass
class Results:
    """A study's folder: study.toml, runs/*.json, table.csv, README.md, figures."""

    study: Study
    folder: Path
    jobs: list[Job] = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = jobs(self.study)

    def path(self, job: Job) -> Path:
        """The JSON file of a run."""
        return self.folder / "runs" / f"{job.name}.json"

    def log(self, job: Job) -> Path:
        """What a run printed."""
        return self.folder / "logs" / f"{job.name}.log"

    def saved(self, job: Job) -> dict[str, Any] | None:
        """What the results have of a run, if it is this run."""
        saved = read_json(self.path(job))
        return saved if is_collected(job, self.study, saved) else None

    def open_jobs(self) -> list[Job]:
        """The runs that are still to be done."""
        return [job for job in self.jobs if self.saved(job) is None]

    def check(self) -> None:
        """Find out before anything is started what would fail later."""
        check_reports(self.study)
        for job in self.open_jobs():
            check(job.settings)

    def write(self) -> None:
        """Tables and figures of the runs that are there."""
        found = [saved for job in self.jobs if (saved := self.saved(job)) is not None]
        write_reports(self.study, found, self.folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second process of the same study out."""
        try:
            (self.folder / "runs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"The folder '{self.folder}' cannot be made ({error.strerror}); use --results.") from None
        lock = FileLock(self.folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"The study in '{self.folder}' is running already; wait for it, or stop it.") from None
        try:
            yield
        finally:
            lock.release()


def default_jobs() -> int:
    """Runs at a time: single-threaded ones use CPUs best; on a GPU one run after the other."""
    return 1 if torch.cuda.is_available() else os.cpu_count() or 1


def detach(results: Results, console: Console) -> None:
    """Start the same command again, in a session of its own and at low priority."""
    with results.locked():
        results.check()
    log = results.folder / "study.log"
    arguments = [argument for argument in sys.argv[1:] if argument != "--background"]
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedivon_flwr", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=lambda: os.nice(10),
        )
    for line in (
        f"{results.study.name} runs in the background as process {process.pid}; its progress: tail -f {log}",
        f"Stop it with: kill {process.pid}; the same command goes on where it was.",
    ):
        console.print(line, highlight=False, soft_wrap=True)


def run_study(results: Results, slots: int, console: Console) -> list[Job]:
    """Run what is missing, `slots` runs at a time, and write the results; gives the runs that failed."""
    with results.locked():
        results.check()
        waiting, failed = results.open_jobs(), []
        running: dict[Job, SpawnProcess] = {}
        (results.folder / "logs").mkdir(exist_ok=True)
        with Board(results, console) as board:
            try:
                while waiting or running:
                    while waiting and len(running) < slots:
                        share = min(slots, len(waiting) + len(running))
                        job = waiting.pop(0)
                        running[job] = start(job, results, share)
                    wait([process.sentinel for process in running.values()], timeout=POLL_SECONDS)
                    for job in [job for job, process in running.items() if not process.is_alive()]:
                        process = running.pop(job)
                        process.join()
                        if process.exitcode:
                            failed.append(job)
                        results.write()
                    board.show(list(running), len(waiting))
            finally:
                for process in running.values():
                    if process.pid:
                        stop_tree(process.pid)
        results.write()
    return failed


def start(job: Job, results: Results, share: int) -> SpawnProcess:
    """Start a run in a process of its own, with a `share`-th of the machine."""
    process = multiprocessing.get_context("spawn").Process(
        target=run_job, args=(job, results.study, results.path(job), share, results.log(job)), name=job.name
    )
    process.start()
    return process


def run_job(job: Job, study: Study, path: Path, share: int, log: Path) -> None:
    """Train (or go on, or find it done), then collect what the reports need into the results. A process' whole work."""
    redirect(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the study stops its runs itself
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    threading.Thread(target=end_with_parent, daemon=True).start()
    cores = os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // share))
    cpus = cores / max(1, cores // share)  # of this machine as Ray sees it, which is all of it
    try:
        if not (Path(job.settings.run_dir) / "summary.json").exists():
            with_ray(job.settings, Resources(cpus, gpu_share(cpus)))
        write_json(path, collect(job, study))
    except UserError as error:
        sys.exit(f"Error: {error}")


def redirect(log: Path) -> None:
    """Send all output of this process and its children to a file."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def end_with_parent() -> None:
    """A run must not go on unseen when its study was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


class Board:
    """Shows how far a study is: bars on a terminal, lines elsewhere."""

    def __init__(self, results: Results, console: Console) -> None:
        self._results, self._console = results, console
        columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[state]}"))
        self._bars = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._states = {job: RunState.of(job.settings) for job in results.jobs}
        self._running: set[Job] = set()
        self._line = 0.0

    def __enter__(self) -> "Board":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, running: Sequence[Job], waiting: int) -> None:
        """Draw anew; on no terminal, a line now and then."""
        if not self._console.is_terminal and time.monotonic() - self._line < LINE_SECONDS:
            return
        self._line = time.monotonic()
        for job in self._running | set(running):  # only theirs have changed
            self._states[job] = RunState.of(job.settings)
        self._running = set(running)
        total = len(self._results.jobs)
        done = total - waiting - len(running)
        states = self._states
        left = time_left(states, max(1, len(running)))
        head = f"{done} of {total} runs done" + (f", about {duration(left)} left" if left is not None else "")
        words = {job.name: states[job].words() for job in running}
        self._bar("study", done, total, head)
        for job in self._results.jobs:
            if job.name in words:
                self._bar(job.name, states[job].rounds_done, job.settings.rounds, words[job.name])
            elif job.name in self._tasks:
                self._bars.remove_task(self._tasks.pop(job.name))
        if not self._console.is_terminal:
            text = "; ".join(f"{name} {state}" for name, state in words.items())
            self._console.print(f"{self._results.study.name}: {head}; {text}", highlight=False, soft_wrap=True)

    def _bar(self, name: str, done: int, total: int, state: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, state=state)
        self._bars.update(self._tasks[name], completed=done, state=state)


def time_left(states: dict[Job, RunState], slots: int) -> float | None:
    """Seconds until all runs are done, from the pace of those that are under way; None before the first is known.

    A run that has not begun is taken to be as fast as one of the same preset, or else as the mean of all.
    """
    paces = {job: pace for job, state in states.items() if (pace := state.total_seconds()) is not None}
    if not paces:
        return None
    left = 0.0
    for job, state in states.items():
        alike = [pace for other, pace in paces.items() if other.preset == job.preset] or list(paces.values())
        whole = paces.get(job, sum(alike) / len(alike))
        left += whole * (1 - state.fraction(whole))
    return left / slots
