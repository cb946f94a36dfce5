"""A run's folder: settings, provenance, metrics, checkpoints, the final posterior and the summary.

    settings.json            the flat config, all defaults filled in
    provenance.json          versions, git commit, machine
    metrics.jsonl            one object a round
    clients.jsonl            one object a client: the scores of its personal model
    checkpoints/             round-<n>.safetensors: the server's arrays and state after round n (the last two)
    posterior.safetensors    the outcome, with all that `fedivon predict` needs
    evaluation.safetensors   the final evaluation as far as it got, while it lasts
    predictions.safetensors  labels and predicted probabilities of the test set, at the mean and by Monte Carlo
    summary.json             method, data, settings, scores; its presence says that the run is finished
    report.md, *.png         the same for people

Files are written to one side and then renamed, so that a kill at any moment leaves the old or the new one; only
the .jsonl files are appended to, and a line that was cut off is passed over.
"""

import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedivon_flwr.errors import UserError
from fedivon_flwr.records import NDArrays
from fedivon_flwr.settings import Settings

PACKAGES = ("fedivon-flwr", "flwr", "torch", "torchvision", "ivon-opt", "numpy", "ray")
KEPT_CHECKPOINTS = 2
EVALUATION = "evaluation.safetensors"
ASKED = "asked.json"  # who wants the run, until it has begun
FLOWER_RUN = "flwr-run.json"  # the number that Flower gave it, and the settings that it was submitted with
STATE = "state"  # what virtual clients remember, while the run lasts or, with `keep-memory`, longer


Complete = Callable[[Settings], Settings]


@dataclass(frozen=True)
class Checkpoint:
    """All that the next round needs."""

    round: int
    arrays: NDArrays
    state: Mapping[str, float]


