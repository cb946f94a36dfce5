"""Start a virtual federation: on the Ray engine, or through ``flwr run``."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import fedivon_flwr
from fedivon_flwr.errors import UserError
from fedivon_flwr.settings import Settings
from simulation.engine import Resources, ray_grid
from simulation.report import toml_value

CLIENT_APP = "fedivon_flwr.client_app:app"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def with_ray(settings: Settings, resources: Resources) -> None:
    """Run the apps on the Ray engine, in this process."""
    from fedivon_flwr.server_app import run

    with ray_grid(CLIENT_APP, settings.to_config(), settings.clients, resources) as grid:
        run(grid, settings)


def with_flwr(settings: Settings, resources: Resources) -> None:
    """Run the apps through ``flwr run``, with a SuperLink of its own that is stopped afterwards."""
    app = app_folder()
    run_dir = Path(settings.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fedivon-") as home, (run_dir / "flwr.log").open("w") as log:
        env = {**os.environ, **QUIET, "FLWR_HOME": home, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        with superlink(env, log) as address:
            Path(home, "config.toml").write_text(
                f'[superlink]\ndefault = "fedivon"\n[superlink.fedivon]\naddress = "{address}"\ninsecure = true\n'
            )
            config = Path(home, "run.toml")
            config.write_text(to_toml(settings.to_config()))
            federation = (
                f"num-supernodes={settings.clients} client-resources-num-cpus={resources.cpus:g} "
                f"client-resources-num-gpus={float(resources.gpus)}"
            )
            command = ["flwr", "run", str(app), "fedivon", "--run-config", str(config)]
            command += ["--federation-config", federation, "--stream"]
            subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
    if not (run_dir / "summary.json").exists():
        raise UserError(reason_in(run_dir / "flwr.log"))


def app_folder() -> Path:
    """The project's checkout, which is the app that ``flwr run`` packs and ships."""
    folder = Path(fedivon_flwr.__file__).parent.parent
    if not (folder / "pyproject.toml").exists():
        raise UserError("--engine flwr needs a checkout of the project (flwr run ships its files); use --engine ray.")
    return folder


@contextmanager
def superlink(env: Mapping[str, str], log: Any) -> Iterator[str]:
    """A SuperLink for simulations on a free port of this machine; yields its address."""
    port = free_port()
    command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, env=dict(env), stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until_healthy(process, port)
        yield f"127.0.0.1:{port}"
    finally:
        stop_tree(process.pid)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(process: "subprocess.Popen[bytes]", port: int, seconds: float = 60.0) -> None:
    """Wait for a SuperLink to answer."""
    give_up = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < give_up:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):  # noqa: S310  # our own process
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise UserError("The SuperLink did not start; flwr.log in the run's folder says why.")


def stop_tree(pid: int, patience: float = 10.0) -> None:
    """End a process and all that it started, Ray's servers included."""
    try:
        root = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    family = [*root.children(recursive=True), root]
    for ask in (signal.SIGTERM, signal.SIGKILL):
        for process in family:
            try:
                process.send_signal(ask)
            except psutil.NoSuchProcess:
                continue
        _, family = psutil.wait_procs(family, timeout=patience)


def reason_in(log: Path) -> str:
    """Why a run under Flower failed, as one sentence: our own error where the log has one."""
    lines = log.read_text(errors="replace").splitlines()
    ours = [line.partition("UserError: ")[2] for line in lines if "UserError: " in line]
    return ours[-1] if ours else f"The run under `flwr run` failed; see '{log}'."


def to_toml(config: Mapping[str, Any]) -> str:
    """A flat config as a TOML file (dotted keys are tables)."""
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in config.items())
