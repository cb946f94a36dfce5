"""The `fedivon` command: what it shows, and that bad input is one sentence, exit code 2 and nothing written."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

import numpy as np
import pytest
import ray
import torch
from command import Command, Ended, assert_refused

from fedivon_flwr import cli
from fedivon_flwr.data import DATASETS, load
from fedivon_flwr.runs import Checkpoint, RunFolder, load_arrays, read_json
from fedivon_flwr.settings import Settings
from strategies.fedivon import Options


def program(*words: object, cache: Path) -> Ended:
    """The `fedivon` program as users start it."""
    command = [str(Path(sys.executable).with_name("fedivon")), *map(str, words)]
    env = {**os.environ, "FEDIVON_CACHE": str(cache), "COLUMNS": "200"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


# ---------------------------------------------------------------- simulate: bad input

BAD: list[tuple[list[str], tuple[str, ...]]] = [
    (["nope"], ("Unknown preset 'nope'", "digits", "cifar10", ".toml file")),
    (["nope.toml"], ("There is no settings file 'nope.toml'",)),
    (["-s", "dataset=nope"], ("Unknown dataset 'nope'", "digits", "svhn")),
    (["-s", "dataset=nope.npz"], ("There is no data file", "nope.npz", "x_train")),
    (["-s", "roundz=3"], ("Unknown key 'roundz'", "rounds")),
    (["-s", "fedivon.nope=3"], ("Unknown key 'fedivon.nope'", "fedivon.lr")),
    (["-s", "nope.lr=3"], ("'nope'", "fedivon", "fedavg")),
    (["-s", "rounds"], ("'rounds' is not a setting", "key=value")),
    (["-s", "=3"], ("'=3' is not a setting", "key=value")),
    (["-s", "rounds=many"], ("'rounds'", "'many'", "integer")),
    (["-s", "rounds=[3]"], ("'rounds'", "[3]", "integer")),
    (["-s", "fedivon.rule=[bold]"], ("'fedivon.rule'", "'[bold]'", "'rkl'")),
    (["-s", "fedivon.lr=[1]"], ("'fedivon.lr'", "[1]", "number")),
    (["--rounds", "0"], ("'rounds'", " 0 ", "greater than or equal to 1")),
    (["--seed", "99999999999999999999"], ("'seed'", "99999999999999999999", "less than")),
    (["-s", "clients=5000"], ("5000 clients", "1437", "lower `clients`")),
    (["-s", "clients=5"], ("clients-per-round (10)", "clients (5)")),
    (["-s", "min-replies=11"], ("min-replies (11)", "clients-per-round (10)")),
    (["-s", "partitioner=nope"], ("Unknown partitioner 'nope'", "shards", "dirichlet")),
    (["-s", "model=cnn"], ("'cnn'", "16 by 16", "(1, 8, 8)", "mlp")),
    (["-s", "model=nope"], ("Unknown model 'nope'", "mlp")),
    (["-s", "model=no.such.module:net"], ("'no.such.module:net'", "cannot be imported")),
    (["-m", "nope"], ("Unknown method 'nope'", "fedavg", "fedivon")),
    (["-m", "fedivon", "-m", "nope"], ("Unknown method 'nope'", "fedavg", "fedivon")),
    (["-m", "fedivon", "-m", "fedavg", "-s", "run-dir=here"], ("one run's folder", "one --method")),
    (["-m", "fedivon", "-m", "fedivon"], ("no method twice",)),
]


@pytest.mark.parametrize(("words", "named"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_sentence(fedivon: Command, tmp_path: Path, words: list[str], named: tuple[str, ...]) -> None:
    before = files(Path.cwd() / "runs") if Path("runs").exists() else {}
    assert_refused(fedivon("simulate", *words), *named)
    assert list(tmp_path.iterdir()) == []
    assert (files(Path.cwd() / "runs") if Path("runs").exists() else {}) == before
    assert not ray.is_initialized()


def test_two_methods_do_not_share_a_run_dir(fedivon: Command, tmp_path: Path) -> None:
    ended = fedivon("simulate", "-m", "fedivon", "-m", "fedavg", "--run-dir", tmp_path / "run")
    assert_refused(ended, "one run's folder", "one --method")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(fedivon: Command, tmp_path: Path) -> None:
    assert_refused(fedivon("simulate", "-s", "device=cuda"), "'device'", "'cuda'", "'auto' or 'cpu'")
    assert list(tmp_path.iterdir()) == []


def test_missing_data_without_network(fedivon: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("FEDIVON_DATA", str(tmp_path / "data"))
    ended = fedivon("simulate", "cifar10", "--run-dir", tmp_path / "run")
    assert_refused(ended, "'cifar10'", "could not be downloaded", "no network", "cifar10.npz", "FEDIVON_DATA")
    assert not (tmp_path / "run").exists()
    assert files(tmp_path) == {}


def test_a_run_folder_of_other_settings(fedivon: Command, tmp_path: Path) -> None:
    folder = RunFolder.open(Settings(run_dir=str(tmp_path / "run"), rounds=7))
    folder.close()
    before = files(tmp_path)
    ended = fedivon("simulate", "-s", "rounds=7", "-s", "local-epochs=3", "--run-dir", tmp_path / "run")
    assert_refused(ended, str(tmp_path / "run"), "other settings", "now")
    assert files(tmp_path) == before
    assert not ray.is_initialized()


def test_a_folder_that_holds_something_else(fedivon: Command, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    assert_refused(fedivon("simulate", "--run-dir", tmp_path), "not empty and holds no run")
    assert_refused(fedivon("simulate", "--run-dir", tmp_path / "thesis.tex"), "is a file")
    assert files(tmp_path) == {"thesis.tex": b"precious"}


def test_a_run_folder_in_use(fedivon: Command, tmp_path: Path) -> None:
    words = ("simulate", "--run-dir", tmp_path / "run")
    settings = cli.make_settings("digits", [], run_dir=str(tmp_path / "run"))
    folder = RunFolder.open(settings)
    before = files(tmp_path)
    try:
        assert_refused(fedivon(*words), str(tmp_path / "run"), "in use by another run")
    finally:
        folder.close()
    assert files(tmp_path) == before


def test_settings_from_a_file_and_from_words(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('rounds = 5\nmodel = "mlp"\n[fedivon]\nlr = 0.5\n')
    pairs = ["rounds=6", "fedivon.rule=lp", "alpha = 1e-1", "tensorboard=true"]
    settings = cli.make_settings(str(tmp_path / "own.toml"), pairs, rounds=7, method=None, run_dir=str(tmp_path / "x"))
    assert (settings.rounds, settings.alpha, settings.tensorboard, settings.method) == (7, 0.1, True, "fedivon")
    assert settings.options.keys() == {"fedivon"}
    assert settings.options["fedivon"] == Options(lr=0.5, rule="lp").model_dump(by_alias=True)
    assert settings.run_dir == str(tmp_path / "x")


# ---------------------------------------------------------------- data


def test_data_list_names_them_all(fedivon: Command) -> None:
    ended = fedivon("data", "list")
    assert (ended.code, ended.err) == (0, "")
    assert all(name in ended.out for name in DATASETS)
    assert "no download" in next(line for line in ended.out.splitlines() if "digits" in line)


def test_data_prepare(fedivon: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDIVON_CACHE", str(tmp_path / "cache"))
    load.cache_clear()
    ended = fedivon("data", "prepare", "digits")
    load.cache_clear()
    assert ended == (0, "digits: 1437 training and 360 test examples of shape (1, 8, 8)\n", "")
    (x,) = (tmp_path / "cache").rglob("x_train.npy")
    assert np.load(x).shape == (1437, 8, 8, 1)
    assert_refused(fedivon("data", "prepare", "nope"), "Unknown dataset 'nope'")


@pytest.mark.parametrize(("name", "magic"), [("x.png", b"\x89PNG\r\n\x1a\n"), ("x.svg", b"<?xml")])
def test_data_show(fedivon: Command, tmp_path: Path, name: str, magic: bytes) -> None:
    ended = fedivon("data", "show", "digits", "-s", "clients=20", "-s", "shards-per-client=2", "-o", tmp_path / name)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("20 clients with ")
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert list(files(tmp_path)) == [name]


def test_data_show_refuses(fedivon: Command, tmp_path: Path) -> None:
    assert_refused(fedivon("data", "show", "digits", "-o", tmp_path / "x.jpg"), "x.jpg", ".png or .svg")
    ended = fedivon("data", "show", "digits", "-o", tmp_path / "no folder" / "x.png")
    assert_refused(ended, "x.png", "cannot be written")
    assert_refused(fedivon("data", "show", "nope", "-o", tmp_path / "x.png"), "Unknown preset 'nope'")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- runs


def unfinished(path: Path) -> Path:
    folder = RunFolder.open(Settings(run_dir=str(path), rounds=20, seed=5))
    for number in (1, 2, 3):
        folder.append_metrics({"round": number, "train_loss": 1.0, "seconds": 0.1})
    folder.save_checkpoint(Checkpoint(3, {"mean/x": np.zeros(3)}, {}))
    folder.close()
    return path


def test_runs_list_shows_how_far_a_run_is(fedivon: Command, tmp_path: Path) -> None:
    unfinished(tmp_path / "some [run]")
    ended = fedivon("runs", "list", tmp_path)
    assert (ended.code, ended.err) == (0, "")
    row = next(line for line in ended.out.splitlines() if "some [run]" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")][1:] == ["fedivon", "digits", "5", "3 of 20", "-", "-"]


def test_runs_refuse(fedivon: Command, tmp_path: Path) -> None:
    unfinished(tmp_path / "run")
    assert_refused(fedivon("runs", "compare", tmp_path / "run"), "run'", "no finished run")
    assert_refused(fedivon("runs", "compare", tmp_path / "none"), "none'", "no finished run")
    assert_refused(fedivon("runs", "compare", tmp_path / "run" / "settings.json"), "no finished run")
    assert_refused(fedivon("runs", "list", tmp_path / "none"), "There is no folder", "none")


# ---------------------------------------------------------------- a real run, once

WORDS = ("simulate", "digits", "--rounds", "2", "-s", "test-samples=4", "-s", "clients=20", "-s", "clients-per-round=4")


class Run(NamedTuple):
    path: Path
    ended: Ended


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Run:
    path = tmp_path_factory.mktemp("cli") / "[run]"
    return Run(path, program(*WORDS, "--run-dir", path, cache=shared_cache))


@pytest.mark.slow
def test_simulate_says_what_it_did_and_nothing_else(real_run: Run) -> None:
    path, ended = real_run
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[-1] == f"fedivon: {path}"
    assert "digits: 2 rounds, 20 clients" in ended.out
    scores = read_json(path / "summary.json")["metrics"]
    for at, name in (("mean", "FedIvon@mean"), ("mc", "FedIvon (4 samples)")):
        row = next(line for line in lines if name in line)
        assert all(f"{scores[at][key]:.4f}" in row for key in ("accuracy", "ece", "nll", "brier"))
    for word in ("Traceback", "Warning", "INFO"):
        assert word not in ended.out


@pytest.mark.slow
def test_simulate_leaves_a_whole_folder(real_run: Run) -> None:
    path = real_run.path
    names = {"settings.json", "provenance.json", "metrics.jsonl", "posterior.safetensors", "summary.json", "report.md"}
    assert {p.name for p in path.iterdir()} >= names
    assert not list(path.rglob("*.part"))
    assert [row["round"] for row in map(json.loads, (path / "metrics.jsonl").read_text().splitlines())] == [1, 2]
    arrays, about = load_arrays(path / "posterior.safetensors")
    assert {key.partition("/")[0] for key in arrays} == {"mean", "hess"}
    assert (about["model"], about["shape"], about["classes"]) == ("mlp", [1, 8, 8], 10)


@pytest.mark.slow
def test_a_finished_run_is_shown_again_and_not_changed(real_run: Run, shared_cache: Path) -> None:
    before = files(real_run.path)
    again = program(*WORDS, "--run-dir", real_run.path, cache=shared_cache)
    assert (again.code, again.err) == (0, "")
    assert "finished already" in again.out
    assert again.out.splitlines()[-4:] == real_run.ended.out.splitlines()[-4:]
    assert files(real_run.path) == before


@pytest.mark.slow
def test_a_real_run_predicts(real_run: Run, fedivon: Command, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=load("digits").test.x)
    rows = json.loads(fedivon("predict", real_run.path, tmp_path / "in.npz", "--json", "--samples", 0).out)
    right = np.mean([row["class"] for row in rows] == load("digits").test.y)
    assert right == pytest.approx(read_json(real_run.path / "summary.json")["metrics"]["mean"]["accuracy"], abs=1e-6)


@pytest.mark.slow
def test_runs_list_and_compare(real_run: Run, fedivon: Command, tmp_path: Path) -> None:
    path = real_run.path
    ended = fedivon("runs", "list", path.parent)
    assert (ended.code, ended.err) == (0, "")
    scores = read_json(path / "summary.json")["metrics"]
    assert all(part in ended.out for part in ("[run]", "fedivon", "digits", f"{scores['mc']['accuracy']:.4f}"))
    other = tmp_path / path.name  # the same name elsewhere, another seed
    other.mkdir()
    summary = read_json(path / "summary.json")
    summary["settings"]["seed"] = 1234
    (other / "summary.json").write_text(json.dumps(summary))
    ended = fedivon("runs", "compare", path, other)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.count("FedIvon@mean") == 2
    row = next(line for line in ended.out.splitlines() if "1234" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["seed", "0", "1234"]
    assert "run-dir" not in ended.out


@pytest.mark.slow
def test_the_program_refuses_as_the_function_does(shared_cache: Path, tmp_path: Path) -> None:
    ended = program("simulate", "-s", "rounds=many", "--run-dir", tmp_path / "run", cache=shared_cache)
    assert_refused(ended, "'rounds'", "'many'", "integer")
    assert list(tmp_path.iterdir()) == []
