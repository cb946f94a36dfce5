"""Prepared arrays on disk: written once, then memory-mapped by every process of the machine.

`FEDIVON_DATA` names the folder of raw data, `FEDIVON_CACHE` the one of prepared data; both are
`fedivon` in the user's cache folder unless set.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
from filelock import FileLock

from fedivon_flwr.errors import UserError

Arrays = dict[str, np.ndarray]

NAMES = ("x_train", "y_train", "x_test", "y_test")
FORMAT = 1  # raise it when prepared arrays change: old ones are then left alone and prepared anew


def user_cache() -> Path:
    """The user's cache folder of this project."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedivon"


def data_folder() -> Path:
    """Where raw data are looked for and downloaded to."""
    if not os.environ.get("FEDIVON_DATA"):
        return user_cache()
    folder = Path(os.environ["FEDIVON_DATA"]).expanduser()
    if not folder.is_dir():
        raise UserError(f"FEDIVON_DATA names '{folder}', which is no folder; create it or correct the variable.")
    return folder


def cache_folder() -> Path:
    """Where prepared data are kept."""
    chosen = os.environ.get("FEDIVON_CACHE")
    return (Path(chosen).expanduser() if chosen else user_cache()) / "prepared"


def fingerprint(source: Path | str) -> str:
    """Short hash of a source; that of a file changes with its path, size and time of change, as do those in a folder.

    >>> fingerprint("torchvision") == fingerprint("torchvision") != fingerprint("scikit-learn")
    True
    """
    parts: list[object] = [FORMAT, source]
    if isinstance(source, Path):
        parts = [FORMAT, source.resolve()]
        if source.is_dir():
            parts += sorted(_contents(source))
        else:
            status = source.stat()
            parts += [status.st_size, status.st_mtime_ns]
    return sha256("|".join(map(str, parts)).encode()).hexdigest()[:12]


def _contents(folder: str | Path) -> Iterator[tuple[str, int, int]]:
    """Path, size and time of change of all that is in a folder; fast, since a node asks before every message."""
    with os.scandir(folder) as entries:
        for entry in entries:
            status = entry.stat()
            yield entry.path, status.st_size, status.st_mtime_ns
            if entry.is_dir():
                yield from _contents(entry.path)


def prepared(key: str, prepare: Callable[[], Arrays]) -> Arrays:
    """The arrays kept under a key as read-only memory maps; `prepare` makes them if there are none."""
    folder = cache_folder()
    target = folder / key
    if not target.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / f"{key}.lock")
            lock.acquire()
        except OSError as error:
            raise _unwritable(folder, error) from error
        try:
            if not target.is_dir():  # another process may have been faster
                _write(target, prepare())
        finally:
            lock.release()
    try:
        return {name: np.load(target / f"{name}.npy", mmap_mode="r") for name in NAMES}
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"The prepared data in '{target}' are damaged; delete that folder and try again.") from error


def _write(target: Path, arrays: Arrays) -> None:
    """Write all or nothing: the folder gets its name only when it is complete."""
    scratch = target.with_name(f"{target.name}.tmp")
    try:
        if scratch.exists():  # left by a process that was killed: the lock is ours, so nobody writes it
            shutil.rmtree(scratch)
        scratch.mkdir()
        for name in NAMES:
            np.save(scratch / f"{name}.npy", arrays[name])
        scratch.rename(target)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise _unwritable(target.parent, error) from error


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"Prepared data cannot be written to '{folder}' ({error.strerror or error}); "
        "set FEDIVON_CACHE to a folder with free space that can be written."
    )
