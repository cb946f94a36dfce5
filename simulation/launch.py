"""Start a virtual federation: on the Ray engine, or through ``flwr run``."""

import logging
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import psutil

import clients
import fedivon_flwr
import strategies
from fedivon_flwr.data import NODES
from fedivon_flwr.errors import UserError
from fedivon_flwr.flower import CONNECTION, ask, connect, environment
from fedivon_flwr.models import build
from fedivon_flwr.runs import FLOWER_RUN, STATE, RunFolder, note_asked, read_json, refuse, refuse_other, write_json
from fedivon_flwr.settings import Settings
from simulation.engine import Resources, ray_grid
from simulation.report import toml_value

CLIENT_APP = "fedivon_flwr.client_app:app"
LINGER_SECONDS = 60.0  # in which the ServerApp's process notices, at its next heartbeat, that its run has ended
OUTAGE_SECONDS = 300.0  # for which a SuperLink may be away before a run is given up
POLL_SECONDS = 3.0
LAST_WORDS = 10  # lines at the end of Flower's log; what it said of an outage that has passed stands before them


def check(settings: Settings, wait: bool = False) -> None:
    """Find out before a virtual federation is started what would fail later: method, data, split, model, folder.

    With `wait`, another process may have the folder: it will be waited for.
    """
    if settings.dataset == NODES:
        raise UserError(
            f"The dataset '{NODES}' is for real nodes (deploy/README.md); virtual clients share one dataset."
        )
    check_server(settings)
    if not wait:
        check_free(Path(settings.run_dir))
    clients.split(settings.dataset, clients.partition_spec(settings))


def check_server(settings: Settings) -> None:
    """What the server itself needs: method, data, model, device, a folder of this run."""
    strategy, dataset = strategies.build(settings), clients.server_data(settings)
    strategy.model_arrays(build(settings.model, dataset.shape, dataset.classes, settings.seed))
    clients.pick_device(settings.device)
    refuse(Path(settings.run_dir), settings, strategies.complete)


def check_free(run_dir: Path, patience: float = 0.0) -> None:
    """Refuse a folder that another process has, and still has after so many seconds."""
    if run_dir.exists():
        folder = RunFolder(run_dir)
        folder.lock(patience)
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
    """Run the apps on a federation that is there, and wait for the end; a run that is under way is waited for."""
    connect(home, address, authority)
    run_dir = Path(settings.run_dir)
    number = earlier = flower_run(run_dir)
    if number is not None and not is_under_way(run_status(number, home)):
        number = None
    if number is not None:
        if old := read_json(run_dir / "settings.json") or noted(run_dir).get("settings"):  # it may not have begun
            refuse_other(run_dir, old, settings, strategies.complete)
    else:
        check_server(settings)
        check_free(run_dir, 0.0 if earlier is None else LINGER_SECONDS)
        if (run_dir / "summary.json").exists():  # it is finished
            return

    def note(submitted: int) -> None:
        write_json(run_dir / FLOWER_RUN, {"run": submitted, "settings": settings.record()})

    try:
        with flwr_log(settings, again=number is not None) as log:
            if number is None:
                submit(app_folder(), settings.to_config(), home, log, outage=OUTAGE_SECONDS, started=note)
            else:
                follow(number, home, log, OUTAGE_SECONDS)
    except KeyboardInterrupt:
        if number is None and flower_run(run_dir) == earlier:
            raise UserError("Interrupted before the run was submitted; there is none.") from None
        raise UserError(
            f"Interrupted, but the run goes on: the same command with --run-dir '{run_dir}' watches it again, and "
            f"`fedivon deploy stop '{run_dir}'`, with the same options, stops it."
        ) from None


def stop_run(run_dir: Path, home: Path, address: str, authority: Path | None) -> bool:
    """Stop the run of a folder, and say whether it was under way; it can be continued from its last checkpoint."""
    connect(home, address, authority)
    if (number := flower_run(run_dir)) is None:
        raise UserError(f"The folder '{run_dir}' is not that of a run on a federation; give the --run-dir of one.")
    if (status := run_status(number, home)) is None:
        raise UserError(f"No SuperLink that knows the run answers at {address}; is it running, and the address right?")
    if not is_under_way(status):
        return False
    said = ask(home, "stop", str(number), CONNECTION)
    if not said["success"]:
        raise UserError(f"The run could not be stopped: {said['error-message']}")
    check_free(run_dir, LINGER_SECONDS)
    return True


def flower_run(run_dir: Path) -> int | None:
    """The number that Flower gave to the run of a folder, if it has one."""
    number = noted(run_dir).get("run")
    return None if number is None else int(number)


def noted(run_dir: Path) -> dict[str, Any]:
    """What was noted of a run when it was submitted to a federation."""
    return read_json(run_dir / FLOWER_RUN) or {}


