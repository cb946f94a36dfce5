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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import filter as filter_names
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import strategies
from fedivon_flwr.errors import UserError
from fedivon_flwr.runs import fork, read_json, write_json
from fedivon_flwr.settings import read_tables
from simulation.engine import Resources, gpu_share
from simulation.launch import check, stop_tree, with_ray
from simulation.progress import LINE_SECONDS, RunState, duration
from simulation.studies.reports import check_job, check_study, collect, is_collected, write_reports
from simulation.studies.spec import Job, Study, digest, jobs, trained_folder

POLL_SECONDS = 1.0
LOCK_SECONDS = 2.0  # to wait for one who only looks whether a study is running


@dataclass
class Results:
    """A study's folder: study.toml, runs/*.json, table.csv, README.md, figures."""

    study: Study
    folder: Path
    only: Sequence[str] = ()  # patterns of the runs to do now; none: all
    jobs: list[Job] = field(init=False)
    wanted: list[Job] = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = jobs(self.study)
        names = [job.name for job in self.jobs]
        if stray := next((pattern for pattern in self.only if not filter_names(names, pattern)), None):
            raise UserError(f"No run of the study fits --only '{stray}'; the runs are: {', '.join(names)}.")
        wanted = {name for pattern in self.only or ["*"] for name in filter_names(names, pattern)}
        self.wanted = [job for job in self.jobs if job.name in wanted]

    def path(self, job: Job) -> Path:
        """The JSON file of a run."""
        return self.folder / "runs" / f"{job.name}.json"

    def log(self, job: Job) -> Path:
        """What a run printed."""
        return self.folder / "logs" / f"{job.name}.log"

    def saved(self, job: Job) -> dict[str, Any] | None:
        """What the results have of a run, if it is this run, and where that stands in the study."""
        saved = read_json(self.path(job))
        if not is_collected(job, self.study, saved):
            return None
        return {**saved, "preset": job.preset, "variant": job.variant}

    def open_jobs(self) -> list[Job]:
        """The runs that are still to be done."""
        return [job for job in self.wanted if self.saved(job) is None]

    def check(self) -> None:
        """Find out before anything is started what would fail later."""
        self._refuse()
        if not self.is_free():
            raise UserError(self._running())
        check_study(self.study)
        for job in self.open_jobs():
            check_job(job, self.study)
            check(job.settings, wait=True)

    def write(self) -> None:
        """Tables and figures of the runs that are there."""
        found = [saved for job in self.jobs if (saved := self.saved(job)) is not None]
        write_reports(self.study, found, self.folder)

    def is_free(self) -> bool:
        """Whether no process runs the study."""
        if not self.folder.is_dir():
            return True
        lock = FileLock(self.folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return False
        except OSError as error:
            raise UserError(self._unusable(error)) from None
        lock.release()
        return True

    def _refuse(self) -> None:
        """Write only into a new folder, an empty one, or one that has results of this study."""
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"'{self.folder}' is a file but must be a folder for results; use another --results.")
        there = {path.name for path in self.folder.glob("*")} - {".lock", "study.log", "runs", "logs"}
        if there and (name := self._name_there()) != self.study.name:
            what = f"results of the study '{name}'" if name else "something else than results of a study"
            raise UserError(f"The folder '{self.folder}' holds {what}; use another --results.")

    def _name_there(self) -> str | None:
        """The name of the study whose results the folder has."""
        path = self.folder / "study.toml"
        return str(read_tables(path).get("name")) if path.exists() else None

    def _unusable(self, error: OSError) -> str:
        return f"The folder '{self.folder}' cannot be written to ({error.strerror}); use another --results."

    def _running(self) -> str:
        return f"The study in '{self.folder}' is running already; wait for it, or stop it."

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second process of the same study out."""
        try:
            for name in ("runs", "logs"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(self._unusable(error)) from None
        lock = FileLock(self.folder / ".lock")
        try:
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout:
            raise UserError(self._running()) from None
        try:
            yield
        finally:
            lock.release()


def default_jobs() -> int:
    """Runs at a time: single-threaded ones use CPUs best; on a GPU one run after the other."""
    return 1 if torch.cuda.is_available() else os.cpu_count() or 1


def detach(results: Results, console: Console) -> None:
    """Start the same command again, in a session of its own and at low priority, and see that it runs."""
    results.check()
    with results.locked():  # which makes the folder
        log = results.folder / "study.log"
    arguments = [argument for argument in sys.argv[1:] if argument != "--background"]
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fedivon_flwr", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=lambda: os.nice(10),
        )
    while results.is_free():
        if process.poll() is not None:
            if process.returncode == 0:
                break  # there was nothing left to do
            raise UserError(f"The study could not be started in the background; see '{log}'.")
        time.sleep(0.5)
    for line in (
        f"{results.study.name} runs in the background as process {process.pid}; its progress: tail -f {log}",
        f"Stop it with: kill {process.pid}; the same command goes on where it was.",
    ):
        console.print(line, highlight=False, soft_wrap=True)


def run_study(results: Results, slots: int, console: Console) -> list[Job]:
    """Run what is missing, `slots` runs at a time, and write the results; gives the runs that failed."""
    results.check()
    with results.locked(), Board(results, console, slots) as board:
        waiting, failed = results.open_jobs(), []
        running: dict[Job, SpawnProcess] = {}
        results.write()
        try:
            while waiting or running:
                while len(running) < slots and (job := next_job(waiting, running)):
                    share = min(slots, len(waiting) + len(running))
                    waiting.remove(job)
                    running[job] = start(job, results, share)
                board.show(list(running), waiting)
                wait([process.sentinel for process in running.values()], timeout=POLL_SECONDS)
                for job in [job for job, process in running.items() if not process.is_alive()]:
                    process = running.pop(job)
                    process.join()
                    if process.exitcode:
                        failed.append(job)
                    results.write()
        finally:
            for process in running.values():
                if process.pid:
                    stop_tree(process.pid)
    return failed


def next_job(waiting: Sequence[Job], running: Iterable[Job]) -> Job | None:
    """The first that nobody trains already: variants may share their training."""
    busy = {digest(strategies.training(job.settings)) for job in running}
    return next((job for job in waiting if digest(strategies.training(job.settings)) not in busy), None)


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
        folder = Path(job.settings.run_dir)
        if not folder.exists() and (trained := trained_folder(job.settings)):
            fork(trained, folder, job.settings)  # it only predicts
        if not (folder / "summary.json").exists():
            wait_for(folder)
            with_ray(job.settings, Resources(cpus, gpu_share(cpus)))
        write_json(path, collect(job, study))
    except UserError as error:
        sys.exit(f"Error: {error}")


def wait_for(folder: Path) -> None:
    """Another study may be at the same run: go on when that has let go of it."""
    if folder.exists():
        with FileLock(folder / ".lock"):
            pass


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

    def __init__(self, results: Results, console: Console, slots: int) -> None:
        self._results, self._console, self._slots = results, console, slots
        columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[state]}"))
        self._bars = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._states = {job: RunState.of(job.settings) for job in results.wanted}
        self._line = -LINE_SECONDS

    def __enter__(self) -> "Board":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, running: Sequence[Job], waiting: Sequence[Job]) -> None:
        """Draw anew; on no terminal, a line now and then."""
        if not self._console.is_terminal and time.monotonic() - self._line < LINE_SECONDS:
            return
        self._line = time.monotonic()
        self._states |= {job: RunState.of(job.settings) for job in running}
        total = len(self._results.wanted)
        ended = total - len(waiting) - len(running)
        left = time_left(self._states, [*running, *waiting], self._slots)
        head = f"{ended} of {total} runs ended" + (f", about {duration(left)} left" if left is not None else "")
        self._bar("study", ended, total, head)
        for name in self._tasks.keys() - {"study", *(job.name for job in running)}:
            self._bars.remove_task(self._tasks.pop(name))
        for job in running:
            state = self._states[job]
            self._bar(job.name, state.rounds_done, job.settings.rounds, state.words())
        if not self._console.is_terminal:
            states = [(job.name, self._states[job]) for job in running]
            words = [f"{name} round {state.rounds_done}  {state.words()}" for name, state in states]
            line = "; ".join([f"{self._results.study.name}: {head}", *words])
            self._console.print(line, highlight=False, soft_wrap=True)

    def _bar(self, name: str, done: int, total: int, state: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, state=state)
        self._bars.update(self._tasks[name], completed=done, state=state)


def time_left(states: Mapping[Job, RunState], todo: Sequence[Job], slots: int) -> float | None:
    """Seconds until these runs are done, `slots` at a time; None before a pace is known.

    A run that has not begun is taken to be as fast as one of the same preset, or else as the mean of all.
    """
    left = []
    for job in todo:
        if (own := states[job].seconds_left()) is not None:
            left.append(own)
            continue
        whole = job.settings.rounds, states[job].final_draws, states[job].personal_models
        known = [(s, other.preset) for other, state in states.items() if (s := state.seconds(*whole)) is not None]
        if not known:
            return None
        alike = [seconds for seconds, preset in known if preset == job.preset]
        left.append(mean(alike or [seconds for seconds, _ in known]))
    return max(sum(left) / slots, *left) if left else 0.0
