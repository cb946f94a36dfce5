"""Dockerfile, compose files and systemd units: they start what the command line has, and their own checkers agree."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pathspec
import pytest
import typer.main
import yaml

from fedivon_flwr.cli import app
from fedivon_flwr.data import load
from fedivon_flwr.runs import read_metrics
from fedivon_flwr.settings import Settings
from simulation.presets import preset_config
from simulation.report import time_table

FOLDER = Path(__file__).parents[2] / "deploy"
UNITS = sorted((FOLDER / "systemd").glob("*.service"))
NODE_ENV = {"${NUMBER}": "0", "${SUPERLINK}": "link.example.org:9443"}  # a node's own, in /etc/fedivon/node.env
ENDS = {"setup", "register", "run"}  # services that do one thing and end


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return found


SERVICES: dict[str, dict[str, Any]] = compose()["services"]


def commands() -> Iterator[tuple[str, list[str]]]:
    """All calls of `fedivon` in these files and in the guide, without the program's name."""
    for number, line in enumerate((FOLDER / "README.md").read_text().splitlines(), 1):
        if call := re.match(r"[$#] (sudo -u fedivon )?\S*\bfedivon (?=[a-z]+ )", line):
            yield f"README.md:{number}", shlex.split(line[call.end() :], comments=True)
    for name, service in SERVICES.items():
        if name == "setup":
            for line in service["command"][0].splitlines():
                if line.startswith("fedivon "):
                    yield f"{name}: {line}", shlex.split(line)[1:]
        else:
            yield name, service.get("entrypoint", ["fedivon"])[1:] + shlex.split(service.get("command", ""))
    for unit in UNITS:
        (line,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
        yield unit.name, [NODE_ENV.get(word, word) for word in shlex.split(line)[1:]]


@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, words in commands()])
def test_every_command_is_one_that_we_have(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    name = "fedivon"
    while isinstance(command, click.Group):
        name, *words = words
        command = command.commands[name]
    command.make_context(name, list(words))  # refuses unknown options and missing ones; runs nothing


def test_a_wrong_command_would_be_noticed() -> None:
    with pytest.raises(click.UsageError):
        test_every_command_is_one_that_we_have(["deploy", "superlink", "--colour", "red"])


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert ("user" in service) == (name == "setup")  # the image's own user is not root
    assert ("healthcheck" in service) == (name not in ENDS)
    assert service["restart"] == ("no" if name in ENDS else "unless-stopped")


def test_the_image_is_built_once() -> None:
    """Services that build the same image get in each other's way."""
    assert [name for name, service in SERVICES.items() if "build" in service] == ["setup"]
    assert {service["image"] for service in SERVICES.values()} == {"fedivon"}


@pytest.mark.parametrize("name", ["deploy/x.key", "deploy/example/north/node.key", "deploy/example/data/north.npz"])
def test_secrets_and_data_stay_out_of_git_and_the_image(name: str) -> None:
    done = subprocess.run(["git", "check-ignore", "--quiet", name], cwd=FOLDER.parent, check=False)
    assert done.returncode in (0, 128)  # 128: no checkout
    rules = pathspec.PathSpec.from_lines("gitignore", (FOLDER.parent / ".dockerignore").read_text().splitlines())
    assert rules.match_file(name)


CODE, DATA = "${CODE:-./example}", "${DATA:-./example}"  # the user's own folders


def volumes(name: str) -> set[str]:
    """What a service sees besides the image: volumes, and folders of the machine."""
    return {volume[: volume.rindex(":/")] for volume in SERVICES[name]["volumes"]}


def test_nodes_reach_nothing_but_the_proxy_and_see_no_other_secrets() -> None:
    nodes = [name for name in SERVICES if "supernode" in str(SERVICES[name].get("command"))]
    assert len(nodes) == 3
    inside = {name for name, service in SERVICES.items() if "server" in service.get("networks", [])}
    assert inside == {"superlink", "superexec", "proxy", "register", "run"}
    for name in nodes:
        assert SERVICES[name]["networks"] == ["outside"]
        assert volumes(name) == {name, f"{name}-data", f"{name}-state", CODE}
    for volume in ("authority", DATA):
        assert {name for name in SERVICES if volume in volumes(name)} == {"setup"}
    assert {name for name in SERVICES if "server" in volumes(name)} == {"setup", "superlink", "proxy"}
    assert compose()["networks"]["server"]["internal"]


def test_all_that_services_name_is_there() -> None:
    """Which the schema does not see, and `docker compose config` only where it is installed."""
    whole = compose()
    for service in SERVICES.values():
        assert set(service.get("depends_on", {})) <= set(SERVICES)
        assert set(service.get("networks", [])) <= set(whole["networks"])
    assert set.union(*map(volumes, SERVICES)) == set(whole["volumes"]) | {CODE, DATA}


def test_the_gpu_file_is_for_the_nodes() -> None:
    assert set(compose("compose.gpu.yaml")["services"]) == {"north", "south", "west"}


def test_the_demo_fits_its_data() -> None:
    settings, digits = Settings.from_config(preset_config(str(FOLDER / "demo.toml"))), load("digits")
    assert settings.input_shape == "x".join(map(str, digits.shape))
    assert (settings.classes, settings.clients) == (digits.classes, 3)
    assert [float(part) for part in (settings.pixel_mean, settings.pixel_std)] == [*digits.mean, *digits.std]


def test_the_guide_quotes_the_demo() -> None:
    """The times of a round are those that the committed run's metrics give."""
    rows = list(read_metrics(FOLDER.parent / "results" / "deployed-demo"))
    assert "\n".join(time_table(rows)) in (FOLDER / "README.md").read_text()


def test_the_image_has_versions_that_the_project_allows() -> None:
    pinned = dict(line.split("==") for line in (FOLDER / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {"flwr", "torch", "torchvision", "ivon-opt", "ray", "numpy"} <= set(pinned)
    assert pinned["flwr"].startswith("1.41.")
    assert pinned["torch"].startswith("2.12.")


CHECKERS = [
    ("hadolint", "Dockerfile"),
    ("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml", "compose.gpu.yaml"),
]


@pytest.mark.parametrize(("program", "words"), [(name, words) for name, *words in CHECKERS])
def test_the_files_pass_their_checkers(program: str, words: list[str]) -> None:
    command = [str(Path(sys.executable).with_name(program)), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER)
    assert done.returncode == 0, done.stdout


@pytest.mark.usefixtures("docker_compose")
def test_compose_accepts_its_files() -> None:
    for files in (["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]):
        named = [part for file in files for part in ("--file", str(FOLDER / file))]
        command = ["docker", "compose", *named, "--profile", "run", "config", "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    here = str(Path(sys.executable).with_name("fedivon"))  # systemd looks whether the program is there
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/fedivon/.venv/bin/fedivon", here))
    command = ["systemd-analyze", "verify", *map(str, tmp_path.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not [line for line in done.stderr.splitlines() if "fedivon" in line]  # it tells of other units too


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_restart_their_program_and_may_write_only_their_state(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    assert {"Restart=always", "ProtectSystem=strict", "User=fedivon", "StateDirectory=fedivon"} <= set(lines)
