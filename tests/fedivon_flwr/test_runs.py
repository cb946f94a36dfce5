"""A run's folder: what is in it, what survives a kill, and whose folder it is."""

import getpass
import json
import multiprocessing
import os
import platform
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedivon_flwr import runs
from fedivon_flwr.errors import UserError
from fedivon_flwr.runs import (
    KEPT_CHECKPOINTS,
    Checkpoint,
    RunFolder,
    load_arrays,
    new_path,
    provenance,
    read_json,
    read_metrics,
    save_arrays,
    write_bytes,
    write_json,
)
from fedivon_flwr.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(run_dir=str(tmp_path / "run"), rounds=20)


@pytest.fixture
def folder(settings: Settings) -> Iterator[RunFolder]:
    folder = RunFolder.open(settings)
    yield folder
    folder.close()


def checkpoint(number: int) -> Checkpoint:
    arrays = {"mean/b": np.full((2, 3), number, np.float32), "mean/a": np.arange(number, dtype=np.float32)}
    return Checkpoint(number, arrays, {"ess": 0.1 + number})


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


# ---------------------------------------------------------------- a new folder


def test_new_folder_holds_settings_and_provenance(folder: RunFolder, settings: Settings) -> None:
    assert sorted(files(folder.path)) == [".lock", "provenance.json", "settings.json"]
    assert read_json(folder.path / "settings.json") == settings.record()
    assert not folder.finished
    assert folder.metrics() == []
    assert folder.resume() is None


def test_provenance_tells_versions_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "a-secret-in-the-environment")
    found = provenance()
    assert found["versions"].keys() >= {"python", "flwr", "torch", "ivon-opt", "numpy", "ray", "fedivon-flwr"}
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["numpy"] == np.__version__
    assert found.keys() == {"id", "versions", "command", "git_commit", "started", "machine"}
    text = json.dumps(found)
    for secret in ("a-secret-in-the-environment", str(Path.home()), str(Path.cwd()), platform.node()):
        assert secret not in text
    assert f"/{getpass.getuser()}" not in text


