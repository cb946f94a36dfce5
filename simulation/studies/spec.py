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
    [frozen.cifar10]                     # in results: the preset's settings, as they were then
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import Field, model_validator

import strategies
from fedivon_flwr.errors import UserError
from fedivon_flwr.runs import STATE, checkpoint_file, read_json, runs_folder
from fedivon_flwr.settings import FlatModel, Settings, flatten, read_tables, validated
from simulation.presets import named_toml, own_file, preset_config, settings_of
from simulation.report import AT_MEAN

STUDIES = Path(__file__).parent
OWN = ("seed", "method", "run-dir")  # settings that a study sets itself


class Variant(FlatModel):
    """One value of what is varied."""

    label: str = Field(pattern=r"^[^|\n]*$", description="how the variant is called in tables, without '|'")
    settings: dict[str, Any] = Field(default_factory=dict, description="the settings it changes")


class Study(FlatModel):
    """A study's description."""

    name: str = Field(pattern=r"^\w[\w.-]*$", description="letters, digits, '-', '_', '.'; names the results' folder")
    title: str = Field(description="the heading of the results")
    reports: list[str] = Field(min_length=1, description="what is made of the runs")
    presets: list[str] = Field(min_length=1, description="presets, one for each dataset")
    methods: list[str] = Field(default_factory=list, description="the rows of the table: METHOD or METHOD@mean")
    seeds: list[int] | dict[str, list[int]] = Field([0], description="seeds, for all presets or by preset")
    settings: dict[str, Any] = Field(default_factory=dict, description="settings of all runs, on top of the presets")
    column: str = Field("", description="what the variants vary")
    variants: list[Variant] = Field(default_factory=list, description="tables with a label and settings")
    unseen: dict[str, str] = Field(default_factory=dict, description="datasets that are foreign to a preset's")
    frozen: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="the settings of presets, which otherwise are read from their files"
    )
    paper: dict[str, dict[str, dict[str, float | dict[str, float]]]] = Field(
        default_factory=dict, description="the paper's numbers, by preset, method, metric and maybe label of a variant"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.variants) != bool(self.column):
            raise ValueError("The key 'column' (the name of what is varied) and 'variants' need each other")
        if isinstance(self.seeds, dict) and set(self.seeds) != set(self.presets):
            raise ValueError(f"The key 'seeds' must have one list for each of the presets: {', '.join(self.presets)}")
        if not all(self.seeds_of(preset) for preset in self.presets):
            raise ValueError("The key 'seeds' must have at least one seed for every preset")
        for key, table in (("unseen", self.unseen), ("paper", self.paper), ("frozen", self.frozen)):
            if stray := sorted(set(table) - set(self.presets)):
                raise ValueError(f"The key '{key}.{stray[0]}' is none of the presets: {', '.join(self.presets)}")
        for settings in (self.settings, *(variant.settings for variant in self.variants)):
            if fixed := next((key for key in OWN if key in settings), None):
                raise ValueError(f"The setting '{fixed}' is given by the study itself; use the keys of the study")
        lists = {"presets": self.presets, "methods": self.methods, "labels": [v.label for v in self.variants]}
        for name, listed in (lists | {f"seeds of {p}": self.seeds_of(p) for p in self.presets}).items():
            if len(set(listed)) < len(listed):
                raise ValueError(f"The {name} of the study must differ from each other")
        return self

    def seeds_of(self, preset: str) -> list[int]:
        """The seeds with which a preset is run."""
        return self.seeds if isinstance(self.seeds, list) else self.seeds[preset]

    def settings_of(self, preset: str, **more: Any) -> Settings:
        """What a preset's runs have in common, and `more`."""
        return settings_of({**self.preset(preset), **self.settings, **more})

    def preset(self, name: str) -> dict[str, Any]:
        """The settings of a preset, as the description has them or else as its file has them now."""
        return self.frozen.get(name) or {key: own_file(value) for key, value in preset_config(name).items()}

    def whole(self) -> Self:
        """The description with all that it refers to."""
        return self.model_copy(update={"frozen": {name: self.preset(name) for name in self.presets}})

    def toml(self) -> bytes:
        """The description, from which the study can be run again, also when presets have changed since."""
        return tomli_w.dumps(self.whole().model_dump(by_alias=True, exclude_defaults=True)).encode()


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
    path = named_toml("study", name, STUDIES)
    data = {"name": path.stem, **read_tables(path)}
    settings, short = flat_table(data, "settings"), flat_table(data, "quick", flat=False)
    if quick:
        if not short:
            raise UserError(f"The study '{name}' has no quick form; run it without --quick.")
        settings |= flat_table(short, "settings")
        data |= {**short, "name": f"{data['name']}-quick"}
        paper = flat_table(data, "paper", flat=False)
        presets = data.get("presets")
        data["paper"] = {key: table for key, table in paper.items() if isinstance(presets, list) and key in presets}
    if changes:  # other settings, other results
        data["name"] = f"{data['name']}-{digest(changes)}"
    data["settings"] = settings | dict(changes or {})
    return validated(Study, with_absolute_paths(data))


