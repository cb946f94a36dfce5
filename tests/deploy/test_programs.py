"""The programs' command lines, what is refused, and the supervisor."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from command import Command, assert_refused
from flwr.common.config import parse_config_args

from deploy import programs
from deploy.cli import private
from deploy.credentials import make_credentials
from deploy.programs import NODE_FILES, SERVER_FILES, Security
from fedivon_flwr.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_credentials(tmp_path_factory.mktemp("credentials"), ["link.example.org"], ["a"]).folder


def test_with_credentials_everything_is_encrypted_and_nodes_must_be_known(folder: Path, tmp_path: Path) -> None:
    server = Security.of(folder / "server", False, SERVER_FILES)
    link = programs.superlink(server, tmp_path, "127.0.0.1", 8000)
    assert {"--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile", "--enable-supernode-auth", "--database"} <= set(
        link
    )
    node = programs.supernode(
        Security.of(folder / "nodes/a", False, NODE_FILES), "link.example.org:9443", {"data": "/a b.npz"}, 9094
    )
    assert node[-2:] == ["--node-config", 'data="/a b.npz"']
    assert "--auth-supernode-private-key" in node
    for command in (link, node, programs.superexec(server, "localhost:8000")):
        assert "--insecure" not in command
        assert all(Path(part).exists() for part in command if part.endswith((".crt", ".key")))


def test_without_credentials_nothing_leaves_the_machine() -> None:
    local = Security.of(None, True, (), "127.0.0.1:8000", "localhost", "[::1]:80")
    assert programs.superexec(local, "localhost:8000")[-1] == "--insecure"
    for address in ("0.0.0.0", "10.0.0.7:8000", "link.example.org:8000", "[fd00::7]:8000"):
        with pytest.raises(UserError, match="nothing may leave this machine"):
            Security.of(None, True, (), address)
    with pytest.raises(UserError, match=r"or --insecure\."):
        Security.of(None, False, ())
    with pytest.raises(UserError, match=r"made\.$"):  # a program that is for encrypted federations only
        Security.of(None, None, ())


@pytest.mark.parametrize(
    "address",
    ["link.example.org", "link:0", "link:99999", ":8000", "link:http", "https://link:1", "a b:1", "a;}:1", "[a;b]:1"],
)
def test_an_address_needs_its_port(fedivon: Command, address: str) -> None:
    """Otherwise Flower's program would end and be started again for ever."""
    assert_refused(fedivon("deploy", "supernode", "--insecure", "--superlink", address), address, "HOST:PORT")


def test_what_a_node_writes_is_for_its_owner_only(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)  # made by somebody else before
    assert private(tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_credentials_that_are_wrong(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="either credentials or --insecure"):
        Security.of(folder, True, ())
    with pytest.raises(UserError, match=r"has no server\.crt; copy there"):
        Security.of(folder / "nodes/a", False, SERVER_FILES)
    shutil.copytree(folder / "nodes/a", tmp_path / "a")
    (tmp_path / "a/node.key").chmod(0o640)
    with pytest.raises(UserError, match=r"Others may read the private key .* chmod 600"):
        Security.of(tmp_path / "a", False, NODE_FILES)


def test_the_proxy_passes_the_fleet_api_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "with a space"
    state.mkdir()
    text = programs.proxy_config(Security.of(folder / "server", False, SERVER_FILES), state, 9443, "127.0.0.1:8000")
    assert text.count("proxy_pass https://") == 1
    assert text.index("location /v1/fleet/") < text.index("proxy_pass https://127.0.0.1:8000/v1/fleet/;")
    assert "location / {\n            return 403;" in text
    if (program := programs.nginx()) is None:
        pytest.skip("nginx is not installed")
    file = tmp_path / "nginx.conf"
    file.write_text(text)
    done = subprocess.run([program, "-t", "-e", "stderr", "-c", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ['a "b"', "a\\b", "a\nb"])
def test_paths_that_a_program_would_not_take_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    """Otherwise it would end and be started again for ever."""
    with pytest.raises(UserError, match="quotation mark or backslash"):
        programs.node_config({"data": str(tmp_path / name)})
    server = Security.of(folder / "server", False, SERVER_FILES)
    for odd in (name, "a$b"):
        with pytest.raises(UserError, match="dollar, quotation mark or backslash"):
            programs.proxy(server, tmp_path / odd, 9443, "127.0.0.1:8000")
        assert not (tmp_path / odd).exists()


@pytest.mark.parametrize("path", ["/srv/a b.npz", "/srv/größe 🩻's = 3.npz"])
def test_flower_reads_a_nodes_config_as_we_wrote_it(path: str) -> None:
    node: dict[str, programs.Scalar] = {"data": path, "partition-id": 3}
    assert parse_config_args([programs.node_config(node)]) == node


def test_nginx_is_found_where_only_administrators_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(programs, "ADMIN_FOLDERS", [str(tmp_path / "sbin")])
    assert programs.nginx() is None
    (tmp_path / "sbin").mkdir()
    (tmp_path / "sbin/nginx").touch(mode=0o755)
    assert programs.nginx() == str(tmp_path / "sbin/nginx")


def test_a_program_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of the tests stay
    with pytest.raises(UserError, match=r"The program 'nonsense' cannot be started \(No such file or directory\)\."):
        programs.supervise(["nonsense"], {}, print)


SUPERVISED = """
import os, sys
from deploy import programs
programs.RESTART_SECONDS = 0.1
sys.exit(programs.supervise(["sh", "-c", sys.argv[1]], os.environ, print))
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Runs a program that notes that it was started, and then waits."""
    command = [sys.executable, "-u", "-c", SUPERVISED, f"echo $$ >> {tmp_path}/starts; exec sleep 60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def starts(folder: Path, count: int) -> list[int]:
    """The pids of the program, once it was started so many times."""
    give_up, found = time.monotonic() + 30, list[str]()
    while len(found) < count:
        assert time.monotonic() < give_up, f"started {len(found)} times instead of {count}"
        time.sleep(0.05)
        found = (folder / "starts").read_text().split() if (folder / "starts").exists() else []
    return [int(pid) for pid in found]


def test_a_program_that_was_killed_is_started_again(supervisor: "subprocess.Popen[str]", tmp_path: Path) -> None:
    for count in (1, 2):
        os.kill(starts(tmp_path, count)[-1], signal.SIGKILL)
    assert len(set(starts(tmp_path, 3))) == 3
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(10) == 0  # as it was told: for systemd a success
    assert supervisor.stdout is not None
    assert supervisor.stdout.read().count("sh ended with code -9; it is started again") == 2


def test_what_a_program_leaves_behind_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-c", SUPERVISED, f"sleep 60 & echo $! >> {tmp_path}/starts; exit 0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        left = starts(tmp_path, 2)[0]
        assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
    finally:
        process.terminate()
        out, _ = process.communicate(timeout=10)
    assert "sh ended with code 0; it is started again in 0.1 s. Nobody told it to end: is this machine's clock" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_who_stops_the_supervisor_stops_the_program(
    supervisor: "subprocess.Popen[str]", tmp_path: Path, number: signal.Signals
) -> None:
    (pid,) = starts(tmp_path, 1)
    supervisor.send_signal(number)
    supervisor.wait(10)
    assert not psutil.pid_exists(pid)
    assert len(starts(tmp_path, 1)) == 1
