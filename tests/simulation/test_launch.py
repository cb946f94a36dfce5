"""How the command line finds a run on a federation again, and what it says of one that failed."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from grid import SMALL, LocalGrid

import strategies
from fedivon_flwr.errors import UserError
from fedivon_flwr.flower import connect
from fedivon_flwr.runs import FLOWER_RUN, RunFolder, write_json
from fedivon_flwr.settings import Settings
from simulation import launch
from simulation.federation import run


@pytest.fixture
def under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A run of which Flower says that it is under way."""
    settings = strategies.complete(Settings.from_config({**SMALL, "rounds": 1, "run-dir": str(tmp_path / "run")}))
    run(LocalGrid(settings.to_config(), settings.clients), settings)
    write_json(tmp_path / "run" / FLOWER_RUN, {"run": 7})
    monkeypatch.setattr(launch, "run_status", lambda number, home: "running" if number == 7 else None)
    return settings


def test_a_run_under_way_is_watched_by_its_own_settings_only(
    under_way: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[int] = []
    monkeypatch.setattr(launch, "follow", lambda number, *_: followed.append(number))
    launch.with_superlink(under_way, tmp_path / "home", "localhost:1", None)
    assert followed == [7]
    for changed in ({"seed": 5}, {"method": "fedavg"}):
        with pytest.raises(UserError, match="belongs to a run with other settings"):
            launch.with_superlink(under_way.model_copy(update=changed), tmp_path / "home", "localhost:1", None)
    assert followed == [7]


def test_a_run_that_has_not_begun_is_watched_by_its_own_settings_only(
    under_way: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a superexec Flower knows a run, but nothing has written its folder yet."""
    new = under_way.model_copy(update={"run_dir": str(tmp_path / "new")})
    followed: list[int] = []

    def submit(*_: object, started: Callable[[int], None], **__: object) -> None:
        started(7)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "submit", submit)
    monkeypatch.setattr(launch, "follow", lambda number, *_: followed.append(number))
    with pytest.raises(UserError, match="Interrupted, but the run goes on"):
        launch.with_superlink(new, tmp_path / "home", "localhost:1", None)
    with pytest.raises(UserError, match=r"belongs to a run with other settings \(seed = 0, now 5\)"):
        launch.with_superlink(new.model_copy(update={"seed": 5}), tmp_path / "home", "localhost:1", None)
    assert followed == []
    with pytest.raises(UserError, match=r"`flwr run` failed"):  # this one did not write its folder
        launch.with_superlink(new, tmp_path / "home", "localhost:1", None)
    assert followed == [7]


def test_a_folder_whose_run_has_just_ended_is_waited_for(
    under_way: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ServerApp's process finds out some seconds later than Flower says so, and has the folder until then."""
    run_dir, home = Path(under_way.run_dir), tmp_path / "home"
    monkeypatch.setattr(launch, "ask", lambda *_: {"success": True})

    def while_held(act: Callable[[], object]) -> float:
        held = threading.Event()

        def hold() -> None:
            folder = RunFolder(run_dir)
            folder.lock()
            held.set()
            time.sleep(1.0)
            folder.close()

        other, start = threading.Thread(target=hold), time.monotonic()
        other.start()
        held.wait()
        try:
            act()
            return time.monotonic() - start
        finally:
            other.join()

    assert while_held(lambda: launch.stop_run(run_dir, home, "localhost:1", None)) >= 1.0
    monkeypatch.setattr(launch, "run_status", lambda *_: "finished:stopped")
    assert while_held(lambda: launch.with_superlink(under_way, home, "localhost:1", None)) >= 1.0
    (run_dir / FLOWER_RUN).unlink()  # of a run that is not on a federation nobody knows when it ends
    with pytest.raises(UserError, match="in use by another run"):
        while_held(lambda: launch.with_superlink(under_way, home, "localhost:1", None))


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ([None, None, "running", None, "finished:completed"], 5),
        ([None, None, None, None, None, "running"], 5),  # away for 400 s
        (["running", "finished:failed"], 2),
    ],
)
def test_a_superlink_may_be_away_for_a_while_however_long_the_run_has_been_watched(
    answers: list[str | None], asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, given = 0.0, iter(answers)

    def passing(*_: object, **__: object) -> None:  # the stream has gone on for long before anything happens
        nonlocal clock
        clock += 1000.0 if clock == 0 else 100.0

    monkeypatch.setattr("simulation.launch.subprocess.run", passing)
    monkeypatch.setattr("simulation.launch.time.sleep", lambda _: None)
    monkeypatch.setattr("simulation.launch.time.monotonic", lambda: clock)
    monkeypatch.setattr(launch, "run_status", lambda *_: next(given))
    with (tmp_path / "log").open("w") as log:
        launch.follow(7, tmp_path, log, outage=300.0)
    assert len(answers) - len(list(given)) == asked


def test_a_home_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written to .*--state"):
        connect(tmp_path / "file", "localhost:1")
    connect(tmp_path / "home", "localhost:1")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["config.toml"]


def test_who_interrupts_is_told_how_to_come_back(
    under_way: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "follow", interrupted)
    with pytest.raises(UserError) as caught:
        launch.with_superlink(under_way, tmp_path / "home", "localhost:1", None)
    assert f"--run-dir '{under_way.run_dir}' watches it again" in str(caught.value)
    assert f"`fedivon deploy stop '{under_way.run_dir}'`" in str(caught.value)


def test_who_interrupts_before_there_is_a_run_is_told_so(
    under_way: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "submit", interrupted)
    new = under_way.model_copy(update={"run_dir": str(tmp_path / "new")})
    with pytest.raises(UserError, match="Interrupted before the run was submitted"):
        launch.with_superlink(new, tmp_path / "home", "localhost:1", None)


INTERRUPTED = """
import signal, subprocess
from simulation.launch import wait_out
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
child = subprocess.Popen(["sh", "-c", "echo started; sleep 2; echo ended"], start_new_session=True)
print("interrupted" if wait_out(child) else "undisturbed", child.returncode)
"""


@pytest.mark.parametrize(("times", "lines"), [(1, ["ended", "interrupted 0"]), (2, ["interrupted -9"])])
def test_an_interrupt_waits_for_the_end_of_the_program_and_a_second_kills_it(times: int, lines: list[str]) -> None:
    process = subprocess.Popen([sys.executable, "-u", "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    for _ in range(times):
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
    assert process.stdout.read().splitlines() == lines
    assert process.wait(10) == 0


def test_only_a_run_of_a_federation_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="is not that of a run on a federation"):
        launch.stop_run(tmp_path, tmp_path / "home", "localhost:1", None)
    write_json(tmp_path / FLOWER_RUN, {"run": 7})
    monkeypatch.setattr(launch, "run_status", lambda *_: None)
    with pytest.raises(UserError, match=r"answers at localhost:1; is it running"):
        launch.stop_run(tmp_path, tmp_path / "home", "localhost:1", None)
    monkeypatch.setattr(launch, "run_status", lambda *_: "finished:completed")
    assert not launch.stop_run(tmp_path, tmp_path / "home", "localhost:1", None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x\nfedivon_flwr.errors.UserError: Bad key.\n", "Bad key."),
        ("│ Connection to the SuperLink is unavailable. │\n", "The SuperLink does not answer"),
        (
            "Connection to the SuperLink is unavailable\n" + 9 * "round\n" + "failed\n",
            "The run under `flwr run` failed; see",
        ),
        ("nothing that we know\n", "The run under `flwr run` failed; see"),
    ],
)
def test_the_reason_of_a_failure_is_one_sentence(tmp_path: Path, text: str, reason: str) -> None:
    log = tmp_path / "flwr.log"
    log.write_text("UserError: of an earlier try.\n" + text)
    found = launch.reason_in(log, earlier=len("UserError: of an earlier try.\n"))
    assert found.startswith(reason)