class RunFolder:
    """One run's folder; only one process at a time may have it open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / ".lock")

    @classmethod
    def open(cls, settings: Settings, complete: Complete = lambda settings: settings) -> "RunFolder":
        """A new folder, or the one that `run-dir` names: continued when its settings agree, refused otherwise."""
        path = (Path(settings.run_dir) if settings.run_dir else new_path(settings)).resolve()
        refuse(path, settings, complete)  # before anything is written there
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"cannot be made ({error.strerror})"
            raise UserError(f"The run folder '{path}' {reason}; choose another run-dir.") from None
        folder = cls(path)
        folder.lock()
        try:
            refuse(path, settings, complete)  # again: until here another process might have had it
        except UserError:
            folder.close()
            raise
        if not (path / "settings.json").exists():
            write_json(path / "provenance.json", provenance(path))
            write_json(path / "settings.json", settings.record())
        elif not folder.finished:
            about = read_json(path / "provenance.json")
            now = provenance(path)
            again = {key: now[key] for key in ("command", "git_commit", "started")}
            write_json(path / "provenance.json", {**about, "resumed": [*about.get("resumed", []), again]})
        (path / ASKED).unlink(missing_ok=True)
        return folder

    def lock(self, patience: float = 0.0) -> None:
        """Keep others out, or find that one is in already, and is still there after so many seconds."""
        try:
            self._lock.acquire(timeout=patience)
        except Timeout:
            reason = "is in use by another run; wait for it, or choose another run-dir"
            raise UserError(f"The run folder '{self.path}' {reason}.") from None

    def close(self) -> None:
        """Let others have it."""
        self._lock.release()

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / "summary.json").exists()

    def metrics(self) -> list[dict[str, Any]]:
        """The rounds so far."""
        return list(read_metrics(self.path))

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add a round."""
        append_line(self.path / "metrics.jsonl", row)

    def clients(self) -> list[dict[str, Any]]:
        """The clients whose personal models have been scored; a line that was cut off is struck."""
        rows = list(read_lines(path := self.path / "clients.jsonl"))
        if path.exists():
            write_bytes(path, "".join(to_json(row) + "\n" for row in rows).encode())
        return rows

    def append_client(self, row: Mapping[str, Any]) -> None:
        """Add a client."""
        append_line(self.path / "clients.jsonl", row)

    @property
    def name(self) -> str:
        """What the nodes call the run: the same after a resumption, and another one for every run."""
        return str(read_json(self.path / "provenance.json").get("id", ""))

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then drop the oldest."""
        folder = self.path / "checkpoints"
        folder.mkdir(exist_ok=True)
        described = {"round": checkpoint.round, "state": dict(checkpoint.state)}
        save_arrays(self.path / checkpoint_file(checkpoint.round), checkpoint.arrays, described)
        for old in sorted(folder.glob("round-*.safetensors"))[:-KEPT_CHECKPOINTS]:
            old.unlink()

    def resume(self) -> Checkpoint | None:
        """The last readable checkpoint; later rounds are struck from metrics.jsonl, since they will be run again."""
        found = None
        for path in sorted((self.path / "checkpoints").glob("round-*.safetensors"), reverse=True):
            try:
                arrays, described = load_arrays(path)
            except UserError:
                continue
            found = Checkpoint(described["round"], arrays, described["state"])
            break
        last = found.round if found else 0
        rows = [row for row in self.metrics() if row["round"] <= last]
        write_bytes(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
        about = read_json(self.path / "provenance.json") or {}
        if again := about.get("resumed"):
            again[-1]["after_round"] = last
            write_json(self.path / "provenance.json", about)
        return found

    @property
    def resumed_after(self) -> list[int]:
        """After which round the run went on, each time that it was resumed."""
        resumed = (read_json(self.path / "provenance.json") or {}).get("resumed", [])
        return [again["after_round"] for again in resumed if "after_round" in again]

    def save_evaluation(self, draws: int, total: NDArray[Any], seconds: float) -> None:
        """Keep a Monte Carlo prediction under way."""
        save_arrays(self.path / EVALUATION, {"total": total}, {"draws": draws, "seconds": seconds})

    def load_evaluation(self) -> tuple[int, NDArray[Any], float] | None:
        """Of an evaluation that was interrupted: draws, the probabilities summed over them, seconds."""
        try:
            arrays, described = load_arrays(self.path / EVALUATION)
        except UserError:
            return None
        return described["draws"], arrays["total"], described["seconds"]

    def drop_evaluation(self) -> None:
        """The evaluation is complete."""
        (self.path / EVALUATION).unlink(missing_ok=True)


def checkpoint_file(server_round: int) -> str:
    """Where a run's folder has the checkpoint after a round."""
    return f"checkpoints/round-{server_round:06d}.safetensors"


def fork(source: Path, path: Path, settings: Settings) -> None:
    """Make a run's folder that begins where the training of another one ended; it appears when it is complete."""
    scratch, last = path.with_name(f".{path.name}.{os.getpid()}.part"), checkpoint_file(settings.rounds)
    (scratch / last).parent.mkdir(parents=True)
    for name in ("provenance.json", "metrics.jsonl", last):
        shutil.copyfile(source / name, scratch / name)
    if (source / STATE).is_dir():  # its files are replaced and never changed
        shutil.copytree(source / STATE, scratch / STATE, copy_function=os.link)
    write_json(scratch / "settings.json", settings.record())
    scratch.rename(path)


def refuse(path: Path, settings: Settings, complete: Complete = lambda settings: settings) -> None:
    """Raise when a folder can not become, or go on as, the folder of a run with these settings.

    `complete` gives settings of an earlier version the options that their method has got since.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"The run folder '{path}' is a file; choose another run-dir.")
    if (old := read_json(path / "settings.json")) is None:
        if not all(
            p.name in (".lock", "flwr.log", "provenance.json", ASKED, FLOWER_RUN) or p.suffix == ".part"
            for p in path.iterdir()
        ):
            raise UserError(f"The folder '{path}' is not empty and holds no run; choose another run-dir.")
        return
    refuse_other(path, old, settings, complete)


def refuse_other(
    path: Path, old: Mapping[str, Any], settings: Settings, complete: Complete = lambda settings: settings
) -> None:
    """Raise when a folder's run has settings that decide its outcome and differ from these."""
    before, now = complete(Settings.from_config(old)).identity(), settings.identity()
    if changed := sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)):
        key = changed[0]
        raise UserError(
            f"The run folder '{path}' belongs to a run with other settings ({key} = {before.get(key)!r}, "
            f"now {now.get(key)!r}); choose another run-dir, or the old settings to continue it."
        )