def test_git_commit_is_the_one_of_the_checkout() -> None:
    command = ["git", "-C", str(Path(runs.__file__).parent), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        assert runs.git_commit() is None
    else:
        assert (runs.git_commit() or "").removesuffix("-dirty") == done.stdout.strip()


def test_without_run_dir_each_run_gets_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDIVON_RUNS", str(tmp_path / "all"))
    folders = [RunFolder.open(Settings(seed=3)) for _ in range(3)]
    for folder in folders:
        folder.close()
    assert len({folder.path for folder in folders}) == 3
    assert all(folder.path.parent == tmp_path / "all" for folder in folders)
    assert all("fedivon-digits-seed3" in folder.path.name for folder in folders)


def test_new_path_of_an_own_file_is_named_by_the_file(tmp_path: Path) -> None:
    assert new_path(Settings(dataset=str(tmp_path / "letters.npz"))).name.endswith("-fedivon-letters-seed0")


# ---------------------------------------------------------------- resume


def write_rounds(folder: RunFolder, last: int) -> None:
    for number in range(1, last + 1):
        folder.append_metrics({"round": number, "train_loss": 1 / number})


def test_resume_takes_the_last_checkpoint_and_strikes_later_rounds(folder: RunFolder) -> None:
    write_rounds(folder, 7)
    folder.save_checkpoint(checkpoint(5))
    found = folder.resume()
    assert found is not None
    assert (found.round, found.state) == (5, {"ess": 5.1})
    assert list(found.arrays) == ["mean/b", "mean/a"]
    for key, array in checkpoint(5).arrays.items():
        np.testing.assert_array_equal(found.arrays[key], array)
    assert folder.metrics() == [{"round": n, "train_loss": 1 / n} for n in range(1, 6)]
    folder.append_metrics({"round": 6})
    assert [row["round"] for row in folder.metrics()] == [1, 2, 3, 4, 5, 6]


def test_resume_without_checkpoint_starts_anew(folder: RunFolder) -> None:
    write_rounds(folder, 3)
    assert folder.resume() is None
    assert folder.metrics() == []


def test_a_line_cut_off_by_a_kill_is_dropped(folder: RunFolder) -> None:
    write_rounds(folder, 3)
    path = folder.path / "metrics.jsonl"
    whole = path.read_bytes()
    for length in range(len(whole) - 2, whole.rindex(b"\n", 0, -1), -1):
        path.write_bytes(whole[:length])
        assert [row["round"] for row in folder.metrics()] == [1, 2], length
    path.write_bytes(whole[:-1])  # only the end of the line is missing
    assert [row["round"] for row in folder.metrics()] == [1, 2, 3]


def test_after_a_cut_off_line_the_file_goes_on_whole(folder: RunFolder) -> None:
    write_rounds(folder, 3)
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "train')
    folder.save_checkpoint(checkpoint(3))
    folder.resume()
    folder.append_metrics({"round": 4})
    assert [row["round"] for row in read_metrics(folder.path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("damage", ["empty", "half", "zeros", "text", "foreign"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(folder: RunFolder, damage: str) -> None:
    write_rounds(folder, 7)
    folder.save_checkpoint(checkpoint(3))
    folder.save_checkpoint(checkpoint(6))
    newest = folder.path / "checkpoints" / "round-000006.safetensors"
    whole = newest.read_bytes()
    if damage == "foreign":
        save_file({"x": np.zeros(3)}, newest)
    else:
        wrong = {"empty": b"", "half": whole[: len(whole) // 2], "zeros": bytes(len(whole)), "text": b"hello " * 99}
        newest.write_bytes(wrong[damage])
    found = folder.resume()
    assert found is not None
    assert found.round == 3
    assert [row["round"] for row in folder.metrics()] == [1, 2, 3]


def test_only_the_newest_checkpoints_stay(folder: RunFolder) -> None:
    for number in (1, 2, 9, 10, 11):
        folder.save_checkpoint(checkpoint(number))
    names = sorted(path.name for path in (folder.path / "checkpoints").iterdir())
    assert names == ["round-000010.safetensors", "round-000011.safetensors"]
    assert len(names) == KEPT_CHECKPOINTS


def test_a_finished_run_says_so(folder: RunFolder) -> None:
    write_json(folder.path / "summary.json", {"method": "fedivon"})
    assert folder.finished


# ---------------------------------------------------------------- whose folder


def test_the_same_settings_continue(folder: RunFolder, settings: Settings) -> None:
    before = files(folder.path)
    folder.close()
    elsewhere = settings.model_copy(update={"device": "cpu", "checkpoint_every": 3})
    again = RunFolder.open(elsewhere)
    again.close()
    after = files(again.path)
    before.pop("provenance.json"), after.pop("provenance.json")  # it has one resumption more
    assert after == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rounds": 21}, "rounds = 20, now 21"),
        ({"options": {"fedivon": {"lr": 0.5}}}, "fedivon.lr = None, now 0.5"),
        ({"method": "fedavg"}, "method = 'fedivon', now 'fedavg'"),
    ],
)
def test_other_settings_are_refused(
    folder: RunFolder, settings: Settings, change: dict[str, Any], sentence: str
) -> None:
    folder.close()
    before = files(folder.path)
    with pytest.raises(UserError) as caught:
        RunFolder.open(settings.model_copy(update=change))
    assert sentence in str(caught.value)
    assert str(folder.path) in str(caught.value)
    assert files(folder.path) == before
    RunFolder.open(settings).close()  # and it is not locked afterwards


def test_a_run_goes_on_when_its_method_has_got_an_option_since(folder: RunFolder, settings: Settings) -> None:
    folder.close()

    def complete(given: Settings) -> Settings:
        return given.model_copy(update={"options": {"fedivon": {"lr": 0.5, **given.options.get("fedivon", {})}}})

    RunFolder.open(complete(settings), complete).close()
    with pytest.raises(UserError, match=r"fedivon\.lr = 0\.5, now 0\.1"):
        RunFolder.open(settings.model_copy(update={"options": {"fedivon": {"lr": 0.1}}}), complete)


HOLD = """
import sys
from fedivon_flwr.runs import RunFolder
from fedivon_flwr.settings import Settings
folder = RunFolder.open(Settings(run_dir=sys.argv[1], rounds=20))
print("open", flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_is_refused_until_its_process_ends(settings: Settings) -> None:
    command = [sys.executable, "-c", HOLD, settings.run_dir]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "open\n"
            with pytest.raises(UserError, match="in use by another run"):
                RunFolder.open(settings)
        finally:
            other.kill()  # also a killed process gives it free
    RunFolder.open(settings).close()


def test_a_foreign_folder_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    before = files(tmp_path)
    with pytest.raises(UserError, match="not empty and holds no run"):
        RunFolder.open(Settings(run_dir=str(tmp_path)))
    assert files(tmp_path) == before


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "thesis.tex"
    path.write_text("precious")
    with pytest.raises(UserError, match="is a file"):
        RunFolder.open(Settings(run_dir=str(path)))
    with pytest.raises(UserError, match="cannot be made"):
        RunFolder.open(Settings(run_dir=str(path / "run")))
    assert path.read_text() == "precious"


@pytest.mark.parametrize("leftover", [".settings.json.123.part", "provenance.json", "flwr.log", ".lock"])
def test_a_run_killed_at_its_very_start_can_be_started_again(tmp_path: Path, leftover: str) -> None:
    (tmp_path / leftover).write_text("")
    RunFolder.open(Settings(run_dir=str(tmp_path))).close()
    assert (read_json(tmp_path / "settings.json"))["method"] == "fedivon"


def test_damaged_settings_are_told(folder: RunFolder, settings: Settings) -> None:
    folder.close()
    (folder.path / "settings.json").write_text('{"rounds": 2')
    with pytest.raises(UserError, match=r"settings\.json' is damaged"):
        RunFolder.open(settings)


# ---------------------------------------------------------------- files


def test_arrays_keep_their_order_and_bits(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "z": rng.standard_normal((3, 4)).astype(np.float32).T,  # not contiguous
        "a": np.array([np.nan, np.inf, -0.0, 5e-324]),
        "m/scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 3), np.float32),
        "b": rng.integers(0, 256, (2, 2), np.uint8),
    }
    save_arrays(tmp_path / "x.safetensors", arrays, {"round": 3, "name": "ä"})
    found, described = load_arrays(tmp_path / "x.safetensors")
    assert list(found) == list(arrays)
    assert (described["round"], described["name"]) == (3, "ä")
    for key, array in arrays.items():
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape)
        assert found[key].tobytes() == array.tobytes()


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", bytes(100)])
def test_what_is_no_posterior_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is not a posterior or checkpoint"):
        load_arrays(path)


def test_a_foreign_safetensors_file_is_told(tmp_path: Path) -> None:
    save_file({"x": np.zeros(3)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="is not a posterior or checkpoint"):
        load_arrays(tmp_path / "x.safetensors")


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no file"):
        load_arrays(tmp_path / "x.safetensors")


def test_write_bytes_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_bytes(path, b"a long old content")
    write_bytes(path, b"new")
    assert files(tmp_path) == {"x": b"new"}


def in_another_process(function: Callable[[Path], None], path: Path) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=function, args=(path,))
    process.start()
    process.join()
    return process.exitcode


def write_on_a_full_disk(path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        write_bytes(path, b"new" * 1000)
    except OSError:
        os._exit(3)


def test_when_writing_fails_the_old_file_stays(tmp_path: Path) -> None:
    write_bytes(tmp_path / "x", b"old")
    assert in_another_process(write_on_a_full_disk, tmp_path / "x") == 3
    assert files(tmp_path) == {"x": b"old"}


def die_while_writing(path: Path) -> None:
    os.fsync = lambda fd: os._exit(3)  # all data are written but the file is not yet in its place
    write_bytes(path, b"new")


def test_a_kill_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    write_bytes(tmp_path / "x", b"old")
    assert in_another_process(die_while_writing, tmp_path / "x") == 3
    assert (tmp_path / "x").read_bytes() == b"old"


def test_every_resumption_is_written_down(settings: Settings, tmp_path: Path) -> None:
    chosen = settings.model_copy(update={"run_dir": str(tmp_path / "again")})
    for times in range(3):
        folder = RunFolder.open(chosen)
        folder.close()
        about = read_json(folder.path / "provenance.json")
        assert len(about.get("resumed", [])) == times
        assert all(set(again) == {"command", "git_commit", "started"} for again in about.get("resumed", []))
    folder.resume()
    assert folder.resumed_after == [0]
    write_json(folder.path / "summary.json", {})
    RunFolder.open(chosen).close()
    assert len(read_json(folder.path / "provenance.json")["resumed"]) == 2
