"""Presets: the settings of an experiment as a TOML file, by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import strategies
from fedivon_flwr.data import VALIDATION
from fedivon_flwr.errors import UserError
from fedivon_flwr.registry import unknown
from fedivon_flwr.settings import Settings, read_toml

PRESETS = Path(__file__).parent


def preset_config(name: str) -> dict[str, Any]:
    """A preset by name, or a settings file by path."""
    return read_toml(named_toml("preset", name, PRESETS))


def named_toml(kind: str, name: str, folder: Path) -> Path:
    """A file of the project's by name, or the user's own by path."""
    if name.endswith(".toml"):
        return Path(name)
    known = sorted(path.stem for path in folder.glob("*.toml"))
    if name not in known:
        raise UserError(unknown(kind, name, known).removesuffix(".") + ", or give the path of a .toml file.")
    return folder / f"{name}.toml"


def own_file(value: Any) -> Any:
    """The absolute path where a value names a file or folder of the user's, the value itself otherwise."""
    own = isinstance(value, str) and (value.removesuffix(VALIDATION).endswith((".toml", ".npz")) or "/" in value)
    return str(Path(value).expanduser().resolve()) if own else value


def settings_of(config: Mapping[str, Any]) -> Settings:
    """Settings with every option of their method; the path of own data is made absolute."""
    given = dict(config)
    if "dataset" in given:
        given["dataset"] = own_file(given["dataset"])
    return strategies.complete(Settings.from_config(given))
