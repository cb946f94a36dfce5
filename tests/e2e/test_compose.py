"""The Docker compose demo under a real engine: image, stack, a run with faults in it, and the volumes that stay."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from outcome import until

from simulation.launch import app_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

PROJECT = f"fedivon-test-{os.getpid()}"
LASTING = {"superlink", "superexec", "proxy", "north", "south", "west"}


def docker(*words: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    command = ["docker", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=app_folder(), timeout=timeout, check=False)


def compose(*words: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    return docker("compose", "-p", PROJECT, "-f", str(Path("deploy", "compose.yaml")), *words, timeout=timeout)


def health() -> dict[str, str]:
    listed = compose("ps", "--format", "json").stdout.splitlines()
    return {row["Service"]: row["Health"] for row in map(json.loads, listed)}


def rounds() -> list[dict[str, Any]]:
    """The rounds of the run that is under way, as its folder in the volume has them."""
    done = compose("exec", "-T", "superexec", "sh", "-c", "cat /runs/demo/metrics.jsonl")
    return [json.loads(line) for line in done.stdout.splitlines()] if done.returncode == 0 else []


def restart_count(service: str) -> int:
    """How often the engine has started a service's container again."""
    container = compose("ps", "--quiet", service).stdout.strip()
    return int(docker("inspect", "--format", "{{.RestartCount}}", container).stdout)


def whole_round_after(done: int) -> bool:
    return any(row["replies"] == 3 for row in rounds()[done:])


@pytest.fixture(scope="module")
def stack(docker_compose: None) -> Iterator[None]:
    if docker("info").returncode:
        pytest.skip("no Docker engine answers")
    # The host's network, since an engine may have no bridge to build on.
    built = docker("build", "--network=host", "-f", "deploy/Dockerfile", "-t", "fedivon", ".", timeout=1800)
    assert built.returncode == 0, built.stderr[-3000:]
    try:
        up = compose("up", "--detach", "--wait")
        assert up.returncode == 0, up.stderr + compose("logs").stdout
        yield
    finally:
        compose("--profile", "run", "down", "--volumes", "--timeout", "5")


@pytest.mark.usefixtures("stack")
def test_the_demo_heals_and_ends_well() -> None:
    assert health() == dict.fromkeys(LASTING, "healthy")
    ended: list[subprocess.CompletedProcess[str]] = []
    changes = ("--set", "rounds=14", "--set", "round-deadline=40.0", "--run-dir", "/runs/demo")

    def submit() -> None:
        ended.append(compose("run", "--rm", "-T", "run", *changes, timeout=1500))

    submitted = threading.Thread(target=submit)
    submitted.start()
    until(lambda: len(rounds()) >= 2, 240, "two rounds")
    for service in ("south", "superlink"):
        done, restarts = len(rounds()), restart_count(service)
        compose("exec", "-T", service, "sh", "-c", "kill -9 -1")  # all but the container's init, which then ends
        until(partial(whole_round_after, done + 1), 400, f"all nodes after {service} died")
        assert restart_count(service) > restarts
    submitted.join()
    assert ended, "the run did not end in time"
    assert ended[0].returncode == 0, ended[0].stdout + ended[0].stderr
    assert "FedIvon" in ended[0].stdout
    assert [row["round"] for row in rounds()] == list(range(1, 15))
    until(lambda: health() == dict.fromkeys(LASTING, "healthy"), 120, "all are healthy again")


@pytest.mark.usefixtures("stack")
def test_a_node_sees_neither_the_others_secrets_nor_the_servers_api() -> None:
    for service, keys in {"north": ["/credentials/node.key"], "superexec": []}.items():
        seen = compose("exec", "-T", service, "find", "/", "-name", "*.key", "-not", "-path", "/proc/*").stdout.split()
        assert [path for path in seen if path.startswith("/credentials")] == keys
    address = "https://superlink:8000/health"
    for service, folder, code in (("superexec", "/credentials/public", 0), ("north", "/credentials", 1)):
        asked = compose("exec", "-T", service, "python", "-m", "deploy.health", address, f"{folder}/ca.crt")
        assert asked.returncode == code, asked.stdout + asked.stderr
    assert compose("exec", "-T", "north", "id", "-u").stdout.strip() == "10001"
    assert compose("exec", "-T", "north", "touch", "/opt/fedivon/x").returncode != 0


@pytest.mark.usefixtures("stack")
def test_the_volumes_stay() -> None:
    """Runs last: the stack goes down and comes up again, and knows its run."""
    assert compose("down", "--timeout", "5").returncode == 0
    listed = docker("volume", "ls", "--quiet", "--filter", f"name={PROJECT}").stdout.split()
    assert {f"{PROJECT}_runs", f"{PROJECT}_superlink", f"{PROJECT}_server"} <= set(listed)
    up = compose("up", "--detach", "--wait")
    assert up.returncode == 0, up.stderr + compose("logs").stdout
    assert len(rounds()) == 14