def flat_table(data: dict[str, Any], key: str, flat: bool = True) -> dict[str, Any]:
    """Take a table out of a description, with dotted keys instead of tables in it."""
    table = data.pop(key, {})
    if not isinstance(table, Mapping):
        raise UserError(f"The study's key '{key}' is {table!r} but must be a table.")
    return dict(flatten(table)) if flat else dict(table)


def with_absolute_paths(data: dict[str, Any]) -> dict[str, Any]:
    """A description with flat variants, and with the user's own files named so that they are found from anywhere."""

    def keys(table: Any, values: bool = False) -> Any:
        if not isinstance(table, Mapping):
            return table
        return {own_file(key): own_file(value) if values else value for key, value in table.items()}

    data = {**data, "settings": keys(data["settings"], values=True)}
    for key in {"seeds", "paper", "unseen", "frozen"} & data.keys():
        data[key] = keys(data[key], values=key == "unseen")
    if isinstance(data.get("presets"), list):
        data["presets"] = [own_file(preset) for preset in data["presets"]]
    if isinstance(data.get("variants"), list):
        data["variants"] = [
            {**variant, "settings": keys(flat_table(dict(variant), "settings"), values=True)}
            if isinstance(variant, Mapping)
            else variant
            for variant in data["variants"]
        ]
    return data


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
    names = [each.name for each in found]
    if same := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"Two runs of the study would be called '{same}'; give presets and variants other names.")
    return found


def job(study: Study, preset: str, variant: Variant, method: str, seed: int) -> Job:
    """One run."""
    settings, stem = study.settings_of(preset, **variant.settings, method=method, seed=seed), Path(preset).stem
    folder = run_folder(settings, f"{stem}-{method}-seed{seed}")
    name = "-".join(part for part in (stem, method, file_name(variant.label), f"seed{seed}") if part)
    return Job(name, preset, variant.label, settings.model_copy(update={"run_dir": str(folder)}))


def file_name(label: str) -> str:
    """A label as part of the name of a file.

    >>> file_name("0.999, lr/10")
    '0.999--lr-10'
    """
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in label)


def run_folder(settings: Settings, name: str) -> Path:
    """A run's folder, which all studies share: the one with these settings, or a new one named after them."""
    runs = (runs_folder() / "studies").resolve()
    new = runs / f"{name}-{digest(settings.identity())}"
    return next((path for path in siblings(new) if same_run(read_json(path / "settings.json"), settings)), new)


def trained_folder(settings: Settings) -> Path | None:
    """A run that was trained to its end with these settings, whatever it was used for then; None if there is none."""
    needed = [checkpoint_file(settings.rounds)]
    if settings.personal and strategies.build(settings).remembers:
        needed.append(STATE)
    for path in siblings(Path(settings.run_dir)):
        trained = all((path / name).exists() for name in needed)
        if trained and same_run(read_json(path / "settings.json"), settings, strategies.training):
            return path
    return None


def siblings(folder: Path) -> list[Path]:
    """The runs' folders that have the same name but for the settings."""
    return sorted(folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*"))


def same_run(
    saved: Mapping[str, Any] | None,
    settings: Settings,
    part: Callable[[Settings], Mapping[str, Any]] = Settings.identity,
) -> bool:
    """Whether settings that were written down are these, in a part of them: all that decides the outcome."""
    try:  # a setting that is new since then has its default
        return saved is not None and part(settings_of(saved)) == part(settings)
    except UserError:  # of a version with other keys
        return False


def digest(settings: Mapping[str, Any]) -> str:
    """A short name for settings."""
    return blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=4).hexdigest()
