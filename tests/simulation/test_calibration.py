"""Posteriors of other widths, scored on training images that no client holds."""

from pathlib import Path

import numpy as np
import pytest
from command import Command, assert_refused
from grid import LocalGrid

import clients
from fedivon_flwr.data import load
from fedivon_flwr.runs import read_json, write_json
from fedivon_flwr.settings import Settings
from simulation.calibration import calibrate, held_out
from simulation.federation import run


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    config = {"clients": 5, "clients-per-round": 3, "rounds": 3, "max-examples": 99, "test-samples": 3}
    return Settings.from_config({**config, "method": "fedlaplace", "run-dir": str(tmp_path / "run")})


@pytest.fixture
def folder(settings: Settings) -> Path:
    return run(LocalGrid(settings.to_config(), settings.clients), settings).path


def test_nobody_holds_what_is_held_out(settings: Settings) -> None:
    rows = held_out(settings, 300)
    held = np.concatenate(clients.split(settings.dataset, clients.partition_spec(settings)))
    assert len(set(rows)) == 300
    assert not set(rows) & set(held)
    assert rows.max() < len(load("digits").train)


def test_a_narrow_posterior_scores_like_its_mean_and_a_wide_one_worse(folder: Path) -> None:
    found = calibrate(folder, [1.0], [1e12, 0.1], examples=300, samples=8)
    narrow, wide = found["grid"]
    assert found["round"] == 3
    for key, value in found["mean"].items():
        assert narrow[key] == pytest.approx(value, abs=1e-4)
    assert wide["nll"] > found["mean"]["nll"] + 0.1


def test_without_a_prior_it_is_the_runs(folder: Path) -> None:
    found = calibrate(folder, [100.0, 50.0], [], examples=20, samples=1)
    assert [(row["ess"], row["prior_precision"]) for row in found["grid"]] == [(100, 1000), (50, 500)]  # λ δ


def test_the_command_writes_what_it_shows(fedivon: Command, folder: Path, tmp_path: Path) -> None:
    words = ("--ess", 1, "--prior-precision", 100, "--prior-precision", 1000, "--examples", 200)
    ended = fedivon("calibrate", folder, *words, "-o", tmp_path / "found.json")
    found = read_json(tmp_path / "found.json")
    assert [(row["ess"], row["prior_precision"]) for row in found["grid"]] == [(1, 100), (1, 1000)]
    assert f"{found['grid'][1]['nll']:.4f}" in ended.out


def test_bad_input_is_one_sentence(fedivon: Command, folder: Path, tmp_path: Path) -> None:
    grid = ("--ess", 1, "--prior-precision", 100)
    assert_refused(fedivon("calibrate", tmp_path / "nope", *grid), "holds no run")
    assert_refused(fedivon("calibrate", folder, "--ess", 0, "--prior-precision", 1), "0", "must be positive")
    assert_refused(fedivon("calibrate", folder, *grid, "--examples", 1400), "1400", "--examples")


def test_code_of_a_foreign_run_is_not_run(fedivon: Command, folder: Path) -> None:
    saved = read_json(folder / "settings.json")
    write_json(folder / "settings.json", saved | {"model": "evil:make"})
    words = ("--ess", 1, "--prior-precision", 100, "--examples", 20, "--samples", 1)
    assert_refused(fedivon("calibrate", folder, *words), "evil:make", "--model")


def test_a_file_that_cannot_be_written_is_said(fedivon: Command, folder: Path, tmp_path: Path) -> None:
    words = ("--ess", 1, "--prior-precision", 100, "--examples", 20, "--samples", 1)
    ended = fedivon("calibrate", folder, *words, "-o", tmp_path / "nope" / "found.json")
    assert ended.code == 2
    assert "cannot be written" in ended.err
