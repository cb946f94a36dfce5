"""What a study is: methods × presets × variants × seeds, and what is made of the runs.

A study is a TOML file in this folder, or anywhere:

    title = "…"
    reports = ["scores"]                 # what is made of the runs: names of `reports.REPORTS`
    presets = ["cifar10", "svhn"]        # in this order
    methods = ["fedavg", "fedivon@mean", "fedivon"]   # the rows: at the mean, or by Monte Carlo where there is one
    seeds = [0, 1, 2]                    # or, by preset: { cifar10 = [0, 1, 2], svhn = [0] }
    column = "local-epochs"              # of the variants, if there are any
    [settings]                           # for all runs, on top of the preset
    [[variants]]                         # one setting (or several) is varied
    label = "1"
    settings.local-epochs = 1
    [unseen]                             # for "ood": the dataset that is foreign to a preset's
    cifar10 = "svhn"
    [paper.cifar10.fedavg]               # the paper's numbers, to stand beside ours
    accuracy = 62.25
    [quick]                              # what `--quick` changes
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field, field_validator

from fedivon_flwr.errors import UserError
from fedivon_flwr.registry import unknown
from fedivon_flwr.runs import runs_folder
from fedivon_flwr.settings import FlatModel, Settings, flatten, read_tables, validated
from simulation.presets import preset_config, settings_of

STUDIES = Path(__file__).parent
AT_MEAN = "@mean"

Scores = dict[str, float]


class Variant(FlatModel):
    """One value of what is varied."""

    label: str = Field(description="how the variant is called in tables")
    settings: dict[str, Any] = Field(default_factory=dict, description="the settings it changes")

    @field_validator("settings")
    @classmethod
    def _flat(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return dict(flatten(settings))


class Study(FlatModel):
    """A study's description."""

    name: str = Field(pattern=r"^[\w.-]+$", description="letters, digits, '-', '_' and '.'; names the results' folder")
    title: str = Field(description="the heading of the results")
    reports: list[str] = Field(min_length=1, description="what is made of the runs")
    presets: list[str] = Field(min_length=1, description="presets, one for each dataset")
    methods: list[str] = Field(default_factory=list, description="the rows of the table: METHOD or METHOD@mean")
    seeds: list[int] | dict[str, list[int]] = Field([0], description="seeds, for all presets or by preset")
    settings: dict[str, Any] = Field(default_factory=dict, description="settings of all runs, on top of the presets")
    column: str = Field("", description="what the variants vary")
    variants: list[Variant] = Field(default_factory=list, description="tables with a label and settings")
    unseen: dict[str, str] = Field(default_factory=dict, description="datasets that are foreign to a preset's")
    paper: dict[str, dict[str, Scores]] = Field(
        default_factory=dict, description="the paper's numbers, by preset, method and metric"
    )

    @field_validator("settings")
    @classmethod
    def _flat(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return dict(flatten(settings))

    def seeds_of(self, preset: str) -> list[int]:
        """The seeds with which a preset is run."""
        return self.seeds if isinstance(self.seeds, list) else self.seeds.get(preset, [])

    def toml(self) -> bytes:
        """The description, from which the study can be run again."""
        return tomli_w.dumps(self.model_dump(by_alias=True, exclude_defaults=True)).encode()


@dataclass(frozen=True, eq=False)
class Job:
    """One run of a study."""

    name: str
    preset: str
    variant: str
    settings: Settings


def known_studies() -> list[str]:
    """The studies that come with the project."""
    return sorted(path.stem for path in STUDIES.glob("*.toml"))


def load_study(name: str, quick: bool = False, changes: Mapping[str, Any] | None = None) -> Study:
    """A study by name, or a description by path; `changes` are settings of the command line."""
    if name.endswith(".toml"):
        data = {"name": Path(name).stem, **read_tables(Path(name))}
    elif name in known_studies():
        data = {"name": name, **read_tables(STUDIES / f"{name}.toml")}
    else:
        raise UserError(
            unknown("study", name, known_studies()).removesuffix(".") + ", or give the path of a .toml file."
        )
    short = data.pop("quick", None)
    if quick:
        if short is None:
            raise UserError(f"The study '{name}' has no quick form; run it without --quick.")
        settings = {**data.get("settings", {}), **short.pop("settings", {})}
        data |= {**short, "settings": settings, "name": f"{data['name']}-quick"}
    data["settings"] = {**data.get("settings", {}), **(changes or {})}
    study = validated(Study, data)
    if study.variants and not study.column:
        raise UserError("A study with variants needs the key 'column': the name of what they vary.")
    return study


def jobs(study: Study) -> list[Job]:
    """The runs of a study: the first seed of every preset comes before the second of any."""
    methods = dict.fromkeys(method.removesuffix(AT_MEAN) for method in study.methods)
    most = max(len(study.seeds_of(preset)) for preset in study.presets) if methods else 0
    found = []
    for index in range(most):
        for preset in study.presets:
            for seed in study.seeds_of(preset)[index : index + 1]:
                for variant in study.variants or [Variant(label="")]:
                    found += [job(study, preset, variant, method, seed) for method in methods]
    return found


def job(study: Study, preset: str, variant: Variant, method: str, seed: int) -> Job:
    """One run. Its folder is named after all that decides the outcome, so that studies share their runs."""
    config = {**preset_config(preset), **study.settings, **variant.settings, "method": method, "seed": seed}
    settings = settings_of(config)
    stem = Path(preset).stem
    folder = runs_folder() / "studies" / f"{stem}-{method}-seed{seed}-{digest(settings)}"
    label = "".join(c if c.isalnum() or c in ".-" else "-" for c in variant.label)
    name = "-".join(part for part in (stem, method, label, f"seed{seed}") if part)
    return Job(name, preset, variant.label, settings.model_copy(update={"run_dir": str(folder.resolve())}))


def digest(settings: Settings) -> str:
    """A short name for all that decides a run's outcome."""
    return blake2b(json.dumps(settings.identity(), sort_keys=True).encode(), digest_size=4).hexdigest()
