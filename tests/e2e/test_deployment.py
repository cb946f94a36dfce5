"""A real federation with TLS and node keys, every program on a machine of its own (network namespaces), and its faults.

All programs are started by ``fedivon deploy``, as in the guide, in compose.yaml and in the systemd units.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
from machines import Machines, machines
from outcome import assert_same_outcome, rounds, until

from deploy.credentials import make_credentials
from deploy.parts import common, export_parts
from deploy.programs import NODE_FILES, Security, nginx, supernode
from fedivon_flwr.flower import environment
from fedivon_flwr.runs import read_metrics
from fedivon_flwr.settings import Settings
from simulation.launch import app_folder, free_port, stop_tree, wait_until_healthy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

DEADLINE, ROUNDS = 45.0, 30  # of the run with faults
NODES = ("north", "south", "west")
BASE: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "clients": 3,
    "clients-per-round": 3,
    "partitioner": "dirichlet",
    "evaluation": "clients",
    "evaluate-every": 2,
    "eval-samples": 2,
    "test-samples": 4,
    "local-epochs": 1,
    "rounds": 2,
    "min-replies": 1,
    "round-deadline": 300.0,
    "checkpoint-every": 1,
}


class Federation:
    """SuperLink, superexec and proxy on one machine, and a node with data of its own on each of three others."""

    def __init__(self, folder: Path, where: Machines, stack: ExitStack) -> None:
        self.folder, self.where, self._stack = folder, where, stack
        self.settings = Settings.from_config(BASE)
        export_parts(self.settings, folder / "parts")
        self.made = make_credentials(folder / "credentials", [where.address("link")], NODES)
        self.port, proxied = free_port(), nginx() is not None
        self.outer = free_port() if proxied else self.port
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        host = "127.0.0.1" if proxied else where.address("link")
        self.inner = f"{host}:{self.port}"
        self.start("superlink", "link", "superlink", *self.server, "--host", host, "--port", str(self.port))
        self.start("superexec", "link", "superexec", *self.server, "--superlink", self.inner)
        if proxied:
            self.start("proxy", "link", "proxy", *self.server, "--port", str(self.outer), "--superlink", self.inner)
        registered = self.call("register", *self.server, "--superlink", self.inner, "--wait", "180")
        assert registered.returncode == 0, registered.stdout + registered.stderr
        for number, name in enumerate(NODES):
            self.start_node(name, number)

    @property
    def server(self) -> list[str]:
        return ["--credentials", str(self.made.server), "--state", str(self.folder / "link")]

    @property
    def address(self) -> str:
        """Where nodes find the server."""
        return f"{self.where.address('link')}:{self.outer}"

    def words(self, machine: str, *words: str) -> list[str]:
        return self.where.on(machine, [str(Path(sys.executable).with_name("fedivon")), "deploy", *words])

    def start(self, name: str, machine: str, *words: str) -> None:
        log = self._stack.enter_context((self.folder / f"{name}.log").open("ab"))
        process = subprocess.Popen(self.words(machine, *words), stdout=log, stderr=log, cwd=self.folder)
        self.processes[name] = process
        self._stack.callback(stop_tree, process.pid)

    def start_node(self, name: str, number: int) -> None:
        mine = ["--credentials", str(self.made.node(name)), "--state", str(self.folder / name)]
        data = ["--data", str(self.folder / "parts" / f"{number}.npz"), "--number", str(number)]
        self.start(name, name, "supernode", *mine, *data, "--superlink", self.address, "--port", str(free_port()))

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = self.words("link", *words)
        return subprocess.run(command, capture_output=True, text=True, cwd=self.folder, timeout=900, check=False)

    def run_words(self, run_dir: Path, **changes: Any) -> list[str]:
        file = run_dir.with_suffix(".toml")
        config = {**BASE, **common(self.settings), **{key.replace("_", "-"): value for key, value in changes.items()}}
        file.write_text(tomli_w.dumps(config))
        return ["run", str(file), *self.server, "--superlink", self.inner, "--run-dir", str(run_dir)]

    def end(self, name: str, program: str) -> None:
        """End a program, with all that it has started, as a crash would."""
        for process in psutil.Process(self.processes[name].pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # those that work on a message come and go
                if any(Path(word).name == program for word in process.cmdline()[:2]):
                    for one in (*process.children(recursive=True), process):
                        with suppress(psutil.NoSuchProcess):
                            one.kill()
                    return
        raise AssertionError(f"{name} has no process {program}")

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with ExitStack() as stack:
        where = stack.enter_context(machines(("link", *NODES)))
        yield Federation(tmp_path_factory.mktemp("federation"), where, stack)


def test_the_outcome_is_that_of_the_engine(federation: Federation, tmp_path: Path) -> None:
    done = federation.call(*federation.run_words(tmp_path / "net"))
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "ray.toml").write_text(tomli_w.dumps(BASE))
    program = Path(sys.executable).with_name("fedivon")
    command = [str(program), "simulate", str(tmp_path / "ray.toml"), "--run-dir", str(tmp_path / "ray")]
    assert subprocess.run(command, capture_output=True, check=False, timeout=300).returncode == 0
    assert_same_outcome(tmp_path / "net", tmp_path / "ray")
    rows = [json.loads(line) for line in (tmp_path / "net" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        phases = {key: value for key, value in row["timeline"].items() if key != "client"}
        assert list(phases) == ["push", "start", "import", "load", "train", "reply"]
        assert min(phases.values()) >= 0  # here it is one clock
        assert sum(phases.values()) <= row["seconds"] + 0.01
        assert phases["import"] > 0.1  # a process for every message


@pytest.mark.parametrize("wrong", ["key", "authority"])
def test_strangers_are_refused(federation: Federation, tmp_path: Path, wrong: str) -> None:
    """A key that is not registered, or a certificate of another authority."""
    other = make_credentials(tmp_path / "other", [], ["stranger"]).node("stranger")
    if wrong == "key":
        shutil.copy(federation.made.node("north") / "ca.crt", other / "ca.crt")
    else:
        shutil.copy(federation.made.node("north") / "node.key", other / "node.key")
    command = supernode(Security.of(other, False, NODE_FILES), federation.address, {}, free_port())
    with (tmp_path / "log").open("w") as log:  # a file, since what the program has started may keep a pipe open
        process = subprocess.Popen(
            federation.where.on("west", command),
            env=environment(str(tmp_path)),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            assert process.wait(120) != 0
        finally:
            with suppress(ProcessLookupError):  # nothing is left of it
                os.killpg(process.pid, signal.SIGKILL)
    said = " ".join((tmp_path / "log").read_text().split())
    if wrong == "key":  # the node is not told why, the SuperLink is
        assert "Failed to activate" in said
        assert "No SuperNode found with the given public key" in federation.log("superlink")
    else:
        assert "certificate verify failed" in said


def test_nodes_reach_their_own_api_only(federation: Federation) -> None:
    """Whoever holds the authority's certificate must not be able to submit runs from outside."""
    if nginx() is None:
        pytest.skip("nginx is not installed")
    fleet = "v1/fleet/pull-messages"
    paths = ("v1/control/list-runs", "v1/control/start-run", "v1/runtime/acquire-task", "health", fleet)
    inner = f"https://{federation.where.address('link')}:{federation.port}/health"
    code = f"""
import ssl, urllib.error, urllib.request
context = ssl.create_default_context(cafile={str(federation.made.node("west") / "ca.crt")!r})
for path in {paths}:
    request = urllib.request.Request(f"https://{federation.address}/{{path}}", data=b"", method="POST")
    try:
        print(path, urllib.request.urlopen(request, context=context, timeout=10).status)
    except urllib.error.HTTPError as error:
        print(path, error.code)
try:
    urllib.request.urlopen({inner!r}, context=context, timeout=3)
    print("superlink answers")
except OSError:
    print("superlink does not answer")
"""
    command = federation.where.on("west", [sys.executable, "-c", code])
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    *asked, direct = done.stdout.splitlines()
    codes = {line.split()[0]: int(line.split()[1]) for line in asked}
    assert codes.pop(fleet) != 403
    assert set(codes.values()) == {403}
    assert direct == "superlink does not answer" or not federation.where.namespaces