def new_path(settings: Settings) -> Path:
    """A fresh folder under ``runs/`` (or `FEDIVON_RUNS`), named by time, method and data."""
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    base = runs_folder() / f"{stamp}-{settings.method}-{Path(settings.dataset).stem}-seed{settings.seed}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def runs_folder() -> Path:
    """Where runs go unless told otherwise."""
    return Path(os.environ.get("FEDIVON_RUNS", "runs"))


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Add an object to a .jsonl file."""
    with path.open("a") as file:
        file.write(to_json(row) + "\n")


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The rounds of a run's folder."""
    return read_lines(path / "metrics.jsonl")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file; a line cut off by a kill is left out, and no file has none."""
    try:
        lines = path.read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return
    for line in lines:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def note_asked(path: Path) -> None:
    """Note in a run's folder who wants the run, for the process that will do it: Flower starts that without telling."""
    write_json(path / ASKED, asked())


def asked() -> dict[str, Any]:
    """What was typed, and the commit of the code with which."""
    return {"command": command(), "git_commit": git_commit()}


def provenance(path: Path | None = None) -> dict[str, Any]:
    """Versions, commit and machine; of a run in a folder, who asked for it."""
    return {
        "id": uuid.uuid4().hex,
        "versions": versions(),
        **((path and read_json(path / ASKED)) or asked()),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }


def versions() -> dict[str, str]:
    """Of Python and the packages that decide the numbers."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def command() -> str:
    """What was typed."""
    program = Path(sys.argv[0]).name.replace("__main__.py", "fedivon")  # `python -m fedivon_flwr`
    return shlex.join([program, *sys.argv[1:]])


def git_commit() -> str | None:
    """The commit of the code, marked when it has uncommitted changes; None outside a checkout.

    An image has the code without its history; there the commit is in the environment.
    """
    if given := os.environ.get("FEDIVON_COMMIT"):
        return given
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def save_arrays(path: Path, arrays: NDArrays, described: Mapping[str, Any]) -> None:
    """Arrays and a description as one safetensors file."""
    described = {**described, "keys": list(arrays)}  # safetensors does not keep the order
    contiguous = {key: np.asarray(array, order="C") for key, array in arrays.items()}  # it takes memory as it lies
    write_bytes(path, save(contiguous, metadata={"fedivon": json.dumps(described)}))


def draws_done(path: Path) -> int:
    """How far the final evaluation of a run's folder got."""
    try:
        with safe_open(path / EVALUATION, framework="numpy") as file:
            return int(json.loads(file.metadata()["fedivon"])["draws"])
    except (OSError, SafetensorError):
        return 0


def load_arrays(path: Path) -> tuple[NDArrays, dict[str, Any]]:
    """What `save_arrays` wrote, in the same order."""
    try:
        with safe_open(path, framework="numpy") as file:
            described = json.loads((file.metadata() or {})["fedivon"])
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a mapping
    except FileNotFoundError:
        raise UserError(f"There is no file '{path}'.") from None
    except (SafetensorError, KeyError, json.JSONDecodeError, OSError):
        raise UserError(f"The file '{path}' is not a posterior or checkpoint of this project.") from None
    return {key: arrays[key] for key in described["keys"]}, described


def write_json(path: Path, value: Any) -> None:
    """JSON for people and programs."""
    write_bytes(path, (to_json(value, indent=2) + "\n").encode())


def to_json(value: Any, indent: int | None = None) -> str:
    """Valid JSON: what is not a finite number (of a model that diverged, say) becomes null."""

    def clean(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {key: clean(inner) for key, inner in part.items()}
        if isinstance(part, list | tuple):
            return [clean(inner) for inner in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    return json.dumps(clean(value), indent=indent, allow_nan=False)


def read_json(path: Path) -> Any:
    """The value, or None where there is no such file."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise UserError(f"The file '{path}' is damaged: it is not valid JSON.") from None


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file in one step."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
