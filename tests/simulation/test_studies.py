"""Studies: which runs they need, what is made of them, and that nothing is repeated or lost."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tomli_w
import torch
from command import Command, assert_refused
from flwr.app import ConfigRecord
from grid import SMALL, LocalGrid

import clients
import strategies
from clients.base import Work
from fedivon_flwr.data import VALIDATION
from fedivon_flwr.errors import UserError
from fedivon_flwr.models import build
from fedivon_flwr.records import to_record
from fedivon_flwr.runs import STATE, fork, read_json, read_lines, read_metrics, write_bytes, write_json
from fedivon_flwr.settings import Settings
from simulation.federation import run
from simulation.launch import client_config
from simulation.presets import settings_of
from simulation.progress import RunState
from simulation.studies.reports import REPORTS, command, curve_of, write_reports
from simulation.studies.runner import Results, next_job, time_left
from simulation.studies.spec import Job, Study, jobs, known_studies, load_study, run_folder, trained_folder
from simulation.studies.tables import Cell, cells, scores_at, table_csv, table_markdown

DESCRIBED: dict[str, Any] = {
    "title": "A small study",
    "reports": ["scores", "curves", "reliability"],
    "presets": ["digits"],
    "methods": ["fedavg", "fedivon@mean", "fedivon"],
    "settings": SMALL,
    "paper": {"digits": {"fedivon": {"accuracy": 62.5, "ece": 0.03}}},
}


def described(path: Path, **changes: Any) -> Path:
    path.write_text(tomli_w.dumps({k: v for k, v in (DESCRIBED | changes).items() if v is not None}))
    return path


def study_of(tmp_path: Path, **changes: Any) -> Study:
    return load_study(str(described(tmp_path / "small.toml", **changes)))


def scores(accuracy: float, mc: bool = True) -> dict[str, Any]:
    found = {"mean": {"accuracy": accuracy, "ece": 0.2, "nll": 1.0, "brier": 0.5}}
    return found | ({"mc": {"accuracy": accuracy + 0.1, "ece": 0.1, "nll": 0.9, "brier": 0.4}} if mc else {})


def run_of(method: str, seed: int, accuracy: float, **more: Any) -> dict[str, Any]:
    metrics = scores(accuracy, mc=method != "fedavg")
    about = {"method": method, "seed": seed, "preset": "digits", "variant": "", "dataset": "digits"}
    return {**about, "metrics": metrics, "curve": [{"round": 2, **metrics}, {"round": 4, **metrics}], **more}


# Descriptions


@pytest.mark.parametrize("name", known_studies())
@pytest.mark.parametrize("quick", [False, True])
def test_the_studies_of_the_project_are_sound(name: str, quick: bool) -> None:
    study = load_study(name, quick)
    assert all(REPORTS[report] for report in study.reports)
    names = [job.name for job in jobs(study)]
    assert len(set(names)) == len(names)
    assert study.name == (f"{name}-quick" if quick else name)
    for preset, methods in study.paper.items():
        assert set(methods) <= set(study.methods)
        assert preset in study.presets
    if quick:
        datasets = {study.settings_of(preset).dataset.removesuffix(VALIDATION) for preset in study.presets}
        assert datasets == {"digits"}  # comes with a package
        assert all(job.settings.rounds <= 60 for job in jobs(study))


def test_the_methods_of_a_table_share_split_start_and_schedule() -> None:
    """What decides the split, the first weights and who is asked when is the same for all methods of a seed."""
    for preset in ("cifar10", "emnist", "svhn"):
        mine = [job.settings for job in jobs(load_study("table-standard")) if job.preset == preset]
        assert [settings.method for settings in mine] == ["fedavg", "fedlaplace", "fedivon"]
        for settings in mine:
            plain = settings.model_copy(update={"method": "", "options": {}, "run_dir": ""})
            assert plain == mine[0].model_copy(update={"method": "", "options": {}, "run_dir": ""})
            assert (settings.rounds, settings.clients, settings.clients_per_round) == (2000, 200, 10)
        model = build("cnn", (3, 32, 32), 10, mine[0].seed)
        first = [strategies.build(settings).model_arrays(model) for settings in mine]
        for arrays in first:
            assert all(np.array_equal(arrays[key], array) for key, array in first[0].items())


def test_the_paper_may_have_a_number_for_each_variant() -> None:
    table = cells(load_study("table-personalised"), [], ["pm_accuracy", "gm_accuracy"])
    given = {(cell.preset, cell.variant, cell.method, cell.metric): cell.paper for cell in table}
    assert given["pfl-cifar10", "100", "fedivon", "pm_accuracy"] == 72.6
    assert given["pfl-cifar100", "200", "pfedvem", "gm_accuracy"] == 49.2
    assert given["pfl-cifar10", "50", "local", "pm_accuracy"] == 56.9
    assert given["pfl-cifar10", "50", "local", "gm_accuracy"] is None


def test_the_numbers_of_the_paper_are_those_of_the_paper() -> None:
    paper = Path(__file__).parents[3] / "shared" / "spec" / "paper-fedivon.tex"
    if not paper.exists():
        pytest.skip("the paper is not here")
    text = re.sub(r"\\textbf\{([^}]*)\}", r"\1", paper.read_text())
    for name, metrics in (("table-standard", ("accuracy", "ece", "nll", "brier")), ("table-ood", ("auroc",))):
        study = load_study(name)
        for method in study.methods:
            label = {"fedavg": "FedAvg", "fedlaplace": "FedLaplace", "fedivon": "FedIvon"}.get(method, "FedIvon@mean")
            ours = [study.paper[preset][method][m] for preset in ("emnist", "cifar10", "svhn") for m in metrics]
            lines = [
                line
                for line in text.splitlines()
                if re.match(rf"\s*{label}\b(?!@)" if "@" not in label else rf"\s*{label}", line)
            ]
            found = [[float(x) for x in re.findall(r"\d+\.\d+", line)] for line in lines]
            assert ours in found, (method, ours, found)


def test_the_personalised_numbers_of_the_paper_are_those_of_the_paper() -> None:
    paper = Path(__file__).parents[3] / "shared" / "spec" / "paper-fedivon.tex"
    if not paper.exists():
        pytest.skip("the paper is not here")
    tables = [part.partition(r"\end{tabular}")[0] for part in paper.read_text().split(r"\begin{tabular}")]
    (table,) = [table for table in tables if "50 Clients" in table]
    study = load_study("table-personalised")
    labels = {"local": "Local", "pfedme": "pFedME", "pfedbayes": "pFedBayes", "pfedvem": "pFedVEM"}
    labels |= {"fedivon@mean": "FedIvon@mean}", "fedivon": "FedIvon}"}
    for method, label in labels.items():
        lines = [re.sub(r"(?<=[\d.]) (?=[\d.])", "", line) for line in table.splitlines() if label in line]
        for preset, line in zip(study.presets, lines, strict=True):
            ours: dict[str, Any] = study.paper[preset][method]
            metrics = ("pm_accuracy", "gm_accuracy")
            pairs = [ours[metric][clients] for clients in ("50", "100", "200") for metric in metrics if metric in ours]
            assert pairs == [float(number) for number in re.findall(r"(\d+\.\d+)\s*\\pm", line)], (method, line)


def test_the_first_seed_of_every_preset_comes_first(tmp_path: Path) -> None:
    study = study_of(
        tmp_path, presets=["digits", "emnist"], seeds={"digits": [0, 1], "emnist": [7]}, methods=["fedavg"]
    )
    assert [job.name for job in jobs(study)] == ["digits-fedavg-seed0", "emnist-fedavg-seed7", "digits-fedavg-seed1"]


def test_studies_share_their_runs() -> None:
    runs = {name: {job.settings.run_dir for job in jobs(load_study(name))} for name in known_studies()}
    for name in ("table-ood", "convergence", "reliability"):
        assert runs[name] == runs["table-standard"]
    assert runs["table-standard"] < runs["ablation-epochs"]
    rule, table = (jobs(load_study(name)) for name in ("ablation-aggregation", "table-standard"))
    trained = [strategies.training(job.settings) for job in table]  # it predicts with another width
    assert [strategies.training(job.settings) in trained for job in rule].count(True) == 1


def test_whatever_decides_the_outcome_names_the_folder(tmp_path: Path) -> None:
    (job, *_) = jobs(study_of(tmp_path))
    other = job.settings.model_copy(update={"rounds": 5})
    elsewhere = job.settings.model_copy(update={"run_dir": "elsewhere", "tensorboard": True})
    folders = [run_folder(settings, "run") for settings in (job.settings, other, elsewhere)]
    assert folders[0] != folders[1]
    assert folders[0] == folders[2]


def test_a_run_of_an_earlier_version_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that did not exist then has its default; one that no longer exists makes it another run."""
    monkeypatch.setenv("FEDIVON_RUNS", str(tmp_path / "runs"))
    (job, *_) = jobs(study_of(tmp_path))
    old = tmp_path / "runs" / "studies" / "digits-fedavg-seed0-earlier"
    old.mkdir(parents=True)
    record = job.settings.record()
    del record["alpha"], record["fedavg.fused"]
    write_json(old / "settings.json", record)
    assert jobs(study_of(tmp_path))[0].settings.run_dir == str(old)
    write_json(old / "settings.json", record | {"gone": 1})
    assert jobs(study_of(tmp_path))[0].settings.run_dir == job.settings.run_dir