@contextmanager
def flwr_log(settings: Settings, again: bool = False) -> Iterator[TextIO]:
    """What Flower prints goes into the run's folder; a run that left no summary has failed."""
    run_dir = Path(settings.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not again:
            note_asked(run_dir)
    except OSError as error:
        raise UserError(f"The run folder '{run_dir}' cannot be made ({error.strerror}); choose another.") from None
    with (run_dir / "flwr.log").open("a") as log:
        earlier = log.tell()
        yield log
    if not (run_dir / "summary.json").exists():
        raise UserError(reason_in(run_dir / "flwr.log", earlier))


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
    app: Path, config: Mapping[str, Any], home: str, address: str, log: TextIO, options: Sequence[str] = ()
) -> None:
    """Submit an app to a SuperLink of this machine and wait for its end; `home` is Flower's private folder."""
    connect(Path(home), address)
    submit(app, config, Path(home), log, options)


def submit(
    app: Path,
    config: Mapping[str, Any],
    home: Path,
    log: TextIO,
    options: Sequence[str] = (),
    outage: float = 0.0,
    started: Callable[[int], None] = lambda _: None,
) -> None:
    """Submit an app to the SuperLink that `home` knows, tell `started` the run's number, and wait for its end.

    Whoever interrupts waits until the number is known: without it nobody could watch or stop the run.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as asked, tempfile.TemporaryFile("w+") as printed:
        asked.write(to_toml(config))
        asked.flush()
        command = ["flwr", "run", str(app), CONNECTION, "--run-config", asked.name, *options]
        # A session of its own: Ctrl-C is for us.
        process = subprocess.Popen(
            command, env=environment(str(home)), stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        interrupted = wait_out(process)
        printed.seek(0)
        said = printed.read()
    log.write(said)
    log.flush()
    found = re.search(r"Successfully started run (\d+)", said)
    if found:
        started(int(found[1]))
    if interrupted:
        raise KeyboardInterrupt
    if found:
        follow(int(found[1]), home, log, outage)


def wait_out(process: "subprocess.Popen[bytes]") -> bool:
    """Wait for the end of a program, and say whether we were interrupted meanwhile; the second time it is killed."""
    try:
        process.wait()
    except KeyboardInterrupt:
        try:
            process.wait()
        except KeyboardInterrupt:
            process.kill()
            process.wait()
        return True
    return False


def follow(number: int, home: Path, log: TextIO, outage: float = 0.0) -> None:
    """Write down a run's log and wait for its end; the SuperLink may be away for `outage` seconds.

    If it may not, it is one of our own: then the end of the log is that of the run, and nobody needs to be asked.
    """
    silent: float | None = None  # since when
    shown = ["flwr", "log", str(number), CONNECTION, "--stream"]
    while True:
        subprocess.run(shown, env=environment(str(home)), stdout=log, stderr=subprocess.STDOUT, check=False)
        if not outage:
            return
        if (status := run_status(number, home)) is not None:
            if not is_under_way(status):
                return
            silent = None
        elif silent is None:
            silent = time.monotonic()
        elif time.monotonic() - silent > outage:
            return
        time.sleep(POLL_SECONDS)


def run_status(number: int, home: Path) -> str | None:
    """What Flower says of a run, e.g. ``running`` or ``finished:completed``; None when it does not answer."""
    said = ask(home, "list", CONNECTION, "--run-id", str(number))
    return str(said["runs"][0]["status"]) if said.get("runs") else None


def is_under_way(status: str | None) -> bool:
    """Whether a run has not come to its end.

    >>> [is_under_way(status) for status in ("running", "pending", "finished:failed", None)]
    [True, True, False, False]
    """
    return status is not None and not status.startswith("finished")


def app_folder() -> Path:
    """The project's checkout, which is the app that ``flwr run`` packs and ships."""
    folder = Path(fedivon_flwr.__file__).parent.parent
    if not (folder / "pyproject.toml").exists():
        raise UserError(
            "Flower ships the project's files to the nodes, so this needs a checkout of the project; virtual clients "
            "do without one: fedivon simulate --engine ray."
        )
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
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in family:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        _, family = psutil.wait_procs(family, timeout=patience)


def reason_in(log: Path, earlier: int = 0) -> str:
    """Why a run under Flower failed, as one sentence: our own error where the log has one after so many bytes."""
    lines = log.read_bytes()[earlier:].decode(errors="replace").splitlines()
    if ours := [line.partition("UserError: ")[2] for line in lines if "UserError: " in line]:
        return ours[-1]
    if any("Connection to the SuperLink is unavailable" in line for line in lines[-LAST_WORDS:]):
        return f"The SuperLink does not answer; is it running, and the address right? See '{log}'."
    return f"The run under `flwr run` failed; see '{log}'."


def to_toml(config: Mapping[str, Any]) -> str:
    """A flat config as a TOML file (dotted keys are tables)."""
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in config.items())
