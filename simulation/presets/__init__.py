"""Presets: the settings of an experiment as a TOML file, by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import strategies
from fedivon_flwr.errors import UserError
from fedivon_flwr.registry import unknown
from fedivon_flwr.settings import Settings, read_toml

PRESETS = Path(__file__).parent


def preset_config(name: str) -> dict[str, Any]:
    """A preset by name, or a settings file by path."""
    if name.endswith(".toml"):
        return read_toml(Path(name))
    known = sorted(path.stem for path in PRESETS.glob("*.toml"))
    if name not in known:
        raise UserError(unknown("preset", name, known).removesuffix(".") + ", or give the path of a .toml file.")
    return read_toml(PRESETS / f"{name}.toml")


def settings_of(config: Mapping[str, Any]) -> Settings:
    """Settings with every option of their method; the path of an own data file is made absolute."""
    given = dict(config)
    if str(given.get("dataset", "")).endswith(".npz"):
        given["dataset"] = str(Path(given["dataset"]).expanduser().resolve())
    return strategies.complete(Settings.from_config(given))
