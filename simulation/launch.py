"""Start a virtual federation: on the Ray engine, or through ``flwr run``."""

import logging
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import psutil

import clients
import fedivon_flwr
import strategies
from fedivon_flwr.data import NODES
from fedivon_flwr.errors import UserError
from fedivon_flwr.flower import CONNECTION, connect, environment
from fedivon_flwr.models import build
from fedivon_flwr.runs import STATE, RunFolder, refuse
from fedivon_flwr.settings import Settings
from simulation.engine import Resources, ray_grid
from simulation.report import toml_value

CLIENT_APP = "fedivon_flwr.client_app:app"


def check(settings: Settings, wait: bool = False) -> None:
    """Find out before a virtual federation is started what would fail later: method, data, split, model, folder.

    With `wait`, another process may have the folder: it will be waited for.
    """
    if settings.dataset == NODES:
        raise UserError(
            f"The dataset '{NODES}' is for real nodes (deploy/README.md); virtual clients share one dataset."
        )
    check_server(settings, wait)
    clients.split(settings.dataset, clients.partition_spec(settings))


def check_server(settings: Settings, wait: bool = False) -> None:
    """What the server itself needs: method, data, model, device, folder."""
    strategies.build(settings)
    dataset = clients.server_data(settings)
    build(settings.model, dataset.shape, dataset.classes, settings.seed)
    clients.pick_device(settings.device)
    folder = RunFolder(Path(settings.run_dir))
    refuse(folder.path, settings, strategies.complete)
    if folder.path.exists() and not wait:
        folder.lock()
        folder.close()


def with_ray(settings: Settings, resources: Resources) -> None:
    """Run the apps on the Ray engine, in this process."""
    from simulation.federation import run

    logging.getLogger("flwr").setLevel(logging.WARNING)  # the progress line says it already
    with ray_grid(CLIENT_APP, client_config(settings), settings.clients, resources) as grid:
        run(grid, settings)


def with_flwr(settings: Settings, resources: Resources) -> None:
    """Run the apps through ``flwr run``, with a SuperLink of its own that is stopped afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="fedivon-") as home,
        flwr_log(settings) as log,
        superlink(environment(home), log, "--simulation") as address,
    ):
        flwr_run(app_folder(), client_config(settings), home, address, log, federation(settings.clients, resources))


def with_superlink(settings: Settings, home: Path, address: str, authority: Path | None) -> None:
    """Run the apps on a federation that is there, and wait for the end."""
    with flwr_log(settings) as log:
        flwr_run(app_folder(), settings.to_config(), str(home), address, log, authority=authority)


@contextmanager
def flwr_log(settings: Settings) -> Iterator[TextIO]:
    """What Flower prints goes into the run's folder; a run that left no summary has failed."""
    run_dir = Path(settings.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The run folder '{run_dir}' cannot be made ({error.strerror}); choose another.") from None
    with (run_dir / "flwr.log").open("w") as log:
        yield log
    if not (run_dir / "summary.json").exists():
        raise UserError(reason_in(run_dir / "flwr.log"))


def client_config(settings: Settings) -> dict[str, Any]:
    """The run config; virtual clients keep what they remember in the run's folder."""
    return {**settings.to_config(), "state-dir": settings.state_dir or str(Path(settings.run_dir) / STATE)}


def federation(nodes: int, resources: Resources) -> list[str]:
    """The options of ``flwr run`` that describe a simulated federation."""
    described = (
        f"num-supernodes={nodes} client-resources-num-cpus={resources.cpus:g} "
        f"client-resources-num-gpus={float(resources.gpus)}"
    )
    return ["--federation-config", described]


def flwr_run(
    app: Path,
    config: Mapping[str, Any],
    home: str,
    address: str,
    log: TextIO,
    options: Sequence[str] = (),
    authority: Path | None = None,
) -> None:
    """Submit an app to a SuperLink and wait for its end; `home` is Flower's private folder."""
    connect(Path(home), address, authority)
    asked = Path(home, "run.toml")
    asked.write_text(to_toml(config))
    run_command = ["flwr", "run", str(app), CONNECTION, "--run-config", str(asked), "--stream", *options]
    subprocess.run(run_command, env=environment(home), stdout=log, stderr=subprocess.STDOUT, check=False)


def app_folder() -> Path:
    """The project's checkout, which is the app that ``flwr run`` packs and ships."""
    folder = Path(fedivon_flwr.__file__).parent.parent
    if not (folder / "pyproject.toml").exists():
        raise UserError("--engine flwr needs a checkout of the project (flwr run ships its files); use --engine ray.")
    return folder


@contextmanager
def superlink(env: Mapping[str, str], log: TextIO, *options: str) -> Iterator[str]:
    """A SuperLink on a free port of this machine, for this machine; yields its address."""
    port = free_port()
    superlink_command = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port), *options]
    # A session of its own: Ctrl-C is for us, who then stop it and all that it started.
    process = subprocess.Popen(
        superlink_command, env=dict(env), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
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
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):  # our own process
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
