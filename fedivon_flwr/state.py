"""What a node remembers between the rounds of a run: in Flower's `Context.state`, and on the node's own disk.

`Context.state` lives as long as the node's process. A node that was restarted, or a federation that goes on from a
checkpoint, finds the memory on disk:

    <folder>/<run>/<client>/round-<n>.safetensors    what the client remembered after round n

A federation that goes on from a checkpoint strikes later rounds and runs them again, maybe with other clients. Their
memories must not be used then, so older ones are kept for as long as a checkpoint may lead back to them, and the server
tells after which rounds it went on: a memory stands if it was kept after the last of these, or is of no later round.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from fedivon_flwr.data.cache import user_cache
from fedivon_flwr.errors import UserError
from fedivon_flwr.records import NDArrays, from_record, to_record
from fedivon_flwr.runs import KEPT_CHECKPOINTS, load_arrays, save_arrays

ABOUT, MEMORY = "fedivon.about", "fedivon.memory"  # our records in `Context.state`, which other mods may use too


def state_folder(told: str = "") -> Path:
    """Where a node keeps its memory: as it was told, or `FEDIVON_STATE`, or in the user's cache folder."""
    chosen = told or os.environ.get("FEDIVON_STATE")
    return Path(chosen).expanduser() if chosen else user_cache() / "state"


@dataclass(frozen=True)
class NodeState:
    """The memory of one client in one run; without a folder it lasts as long as `Context.state`."""

    context: RecordDict
    run: str = ""
    folder: Path | None = None

    @classmethod
    def of(cls, context: RecordDict, told: str, run: str, client: str) -> "NodeState":
        """Of a client in a run that the server named; in a run without a name nothing goes to disk."""
        if not re.fullmatch(r"[\w-]*", run):
            raise UserError(f"The server calls its run '{run}', which is no name of letters, digits, '-' and '_'.")
        return cls(context, run, state_folder(told) / run / client if run else None)

    def before(self, server_round: int, resumed_after: Sequence[int] = ()) -> NDArrays:
        """What was remembered last before a round; nothing in a client's first."""
        about: Mapping[str, Any] = self.context.config_records.get(ABOUT, ConfigRecord())
        here = int(about["round"]) if about.get("run") == self.run and stands(about, resumed_after) else -1
        files = self._files()
        for number in sorted(files if resumed_after else ()):
            if not stands(load_arrays(files[number])[1], resumed_after):
                files.pop(number).unlink(missing_ok=True)
        newest = max((number for number in files if number < server_round), default=-1)
        if 0 <= here < server_round and newest <= here:
            return from_record(self.context.array_records[MEMORY])
        return load_arrays(files[newest])[0] if newest >= 0 else {}

    def keep(self, server_round: int, arrays: NDArrays, checkpoint_every: int = 1, resumptions: int = 0) -> None:
        """Remember arrays after a round."""
        about = {"round": server_round, "resumptions": resumptions}
        self.context[ABOUT] = ConfigRecord({**about, "run": self.run})
        self.context[MEMORY] = to_record(arrays)
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_arrays(self.folder / f"round-{server_round:06d}.safetensors", arrays, about)
        except OSError as error:
            raise UserError(
                f"The node's memory cannot be written to '{self.folder}' ({error.strerror}); "
                "set state-dir in the node config, or FEDIVON_STATE, to a folder that can."
            ) from None
        self._forget(server_round, checkpoint_every)

    def _forget(self, server_round: int, checkpoint_every: int) -> None:
        """Drop what is older than the newest memory from which the oldest checkpoint could go on."""
        oldest = max(0, (server_round - 1) // checkpoint_every - (KEPT_CHECKPOINTS - 1)) * checkpoint_every
        files = self._files()
        needed = max((number for number in files if number <= oldest), default=0)
        for number, path in files.items():
            if number < needed:
                path.unlink(missing_ok=True)

    def _files(self) -> dict[int, Path]:
        """The memories on disk, by round."""
        if self.folder is None:
            return {}
        return {int(path.stem.removeprefix("round-")): path for path in self.folder.glob("round-*.safetensors")}


def stands(about: Mapping[str, Any], resumed_after: Sequence[int]) -> bool:
    """Whether the round of a memory has not been struck since it was kept.

    >>> [stands({"round": 9, "resumptions": n}, [5, 20]) for n in (0, 1)]
    [False, True]
    """
    return all(int(about["round"]) <= last for last in resumed_after[int(about.get("resumptions", 0)) :])
