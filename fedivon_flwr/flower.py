"""Flower's own programs: the environment they are started in, and how the `flwr` command finds a SuperLink."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedivon_flwr.errors import UserError
from fedivon_flwr.runs import write_bytes

HOME = "flwr"  # the `flwr` command's folder in the state of a server or node
CONNECTION = "here"  # the name of a SuperLink in the `flwr` command's config
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def environment(home: str, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For Flower's programs: a private home, no telemetry, and the programs of this Python first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{variables.get('PATH', '')}"
    modules = os.pathsep.join(p for p in (variables.get("PYTHONPATH"), str(Path.cwd())) if p)  # a user's own model
    return {**variables, **QUIET, "FLWR_HOME": home, "PATH": path, "PYTHONPATH": modules}


def connect(home: Path, address: str, authority: Path | None = None) -> None:
    """Tell the `flwr` command that has this home where the SuperLink is; without an authority it is not encrypted."""
    trust = {"root-certificates": str(authority.resolve())} if authority else {"insecure": True}
    known = {"superlink": {"default": CONNECTION, CONNECTION: {"address": address, **trust}}}
    try:
        home.mkdir(parents=True, exist_ok=True)
        write_bytes(home / "config.toml", tomli_w.dumps(known).encode())  # another `flwr` may be reading it
    except OSError as error:
        raise UserError(
            f"The folder '{home}' cannot be written to ({error.strerror}); use another --state, or the user to whom it "
            "belongs."
        ) from None


def ask(home: Path, *words: str) -> dict[str, Any]:
    """What the `flwr` command answers: ``success`` and, if that is false, an ``error-message`` in one line."""
    command = ["flwr", *words, "--format", "json"]
    done = subprocess.run(command, env=environment(str(home)), capture_output=True, text=True, check=False)
    try:
        said: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        said = {"success": False, "error-message": done.stdout + done.stderr}
    if not said["success"]:
        said["error-message"] = " ".join(said["error-message"].split())
    return said