def test_every_program_has_a_machine_of_its_own(federation: Federation) -> None:
    if not federation.where.namespaces:
        pytest.skip("no network namespaces (they need root): all is on one machine, and no cable can be cut")
    where = {name: Path(f"/proc/{process.pid}/ns/net").readlink() for name, process in federation.processes.items()}
    assert where["superlink"] == where["superexec"] == where.get("proxy", where["superlink"])
    assert len({where[name] for name in ("superlink", *NODES)} | {Path("/proc/self/ns/net").readlink()}) == 2 + len(
        NODES
    )


def lines(run_dir: Path) -> list[str]:
    return (run_dir / "metrics.jsonl").read_text().splitlines()


def test_faults_cost_no_more_than_the_round_in_flight(federation: Federation, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    asked = federation.run_words(run_dir, rounds=ROUNDS, evaluate_every=100, round_deadline=DEADLINE)

    def submit() -> subprocess.Popen[bytes]:
        log = (tmp_path / "run.log").open("ab")
        return subprocess.Popen(federation.words("link", *asked), stdout=log, stderr=log, cwd=tmp_path)

    def rows() -> list[dict[str, Any]]:
        return rounds(run_dir)

    def full_round_after(done: int) -> bool:
        return any(row["replies"] == 3 for row in rows()[done:])

    process = submit()
    try:
        until(lambda: len(rows()) >= 2, 240, "two rounds")

        federation.end("south", "flower-supernode")
        done = len(rows())
        until(
            lambda: any(row["replies"] == 2 for row in rows()[done:]),
            DEADLINE + 120,  # the round before may still be under way
            "the round closes without the killed node",
        )
        closed = next(row for row in list(read_metrics(run_dir))[done:] if row["replies"] == 2)
        assert closed["seconds"] < DEADLINE + 15
        until(lambda: full_round_after(done + 1), 240, "the killed node is used again")

        if federation.where.namespaces:
            federation.where.link("west", "down")
            done = len(rows())
            until(
                lambda: any(row["replies"] == 2 for row in rows()[done:]),
                120,
                "a round without the node that is cut off",
            )
            federation.where.link("west", "up")
            done = len(rows())
            until(lambda: full_round_after(done), 240, "the node that was cut off is used again")

        federation.end("superlink", "flower-superlink")
        done = len(rows())
        until(lambda: full_round_after(done + 1), 240, "the run survives a restart of the SuperLink")

        assert process.poll() is None  # `fedivon deploy run` has waited for the SuperLink
        federation.end("superexec", "flwr-serverapp")
        before = lines(run_dir)
        until(lambda: process.poll() is not None, 180, "a run whose server was killed ends")
        assert process.returncode == 2
        assert len(rows()) < ROUNDS

        process, done = submit(), len(rows())
        until(lambda: len(rows()) > done, 240, "the run goes on")
        refused = federation.call(*asked, "--set", f"rounds={ROUNDS + 1}")
        assert (refused.returncode, "belongs to a run with other settings" in refused.stderr) == (2, True)
        stopped = federation.call("stop", str(run_dir), *federation.server, "--superlink", federation.inner)
        assert (stopped.returncode, stopped.stdout) == (0, f"{run_dir}: stopped\n")
        until(lambda: process.poll() is not None, 120, "the run that is stopped ends")
        assert process.returncode == 2
        again = federation.call("stop", str(run_dir), *federation.server, "--superlink", federation.inner)
        assert again.stdout == f"{run_dir}: had ended already\n"

        process = submit()
        until(lambda: process.poll() is not None, 900, "the run that is resumed ends")
        assert process.returncode == 0, (tmp_path / "run.log").read_text()
    finally:
        stop_tree(process.pid)
    assert [row["round"] for row in rows()] == list(range(1, ROUNDS + 1))
    assert lines(run_dir)[: len(before) - 1] == before[:-1]  # nothing was done again but the round in flight
    assert len(json.loads((run_dir / "provenance.json").read_text())["resumed"]) == 2
    assert any(row["replies"] == 3 for row in rows()[-3:])


def test_a_node_is_shut_out(federation: Federation) -> None:
    """After the runs: nobody comes back with a key that was struck off."""
    words = (*federation.server, "--superlink", federation.inner)
    refused = federation.call("unregister", "nobody", *words)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "there are: north, south, west" in refused.stderr
    shown = len(federation.log("south"))
    assert federation.call("unregister", "south", *words).returncode == 0
    assert sorted(path.stem for path in (federation.made.server / "nodes").iterdir()) == ["north", "west"]
    key = federation.made.node("south") / "node.pub"
    until(lambda: "Failed to activate" in federation.log("south")[shown:], 120, "the node ends, and its key is refused")
    shutil.copy(key, federation.made.server / "nodes" / "south.pub")
    again = federation.call("register", *words)
    assert again.stdout.splitlines() == [
        "north: is registered already",
        "south: was shut out, and needs a new key",
        "west: is registered already",
    ]


def test_no_secret_is_told(federation: Federation) -> None:
    """Runs last: nothing in what the programs printed."""
    secrets = [path.read_text() for path in federation.made.folder.rglob("*.key")]
    assert len(secrets) == 2 + len(NODES)
    lines = {line for text in secrets for line in text.splitlines() if line and not line.startswith("-----")}
    for log in federation.folder.glob("*.log"):
        text = log.read_text()
        assert not any(line in text for line in lines), log.name


def test_the_example_with_its_own_model_and_data_and_a_node_that_joins_later(tmp_path: Path) -> None:
    """Unencrypted, on this machine; the programs find the model in the folder where they were started."""
    for file in (app_folder() / "deploy" / "example").glob("tumours.*"):
        shutil.copy(file, tmp_path)
    subprocess.run([sys.executable, "tumours.py", "data"], cwd=tmp_path, check=True, capture_output=True)
    program, port = str(Path(sys.executable).with_name("fedivon")), free_port()
    link = ["--insecure", "--state", "link"]
    with ExitStack() as stack, (tmp_path / "log").open("ab") as log:

        def start(*words: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen([program, "deploy", *words], cwd=tmp_path, stdout=log, stderr=log)
            stack.callback(stop_tree, process.pid)
            return process

        def start_node(number: int, name: str) -> None:
            mine = ["--state", name, "--data", f"data/{name}.npz", "--number", str(number), "--port", str(free_port())]
            start("supernode", "--insecure", "--superlink", f"localhost:{port}", *mine)

        wait_until_healthy(start("superlink", *link, "--port", str(port)), port)
        start("superexec", *link, "--superlink", f"localhost:{port}")
        for number in (0, 1):
            start_node(number, NODES[number])
        words = ["run", "tumours.toml", *link, "--superlink", f"localhost:{port}", "--run-dir", "run", "-s", "rounds=6"]
        run = start(*words, "-s", "node-wait=20.0")  # for the third, which comes later
        until(lambda: run.poll() is not None or rounds(tmp_path / "run"), 240, "a round of two")
        start_node(2, NODES[2])
        until(lambda: run.poll() is not None, 600, "the run ends")
    assert run.returncode == 0, (tmp_path / "log").read_text()
    rows = rounds(tmp_path / "run")
    replies = [row["replies"] for row in rows]
    assert replies == sorted(replies)
    assert (len(replies), replies[0], replies[-1]) == (6, 2, 3)
    assert rows[-1]["clients"]["mc"]["accuracy"] > 0.6