def test_what_only_predicts_needs_no_second_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another width of the posterior, chosen after training: a folder of its own that goes on with the prediction."""
    monkeypatch.setenv("FEDIVON_RUNS", str(tmp_path / "runs"))

    def job_with(**changes: Any) -> Job:
        return jobs(study_of(tmp_path, methods=["fedivon"], settings=SMALL | changes))[0]

    def fedivon_with(**changes: Any) -> Path:
        settings = job_with(**changes).settings
        if (trained := trained_folder(settings)) and not Path(settings.run_dir).exists():
            fork(trained, Path(settings.run_dir), settings)
        grid = LocalGrid(settings.to_config(), settings.clients)
        folder = run(grid, settings).path
        assert bool(trained) == (grid.clients() == [])
        return folder

    first = fedivon_with()
    wide = fedivon_with(**{"fedivon.test-ess": 5.0})
    assert wide != first
    assert read_json(wide / "settings.json")["fedivon.test-ess"] == 5.0
    assert (wide / "metrics.jsonl").read_bytes() == (first / "metrics.jsonl").read_bytes()
    narrow, other = (read_json(folder / "summary.json")["metrics"] for folder in (first, wide))
    assert narrow["mean"] == other["mean"]
    assert narrow["mc"] != other["mc"]
    assert trained_folder(job_with(**{"fedivon.lr": 0.05}).settings) is None
    assert trained_folder(job_with(rounds=5).settings) is None
    (first / "checkpoints" / "round-000004.safetensors").unlink()
    (wide / "checkpoints" / "round-000004.safetensors").unlink()
    assert trained_folder(job_with(**{"fedivon.test-ess": 6.0}).settings) is None  # not trained to its end


@pytest.mark.parametrize(("method", "key"), [("fedivon", "temperature"), ("fedper", "personal-lr")])
def test_other_personal_models_need_no_second_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, key: str
) -> None:
    monkeypatch.setenv("FEDIVON_RUNS", str(tmp_path / "runs"))
    variants = [{"label": str(value), "settings": {f"{method}.{key}": value}} for value in (1.0, 10.0)]
    changes = {"personal": True, "clients": 4, "clients-per-round": 2, "rounds": 2, "keep-memory": True}
    study = study_of(
        tmp_path, reports=["personal"], methods=[method], variants=variants, column=key, settings=SMALL | changes
    )
    (first, second), scored = jobs(study), []
    assert next_job([second], [first]) is None
    for job in (first, second):
        settings, folder = job.settings, Path(job.settings.run_dir)
        if trained := trained_folder(settings):
            fork(trained, folder, settings)
        grid = LocalGrid(client_config(settings), settings.clients)
        run(grid, settings)
        assert bool(trained) == (grid.clients() == []) == (job is second)
        scored.append(list(read_lines(folder / "clients.jsonl")))
    whole = job.settings.model_copy(update={"run_dir": str(tmp_path / "whole")})
    run(LocalGrid(client_config(whole), whole.clients), whole)  # the second, trained anew
    alone = list(read_lines(tmp_path / "whole" / "clients.jsonl"))
    assert [row["mean"] for row in scored[0]] != [row["mean"] for row in alone]
    assert [row["mean"] for row in scored[1]] == [row["mean"] for row in alone]
    if method == "fedper":  # without the heads there is nothing to go on from
        for kept in (first, second):
            shutil.rmtree(Path(kept.settings.run_dir) / STATE)
        other = {**settings.record(), "run-dir": f"{settings.run_dir}x", "fedper.personal-lr": 3.0}
        assert trained_folder(settings_of(other)) is None


def test_only_some_of_the_runs(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=[0, 1])
    every = Results(study, tmp_path / "results")
    assert every.wanted == every.jobs
    some = Results(study, tmp_path / "results", ["*-fedavg-*", "digits-fedivon-seed1"])
    names = ["digits-fedavg-seed0", "digits-fedavg-seed1", "digits-fedivon-seed1"]
    assert [job.name for job in some.open_jobs()] == names
    assert len(some.jobs) == 4
    with pytest.raises(UserError, match=r"'nope'; the runs are: digits-fedavg-seed0, "):
        Results(study, tmp_path / "results", ["nope"])


def test_a_curve_is_of_one_kind() -> None:
    """An earlier version drew weights for some methods on the way."""
    rows = [{"round": 1, **scores(0.1)}, {"round": 2, **scores(0.2, mc=False)}]
    assert [(r, found["accuracy"]) for r, found in curve_of({"curve": rows}, "fedlaplace")] == [(1, 0.1), (2, 0.2)]
    drawn = [{"round": 1, **scores(0.1)}, {"round": 2, **scores(0.2)}]
    assert [r for r, _ in curve_of({"curve": drawn}, "fedivon")] == [1, 2]
    assert next(curve_of({"curve": drawn}, "fedivon@mean"))[1] == rows[0]["mean"]
    assert next(curve_of({"curve": drawn}, "fedivon"))[1] == rows[0]["mc"]
    assert list(curve_of({"curve": []}, "fedivon")) == []


def test_a_table_of_unseen_clients(tmp_path: Path) -> None:
    study = study_of(
        tmp_path, reports=["personal"], methods=["fedavg"], settings={"personal": True, "unseen-clients": 2}, paper={}
    )
    people = [{"client": 0, "seen": True, "examples": 5, "mean": scores(0.4)["mean"]}]
    metrics = {**scores(0.5, mc=False), "personal": scores(0.6, mc=False), "unseen": scores(0.7, mc=False)}
    write_reports(study, [run_of("fedavg", 0, 0.5, people=people, metrics=metrics)], tmp_path / "results")
    lines = (tmp_path / "results" / "table.csv").read_text().splitlines()
    assert lines[1:4] == [
        f"digits,fedavg,{at}_accuracy,{value},,1," for at, value in {"pm": 60, "gm": 50, "um": 70}.items()
    ]
    assert "UM: like PM" in (tmp_path / "results" / "README.md").read_text()


def test_other_settings_do_not_touch_the_results() -> None:
    changes: list[dict[str, Any]] = [{}, {"rounds": 3}]
    names = {load_study("table-standard", quick, change).name for quick in (False, True) for change in changes}
    assert len(names) == 4
    assert {"table-standard", "table-standard-quick"} < names


def test_variants_that_do_not_concern_a_method_share_its_run_one_after_the_other(tmp_path: Path) -> None:
    variants = [{"label": str(lr), "settings": {"fedivon": {"lr": lr}}} for lr in (0.1, 0.2)]
    first, ivon, second, other = jobs(study_of(tmp_path, column="lr", variants=variants))
    assert first.settings.run_dir == second.settings.run_dir
    assert ivon.settings.run_dir != other.settings.run_dir
    assert next_job([second, other], [first]) is other
    assert next_job([second], [first]) is None
    assert next_job([second, other], []) is second


def test_own_files_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('dataset = "mine.npz"\n')
    own = {"presets": ["mine.toml"], "unseen": {"mine.toml": "other.npz"}, "paper": {}, "seeds": {"mine.toml": [1]}}
    study = study_of(tmp_path, **own).whole()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("kept.toml").write_bytes(study.toml())
    again = load_study("kept.toml")
    assert again == study
    assert again.preset(str(tmp_path / "mine.toml")) == {"dataset": str(tmp_path / "mine.npz")}
    assert again.presets == [str(tmp_path / "mine.toml")]
    assert again.unseen == {str(tmp_path / "mine.toml"): str(tmp_path / "other.npz")}
    assert [job.settings.seed for job in jobs(again)] == [1, 1]


def test_presets_of_one_dataset_go_by_their_own_names(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("rounds = 3\n")
    study = study_of(tmp_path, presets=["digits", str(tmp_path / "mine.toml")])
    assert {cell.dataset for cell in cells(study, [], ["ece"])} == {"digits", "mine"}


def test_a_variant_changes_settings_and_has_a_column(tmp_path: Path) -> None:
    variants = [{"label": "a b", "settings": {"fedivon": {"lr": 0.3}}}, {"label": "c", "settings": {"batch-size": 4}}]
    study = study_of(tmp_path, methods=["fedivon"], column="what", variants=variants)
    first, second = jobs(study)
    assert (first.name, first.variant) == ("digits-fedivon-a-b-seed0", "a b")
    assert first.settings.options["fedivon"]["lr"] == 0.3
    assert second.settings.batch_size == 4
    header = table_csv(study, cells(study, [], ["ece"])).decode().splitlines()[0]
    assert header == "dataset,method,what,metric,mean,std,seeds,paper"


def test_the_description_in_the_results_gives_the_same_study(tmp_path: Path) -> None:
    for name in known_studies():
        study = load_study(name, quick=True, changes={"rounds": 3})
        path = tmp_path / f"{name}.toml"
        path.write_bytes(study.toml())
        assert load_study(str(path)) == study.whole()


def test_results_name_the_plain_command_while_it_gives_the_same_runs() -> None:
    study = load_study("tuning-pfedvem").whole()
    frozen = study.frozen["pfl-cifar10"]

    def told(**changes: Any) -> str:
        return command(study.model_copy(update={"frozen": {"pfl-cifar10": frozen | changes}}))

    assert told(**{"fedper.personal-lr": 0.5}) == "fedivon study tuning-pfedvem"  # of another method
    assert told(**{"pfedvem.momentum": 0.5}) == "fedivon study results/tuning-pfedvem/study.toml"
    assert command(study.model_copy(update={"title": "Mine"})) == "fedivon study results/tuning-pfedvem/study.toml"
    split = load_study("partitions").whole()  # which has no runs
    other = {name: keys | {"partition-seed": 7} for name, keys in split.frozen.items()}
    assert command(split) == "fedivon study partitions"
    assert command(split.model_copy(update={"frozen": other})) == "fedivon study results/partitions/study.toml"


# Tables


def test_the_description_in_the_results_outlasts_a_change_of_the_preset(tmp_path: Path) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text("rounds = 3\n[fedavg]\nlr = 0.5\n")
    study = study_of(tmp_path, presets=[str(preset)], paper={}, settings={"clients": 6, "clients-per-round": 2})
    write_reports(study, [], tmp_path / "results")
    preset.write_text("rounds = 4\n")
    again = load_study(str(tmp_path / "results" / "study.toml"))
    assert [job.settings.rounds for job in jobs(study)] == [4, 4]
    assert [job.settings.rounds for job in jobs(again)] == [3, 3]
    assert jobs(again)[0].settings.options["fedavg"]["lr"] == 0.5
    assert again.toml() == (tmp_path / "results" / "study.toml").read_bytes()


def test_the_table_in_long_form(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    runs = [run_of("fedavg", 0, 0.5), run_of("fedivon", 0, 0.5), run_of("fedivon", 1, 0.6)]
    text = table_csv(study, cells(study, runs, ["accuracy", "ece"])).decode()
    assert text.splitlines() == [
        "dataset,method,metric,mean,std,seeds,paper",
        "digits,fedavg,accuracy,50,,1,",
        "digits,fedavg,ece,0.2,,1,",
        "digits,fedivon@mean,accuracy,55,7.07107,2,",
        "digits,fedivon@mean,ece,0.2,0,2,",
        "digits,fedivon,accuracy,65,7.07107,2,62.5",
        "digits,fedivon,ece,0.1,0,2,0.03",
    ]


def test_a_cell_without_a_run_stays_empty(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    table = cells(study, [run_of("fedavg", 0, 0.5)], ["accuracy", "ece"])
    assert table_csv(study, table).decode().splitlines()[-1] == "digits,fedivon,ece,,,0,0.03"
    assert table_markdown(study, table) == [
        "| data |  | accuracy (%) ↑ | ECE ↓ |",
        "|---|---|--:|--:|",
        "| digits | FedAvg | 50.00 | 0.2000 |",
        "| digits | FedIvon@mean | - | - |",
        "| digits | FedIvon | - (62.50) | - (0.0300) |",
    ]


def test_a_cell_for_people() -> None:
    where = ("digits", "digits", "", "fedivon", "accuracy")
    assert Cell(*where, (62.0, 63.0), 62.54).text() == "62.50 ± 0.71 (62.54)"
    assert Cell(*where, (62.0,), None).text() == "62.00"


def test_a_score_that_is_not_a_number_is_no_score(tmp_path: Path) -> None:
    diverged = run_of("fedavg", 0, 0.5)
    diverged["metrics"]["mean"]["nll"] = None
    (cell,) = [c for c in cells(study_of(tmp_path), [diverged], ["nll"]) if c.method == "fedavg"]
    assert cell.values == ()


def test_a_row_is_at_the_mean_or_by_monte_carlo() -> None:
    run = run_of("fedivon", 0, 0.5)
    assert scores_at(run, "fedivon@mean")["accuracy"] == 0.5
    assert scores_at(run, "fedivon")["accuracy"] == 0.6
    assert scores_at(run_of("fedavg", 0, 0.4), "fedavg")["accuracy"] == 0.4


def test_reports_without_any_run(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    write_reports(study, [], tmp_path)
    assert "- (62.50)" in (tmp_path / "README.md").read_text()
    assert list((tmp_path / "figures").iterdir()) == []


# Progress


class Fake(RunState):
    """A run that takes a second a round and has done some."""

    @classmethod
    def after(cls, settings: Settings, done: int) -> "Fake":
        rows = [{"round": r, "seconds": 1.0, "train_loss": 1.0} for r in range(1, done + 1)]
        return cls(settings, rows, 0, finished=done == settings.rounds)


def test_the_time_left(tmp_path: Path) -> None:
    listed = jobs(study_of(tmp_path, settings=SMALL | {"rounds": 100}))

    def left(*done: int, slots: int = 1) -> float | None:
        states: dict[Job, RunState] = {job: Fake.after(job.settings, d) for job, d in zip(listed, done, strict=True)}
        return time_left(states, [job for job, state in states.items() if not state.finished], slots)

    assert left(0, 0) is None
    assert left(100, 25) == pytest.approx(75)
    assert left(50, 0) == pytest.approx(150)  # the second is taken to be as fast as the first
    assert left(50, 0, slots=2) == pytest.approx(100)  # no sooner than the longest
    assert left(100, 100) == 0


def test_the_final_evaluation_counts_as_time() -> None:
    settings = Settings.from_config({"rounds": 100, "evaluate-every": 10, "eval-samples": 4, "test-samples": 100})
    rows: list[dict[str, Any]] = [{"round": r, "seconds": 1.0, "train_loss": 1.0} for r in range(1, 101)]
    for row in rows[9::10]:
        row.update(seconds=11.0, **scores(0.5))
    # 10 s for 5 passes over the test data: 2 s each, so 100 passes are left
    state = RunState(settings, rows, 0, finished=False)
    assert state.pace() == (1.0, 2.0)
    assert state.seconds_left() == pytest.approx(200)
    half = RunState(settings, rows, 50, finished=False)
    assert half.seconds_left() == pytest.approx(100)
    assert "final evaluation (50 of 100)  100 s left" in half.words()
    early = RunState(settings, rows[:20], 0, finished=False)
    assert early.seconds_left() == pytest.approx(80 + 8 * 10 + 200)
    nodes = settings.model_copy(update={"evaluation": "clients"})  # whose last evaluation is in the last round
    assert RunState(nodes, rows, 0, finished=False).seconds_left() == 0


def test_scores_of_the_nodes_are_shown_too(tmp_path: Path) -> None:
    settings = Settings.from_config({"evaluation": "clients", "run-dir": str(tmp_path)})
    row = {"round": 1, "seconds": 1.0, "train_loss": 1.0, "clients": {"loss": 0.3, **scores(0.5)}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert "accuracy 0.600" in RunState.of(settings).words()


@pytest.mark.parametrize("every", [1, 10, 100])
def test_a_method_without_a_posterior_draws_nothing_in_the_end(every: int) -> None:
    settings = Settings.from_config({"method": "fedavg", "rounds": 400, "evaluate-every": every, "test-samples": 100})
    rows: list[dict[str, Any]] = [{"round": r, "seconds": 1.0, "train_loss": 1.0} for r in range(1, 251)]
    for row in rows[every - 1 :: every]:
        row.update(seconds=4.0, **scores(0.5, mc=False))
    state = RunState(settings, rows, 0, finished=False)
    assert state.seconds_left() == pytest.approx(150 * 4 if every == 1 else 150 + 150 / every * 3)
    whole = RunState(settings, [{**row, "round": row["round"] + 150} for row in rows], 0, finished=False)
    assert whole.seconds_left() == 0


# Bad input


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nope"], ("Unknown study 'nope'", "table-standard", ".toml file")),
        (["nope.toml"], ("There is no settings file 'nope.toml'",)),
        (["table-standard", "--quick", "-s", "roundz=3"], ("Unknown key 'roundz'",)),
        (["table-standard", "--quick", "-s", "rounds=0"], ("'rounds'", "greater than or equal to 1")),
        (["table-standard", "--quick", "-s", "rounds=2024-01-01"], ("'rounds'", "'2024-01-01'")),
    ],
)
def test_bad_input_is_one_sentence(fedivon: Command, tmp_path: Path, words: list[str], named: tuple[str, ...]) -> None:
    assert_refused(fedivon("study", *words, "--results", tmp_path / "results"), *named)
    assert not (tmp_path / "results").exists()
    assert not (tmp_path / "runs").exists()


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no methods": ({"methods": []}, ("'scores'", "'methods'")),
    "settings that are none": ({"settings": 3}, ("'settings'", "must be a table")),
    "quick that is none": ({"quick": 3}, ("'quick'", "must be a table")),
    "a variant that is none": ({"column": "x", "variants": [3]}, ("'variants'",)),
    "a variant's key": ({"column": "x", "variants": [{"label": "a", "nope": 1}]}, ("'variants.0.nope'",)),
    "no label": ({"column": "x", "variants": [{"settings": {}}]}, ("'variants.0.label' is missing",)),
    "a label that breaks the table": ({"column": "x", "variants": [{"label": "a|b"}]}, ("'variants'",)),
    "a name that leads elsewhere": ({"name": ".."}, ("'name'", "letters")),
    "no seed": ({"seeds": []}, ("'seeds'", "at least one")),
    "no title": ({"title": None}, ("'title' is missing",)),
    "no scores": ({"settings": SMALL | {"evaluation": "none"}}, ("'evaluation'", "'server'")),
    "a seed among the settings": ({"settings": SMALL | {"seed": 3}}, ("'seed'", "keys of the study")),
    "a seed twice": ({"seeds": [0, 0]}, ("seeds of digits", "differ")),
    "a label twice": ({"column": "x", "variants": [{"label": "a"}, {"label": "a"}]}, ("labels", "differ")),
    "labels alike": ({"column": "x", "variants": [{"label": "a b"}, {"label": "a-b"}]}, ("digits-fedavg-a-b-seed0",)),
    "seeds of another preset": ({"seeds": {"digit": [0]}}, ("'seeds'", "digits")),
    "the paper on another preset": ({"paper": {"digit": {}}}, ("'paper.digit'", "digits")),
    "reliability of variants": ({"column": "x", "variants": [{"label": "a"}]}, ("'reliability'", "variants")),
    "a report": ({"reports": ["nope"]}, ("Unknown report 'nope'", "scores")),
    "a preset": ({"presets": ["nope"], "paper": {}}, ("Unknown preset 'nope'", "digits")),
    "a method": ({"methods": ["nope"]}, ("Unknown method 'nope'", "fedavg")),
    "a key": ({"nope": 1}, ("Unknown key 'nope'", "reports")),
    "no presets": ({"presets": []}, ("'presets'",)),
    "no column": ({"variants": [{"label": "a"}]}, ("'column'",)),
    "a column of nothing": ({"column": "x"}, ("'variants'",)),
    "no model for all": ({"methods": ["local"]}, ("'local'", "'scores'", "'personal'")),
    "nothing unseen": ({"reports": ["ood"]}, ("'unseen'", "'digits'")),
    "unseen of another shape": (
        {"reports": ["ood"], "unseen": {"digits": "own.npz"}},
        ("'unseen.digits'", "(1, 8, 8)"),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_description_is_one_sentence(fedivon: Command, tmp_path: Path, case: str, wide_data: Path) -> None:
    changes, named = BAD[case]
    text = json.loads(json.dumps(changes).replace('"own.npz"', json.dumps(str(wide_data))))
    path = described(tmp_path / "bad.toml", **text)
    assert_refused(fedivon("study", path, "--results", tmp_path / "results"), *named)
    assert not (tmp_path / "results").exists()
    assert not (tmp_path / "runs").exists()


def test_foreign_files_are_not_overwritten(fedivon: Command, tmp_path: Path) -> None:
    study = described(tmp_path / "small.toml")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "README.md").write_text("my own")
    assert_refused(fedivon("study", study, "--results", mine), "something else", "--results")
    write_bytes(mine / "study.toml", load_study("partitions").toml())
    assert_refused(fedivon("study", study, "--results", mine), "results of the study 'partitions'", "--results")
    assert_refused(fedivon("study", study, "--results", mine / "README.md"), "is a file", "--results")
    assert (mine / "README.md").read_text() == "my own"
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def wide_data(tmp_path: Path) -> Path:
    """Data of another shape."""
    x, y = np.zeros((4, 9, 9), np.uint8), np.arange(4) % 2
    np.savez(tmp_path / "wide.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    return tmp_path / "wide.npz"


def test_no_quick_form(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no quick form"):
        load_study(str(described(tmp_path / "small.toml")), quick=True)


def test_the_studies_are_listed(fedivon: Command) -> None:
    ended = fedivon("study")
    assert all(name in ended.out for name in known_studies())


# The real thing


def program(study: object, folder: Path, *more: object, runs: Path | None = None) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "fedivon_flwr", "study", str(study), "--results", str(folder / "results")]
    env = {**os.environ, "FEDIVON_RUNS": str(runs or folder / "runs"), "COLUMNS": "200"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([*command, *map(str, more)], env=env, cwd=folder, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def finished(process: "subprocess.Popen[str]") -> str:
    out, _ = process.communicate(timeout=500)
    assert process.returncode == 0, out
    return out


def until(condition: Callable[[], object], seconds: float = 300) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def outcome(folder: Path) -> Mapping[str, Any]:
    runs = {path.name: read_json(path) for path in sorted((folder / "results" / "runs").glob("*.json"))}
    return {name: {key: run[key] for key in ("metrics", "curve", "settings")} for name, run in runs.items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_study_repeats_nothing_and_loses_nothing(tmp_path: Path) -> None:
    study = described(tmp_path / "small.toml", settings=SMALL | {"rounds": 30, "checkpoint-every": 4})
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    finished(program(study, whole))

    process = program(study, broken, "--jobs", 1)
    results = Results(load_study(str(study)), broken / "results")
    first, second = (broken / "runs" / "studies" / Path(job.settings.run_dir).name for job in results.jobs)
    until(lambda: len(list(read_metrics(second))) >= 10)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []  # the run, and Ray with it, ends with its study
    assert (first / "summary.json").exists()
    assert not (second / "summary.json").exists()
    kept = (broken / "results" / "runs" / "digits-fedavg-seed0.json").stat().st_mtime_ns
    rows = list(read_metrics(second))[:8]

    out = finished(program(study, broken, "--jobs", 1))
    assert "1 of 2 runs ended" in out
    assert (broken / "results" / "runs" / "digits-fedavg-seed0.json").stat().st_mtime_ns == kept
    assert list(read_metrics(second))[:8] == rows  # with their times: these rounds were not run again
    assert outcome(broken) == outcome(whole)
    for name in ("README.md", "table.csv", "curves.csv"):
        assert (broken / "results" / name).read_bytes() == (whole / "results" / name).read_bytes()

    before = {path: path.stat().st_mtime_ns for path in (broken / "runs").rglob("*") if path.name != ".lock"}
    finished(program(broken / "results" / "study.toml", broken))  # from its own folder; all is done
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", known_studies())
def test_every_study_runs_in_its_quick_form(name: str, tmp_path: Path, shared_runs: Path) -> None:
    changes = {"rounds": 3, "test-samples": 3, "evaluate-every": 1}
    words = [word for key, value in changes.items() for word in ("-s", f"{key}={value}")]
    out = finished(program(name, tmp_path, "--quick", *words, runs=shared_runs))
    study = load_study(name, quick=True, changes=changes)
    results = tmp_path / "results"
    assert f"# {study.title}" in out
    assert len(list((results / "runs").glob("*.json"))) == len(jobs(study))
    shown = re.findall(r"\]\((figures/[^)]*\.png)\)", (results / "README.md").read_text())
    assert shown
    for figure in shown:
        assert (results / figure).stat().st_size > 5000
        assert (results / figure).with_suffix(".svg").exists()
    if {"scores", "ood"} & set(study.reports):
        with (results / "table.csv").open() as file:
            rows = list(csv.DictReader(file))
        metrics = 4 if "scores" in study.reports else 1
        assert len(rows) == len(study.methods) * max(1, len(study.variants)) * metrics
        assert all(row["mean"] and row["seeds"] == "1" for row in rows)
    if "personal" in study.reports:
        with (results / "table.csv").open() as file:
            rows = list(csv.DictReader(file))
        column = {study.column} if study.column else set()
        assert set(rows[0]) == {"dataset", "method", "metric", "mean", "std", "seeds", "paper"} | column
        models = 3 if study.settings.get("unseen-clients") else 2
        assert len(rows) == len(study.methods) * max(1, len(study.variants)) * models * 4
        no_global = {"local", "fedper", "fedrep"}
        for row in rows:
            assert bool(row["mean"]) == (row["metric"].startswith("pm_") or row["method"] not in no_global)


@pytest.fixture(scope="module")
def shared_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Studies share runs: what one has done the next need not."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.slow
def test_a_study_in_the_background(tmp_path: Path) -> None:
    study = described(tmp_path / "small.toml")
    out = finished(program(study, tmp_path, "--background"))
    pid = int(re.findall(r"process (\d+)", out)[0])
    background = psutil.Process(pid)
    again = program(study, tmp_path)
    said, _ = again.communicate(timeout=60)
    assert again.returncode == 2
    assert "is running already" in said
    until(lambda: not background.is_running() or background.status() == psutil.STATUS_ZOMBIE, 300)
    assert (tmp_path / "results" / "table.csv").exists()
    assert "# A small study" in (tmp_path / "results" / "study.log").read_text()


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    settings = SMALL | {"fedivon.lr": 1e30, "fedivon.lr-final": 1e30}
    process = program(described(tmp_path / "small.toml", settings=settings), tmp_path)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "1 of 2 runs failed" in out
    assert "No reply could be used" in (tmp_path / "results" / "logs" / "digits-fedivon-seed0.log").read_text()
    assert "| digits | FedIvon | - (62.50)" in (tmp_path / "results" / "README.md").read_text()
    assert "| digits | FedAvg | " in (tmp_path / "results" / "README.md").read_text()


def test_results_of_other_settings_do_not_count(tmp_path: Path) -> None:
    results = Results(study_of(tmp_path), tmp_path / "results")
    job = results.jobs[0]
    (tmp_path / "results" / "runs").mkdir(parents=True)
    run = run_of("fedavg", 0, 0.5, reliability={}, settings=job.settings.record())
    write_json(results.path(job), run)
    assert results.saved(job) is not None
    others: list[Any] = [run | {"settings": {**job.settings.record(), "rounds": 5}}, {}, []]
    for other in others:
        write_json(results.path(job), other)
        assert results.saved(job) is None
    del run["reliability"]
    write_json(results.path(job), run)
    assert results.saved(job) is None


def test_a_run_counts_for_the_variant_that_the_study_has_now(tmp_path: Path) -> None:
    """Also when the file was written for a label that has been changed since."""
    variant = {"label": "a/b", "settings": {"fedavg": {"lr": 0.01}}}
    study = study_of(tmp_path, column="lr", methods=["fedavg"], variants=[variant], reports=["scores"])
    results = Results(study, tmp_path / "results")
    (job,) = results.jobs
    (tmp_path / "results" / "runs").mkdir(parents=True)
    write_json(results.path(job), run_of("fedavg", 0, 0.5, variant="a b", settings=job.settings.record()))
    saved = results.saved(job)
    assert saved is not None
    assert cells(study, [saved], ["accuracy"])[0].values == (50.0,)


def test_results_for_other_foreign_data_do_not_count(tmp_path: Path) -> None:
    study = study_of(tmp_path, reports=["ood"], unseen={"digits": "photos"})
    results = Results(study, tmp_path / "results")
    job = results.jobs[0]
    (tmp_path / "results" / "runs").mkdir(parents=True)
    for dataset, counts in (("photos", True), ("digits", False)):
        run = run_of("fedavg", 0, 0.5, ood={"dataset": dataset}, settings=job.settings.record())
        write_json(results.path(job), run)
        assert (results.saved(job) is not None) == counts


def test_two_tables_of_one_study_are_two_files(tmp_path: Path) -> None:
    study = study_of(tmp_path, reports=["scores", "ood"], unseen={"digits": "photos"})
    runs = [run_of("fedavg", 0, 0.5, ood={"dataset": "photos", "mean": {"auroc": 0.9}})]
    write_reports(study, runs, tmp_path)
    assert "fedavg,accuracy,50," in (tmp_path / "table.csv").read_text()
    assert "fedavg,auroc,0.9," in (tmp_path / "table-ood.csv").read_text()
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        f"{name}.{suffix}" for name in ("scores", "ood") for suffix in ("png", "svg")
    }


@pytest.mark.parametrize("method", ["fedlaplace", "fedivon"])
def test_all_methods_ask_the_same_clients_for_the_same_batches(method: str) -> None:
    def asked(name: str) -> list[tuple[int, int]]:
        chosen = settings_of({**SMALL, "method": name, "seed": 5})
        grid, strategy = LocalGrid(chosen.to_config(), chosen.clients), strategies.build(chosen)
        arrays = strategy.model_arrays(build("mlp", (1, 8, 8), 10, 0))
        strategy.start(grid, to_record(arrays), num_rounds=3, train_config=ConfigRecord({"batch-size": 32}))
        return grid.clients()

    assert asked(method) == asked("fedavg")
    work = Work(server_round=2, seed=5, local_epochs=2)
    ours, theirs = (
        clients.build(settings_of({**SMALL, "method": name}), {"partition-id": 3, "num-partitions": 6}).epochs(work)
        for name in (method, "fedavg")
    )
    for (x, y), (other_x, other_y) in zip(ours, theirs, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)
