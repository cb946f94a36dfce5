"""The real programs: ``flwr run``, and a SuperLink with SuperNodes as processes, against the Ray engine."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from outcome import assert_same_outcome, rounds

from deploy import programs
from deploy.programs import Scalar, Security
from fedivon_flwr.flower import environment
from fedivon_flwr.settings import Settings
from simulation.engine import Resources
from simulation.launch import (
    app_folder,
    federation,
    flwr_run,
    free_port,
    stop_tree,
    superlink,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = {
    "clients": 20,
    "clients-per-round": 4,
    "rounds": 6,
    "evaluate-every": 3,
    "eval-samples": 2,
    "test-samples": 4,
    "local-epochs": 1,
}


def simulate(run_dir: Path, engine: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    pairs = [part for key, value in {**SMALL, **changes}.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    program = Path(sys.executable).with_name("fedivon")
    command = [str(program), "simulate", "digits", "--engine", engine, "--run-dir", str(run_dir), *pairs]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def flower_processes() -> set[int]:
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if re.search(r"flower-super|flwr-simulation|flwr-serverapp|raylet|gcs_server", line):
            found.add(process.pid)
    return found


@pytest.mark.parametrize("method", ["fedivon", "fedavg", "pfedbayes"])
def test_both_engines_give_the_same_numbers_and_leave_nothing_running(tmp_path: Path, method: str) -> None:
    before = flower_processes()
    for engine in ("ray", "flwr"):
        done = simulate(tmp_path / engine, engine, method=method, personal=method == "pfedbayes")
        assert done.returncode == 0, done.stderr + done.stdout
    assert flower_processes() - before == set()
    assert_same_outcome(tmp_path / "ray", tmp_path / "flwr")


def test_the_same_seed_gives_the_same_run_twice_and_another_seed_another(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        done = simulate(tmp_path / name, "ray", seed=seed)
        assert done.returncode == 0, done.stderr
    assert_same_outcome(tmp_path / "a", tmp_path / "b")
    assert rounds(tmp_path / "a") != rounds(tmp_path / "c")


def test_an_error_under_flwr_run_is_one_sentence(tmp_path: Path) -> None:
    settings = Settings.from_config({**SMALL, "dataset": "digits", "run-dir": str(tmp_path / "run")})
    wrong = {**settings.to_config(), "dataset": "digitz"}
    log = tmp_path / "flwr.log"
    with log.open("w") as file, superlink(environment(str(tmp_path)), file, "--simulation") as address:
        flwr_run(app_folder(), wrong, str(tmp_path), address, file, federation(20, Resources()))
    text = log.read_text()
    assert "Unknown dataset 'digitz'; choose one of:" in text
    assert not (tmp_path / "run").exists()


@contextmanager
def supernode(home: Path, address: str, number: int, count: int) -> Iterator[int]:
    """A node in a process of its own, with a home of its own, in which it also keeps what it remembers."""
    home.mkdir(exist_ok=True)
    known: dict[str, Scalar] = {"partition-id": number, "num-partitions": count, "state-dir": str(home / "memory")}
    command = programs.supernode(Security.of(None, True, (), address), address, known, free_port())
    with (home / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment(str(home)), stdout=log, stderr=subprocess.STDOUT, cwd=home)
        try:
            yield process.pid
        finally:
            stop_tree(process.pid)


def test_networked_nodes_give_the_same_numbers_as_the_engine(tmp_path: Path) -> None:
    """Three SuperNodes as processes of their own; the partition decides who is who, not the node id."""
    nodes = {"clients": 3, "clients-per-round": 2, "rounds": 2, "evaluate-every": 1}
    done = simulate(tmp_path / "ray", "ray", **nodes)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "ray" / "settings.json").read_text()) | {"run-dir": str(tmp_path / "net")}
    home = tmp_path / "home"
    home.mkdir()
    log = tmp_path / "flwr.log"
    with log.open("w") as file, superlink(environment(str(home)), file) as address, ExitStack() as stack:
        for number in (2, 0, 1):
            stack.enter_context(supernode(tmp_path / f"node{number}", address, number, 3))
        flwr_run(app_folder(), config, str(home), address, file)
    assert (tmp_path / "net" / "summary.json").exists(), log.read_text()
    assert_same_outcome(tmp_path / "ray", tmp_path / "net")


def test_restarted_nodes_remember_what_is_theirs(tmp_path: Path) -> None:
    """SuperLink and nodes die in mid-run, and with them `Context.state`; the heads of the clients are on disk."""
    nodes = {"method": "fedper", "personal": True, "clients": 2, "clients-per-round": 2, "checkpoint-every": 1}
    done = simulate(tmp_path / "ray", "ray", **nodes, rounds=4)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "ray" / "settings.json").read_text()) | {"run-dir": str(tmp_path / "net")}
    log = tmp_path / "flwr.log"
    for home, ended in (("one", "checkpoints/round-000002.safetensors"), ("two", "summary.json")):
        (tmp_path / home).mkdir()
        with log.open("a") as file, superlink(environment(str(tmp_path / home)), file) as address, ExitStack() as stack:
            (link,) = psutil.Process().children()
            for number in (0, 1):
                stack.enter_context(supernode(tmp_path / f"node{number}", address, number, 2))
            arguments = app_folder(), config, str(tmp_path / home), address, file
            submitted = threading.Thread(target=flwr_run, args=arguments)
            submitted.start()
            give_up = time.monotonic() + 300
            while submitted.is_alive() and not (tmp_path / "net" / ended).exists() and time.monotonic() < give_up:
                time.sleep(0.2)
            stop_tree(link.pid)  # first: a server without nodes would go on, with void rounds
        for process in psutil.Process().children():  # `flwr run` may still wait for its SuperLink
            stop_tree(process.pid)
        submitted.join()
        assert (tmp_path / "net" / ended).exists(), log.read_text()
        assert (tmp_path / "net" / "summary.json").exists() == (home == "two")
    assert len(json.loads((tmp_path / "net" / "provenance.json").read_text())["resumed"]) == 1
    assert_same_outcome(tmp_path / "ray", tmp_path / "net")


def readme_example() -> str:
    readme = Path(app_folder(), "README.md").read_text()
    blocks = re.findall(r"```python\n# my_app\.py\n(.*?)```", readme, flags=re.DOTALL)
    assert len(blocks) == 1, "README.md must have exactly one example that begins with '# my_app.py'"
    return str(blocks[0])


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    """The Strategy in somebody else's Flower app, model and data."""
    code = readme_example()
    assert len(code.splitlines()) < 40
    app = tmp_path / "app"
    app.mkdir()
    (app / "my_app.py").write_text(code)
    (app / "LICENSE").write_text("mine\n")
    (app / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "1.0.0"\nlicense = { file = "LICENSE" }\n'
        'dependencies = ["flwr[simulation]>=1.41,<1.42"]\n'
        '[tool.flwr.app]\npublisher = "me"\nfab-format-version = 1\nflwr-version-target = "1.41.0"\n'
        '[tool.flwr.app.components]\nserverapp = "my_app:server_app"\nclientapp = "my_app:client_app"\n'
        "[tool.flwr.app.config]\nunused = 0\n"
    )
    log = tmp_path / "flwr.log"
    with log.open("w") as file, superlink(environment(str(tmp_path)), file, "--simulation") as address:
        flwr_run(app, {"unused": 0}, str(tmp_path), address, file, federation(4, Resources()))
    text = log.read_text()
    found = re.search(r"accuracy (0\.\d+|1\.0+), least certain weight ± (\d+\.\d+)", text)
    assert found, text
    assert float(found[1]) > 0.8
    assert float(found[2]) > 0


def test_environment_is_private(tmp_path: Path) -> None:
    env = environment(str(tmp_path))
    assert env["FLWR_HOME"] == str(tmp_path)
    assert env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
