"""What is made of a study's runs: tables and figures, each from the runs' JSON files (partitions: from the data).

A report has two halves. `collect` reads what it needs from a finished run's folder (it runs beside the training, and
may take long); `write` makes files and Markdown of what was collected for all runs. A new one is a subclass added to
`REPORTS`.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

import strategies
from fedivon_flwr.data import load
from fedivon_flwr.errors import UserError
from fedivon_flwr.evaluation import draw_seed
from fedivon_flwr.metrics import Reliability, ood_auroc, reliability
from fedivon_flwr.registry import Registry
from fedivon_flwr.runs import load_arrays, read_json, read_lines, read_metrics, write_bytes
from fedivon_flwr.trained import Trained
from simulation.plots import (
    Curve,
    Point,
    colour,
    convergence_figure,
    personal_figure,
    reliability_figure,
    save_figure,
    scores_figure,
    shades,
)
from simulation.report import AT_MEAN, SCORES, label, who_has_what
from simulation.studies.spec import Job, Study, file_name, jobs, known_studies, load_study, same_run
from simulation.studies.tables import (
    METRICS,
    Cell,
    Run,
    cells,
    csv_bytes,
    explanation,
    names_of,
    scores_at,
    table_csv,
    table_markdown,
)

CALIBRATION = ("ece", "nll", "brier")
OOD_EXAMPLES = 5000  # of each of the two datasets
MOST_PANELS = 4  # side by side
ON_THE_WAY = (
    "On the way methods predict with the posterior as it trains (`ess`) and a few weight samples (`eval-samples`), or, "
    "like FedLaplace, whose training needs no width, at the mean. Tables are of the final evaluation, with the width "
    "for prediction (`test-ess`, `test-prior`) and many samples (`test-samples`), so a curve does not end at its "
    "number in the table.",
    "",
)


class Report(ABC):
    """One kind of table or figure."""

    key: ClassVar[str] = ""  # of what `collect` adds to a run's JSON
    of_runs: ClassVar[bool] = True
    of_global: ClassVar[bool] = True  # whether it needs scores of the server's model

    def check(self, study: Study) -> None:  # noqa: B027
        """Refuse a study that lacks what the report needs."""

    def collect(self, job: Job, study: Study) -> Any:  # noqa: ARG002
        """What the report needs of a run beyond its summary."""
        return None

    def is_current(self, saved: Run, job: Job, study: Study) -> bool:  # noqa: ARG002
        """Whether a run's JSON has what `collect` would give."""
        return not self.key or self.key in saved

    @abstractmethod
    def write(self, study: Study, runs: Sequence[Run], folder: Path) -> list[str]:
        """Write files into a folder; the lines of Markdown that show them."""


REPORTS: Registry[Report] = Registry("report")


def both(figure: Any, folder: Path, name: str, alt: str) -> str:
    """Save a figure as PNG and SVG; the Markdown that shows it."""
    for suffix in ("png", "svg"):
        save_figure(figure, folder / "figures" / f"{name}.{suffix}")
    return f"![{alt}](figures/{name}.png)"


def write_table(
    study: Study, table: Sequence[Cell], folder: Path, name: str = "scores", drawn: Sequence[str] = ()
) -> list[str]:
    """table.csv, one figure or one for each dataset (of all metrics, or those `drawn`), and the Markdown of both."""
    second = name != "scores" and "scores" in study.reports
    write_bytes(folder / (f"table-{name}.csv" if second else "table.csv"), table_csv(study, table))
    lines = [*table_markdown(study, table), "", explanation(table), ""]
    table = [cell for cell in table if not drawn or cell.metric in drawn]
    if not any(cell.values for cell in table):
        return lines
    if not study.column:
        figure = scores_figure(points(table), apart=True)
        return [*lines, both(figure, folder, name, f"{name} by dataset and method"), ""]
    for preset in study.presets:
        mine = [cell for cell in table if cell.preset == preset]
        if any(cell.values for cell in mine):
            figure = scores_figure(points(mine, varied=True), f"{mine[0].dataset}, by {study.column}")
            lines += [both(figure, folder, f"{name}-{Path(preset).stem}", f"{name} by {study.column}"), ""]
    return lines


def points(table: Sequence[Cell], varied: bool = False) -> dict[str, list[Point]]:
    """The cells of a table as points of a figure, by metric."""
    found: dict[str, list[Point]] = {}
    for cell in table:
        group = cell.variant if varied else cell.dataset
        point = Point(group, cell.method, label(cell.method), cell.mean, cell.std, cell.paper)
        found.setdefault(METRICS[cell.metric], []).append(point)
    return found


class ScoreTable(Report):
    """Accuracy, ECE, NLL and Brier score."""

    def write(self, study: Study, runs: Sequence[Run], folder: Path) -> list[str]:
        """The table of scores."""
        return write_table(study, cells(study, runs, list(SCORES)), folder)


class OodTable(Report):
    """Telling unknown data from known by the predictive entropy."""

    key = "ood"

    def check(self, study: Study) -> None:
        """Every preset needs foreign data of the same shape."""
        for preset in study.presets:
            dataset = load(study.settings_of(preset).dataset)
            if preset not in study.unseen:
                raise UserError(
                    f"The key 'unseen' of the study lacks '{preset}': name a dataset that is foreign to it."
                )
            if (foreign := load(study.unseen[preset])).shape != dataset.shape:
                raise UserError(
                    f"The key 'unseen.{preset}' is '{foreign.name}' with inputs of shape {foreign.shape} but those of "
                    f"'{dataset.name}' are {dataset.shape}; choose a dataset of the same shape."
                )

    def collect(self, job: Job, study: Study) -> dict[str, Any]:
        """AUROC at the mean and by Monte Carlo, on equally many examples of both, drawn with a fixed seed."""
        foreign, folder, settings = load(study.unseen[job.preset]), Path(job.settings.run_dir), job.settings
        inside = predictions(folder)
        count = min(OOD_EXAMPLES, len(foreign.test), len(inside["labels"]))
        known, unknown = (
            np.sort(np.random.default_rng(0).choice(total, count, replace=False))
            for total in (len(inside["labels"]), len(foreign.test))
        )
        trained = Trained.load(folder, settings.model if ":" in settings.model else None)
        found: dict[str, Any] = {"dataset": study.unseen[job.preset], "examples": count}
        for at in ("mean", "mc"):
            if at in inside:
                samples = settings.test_samples if at == "mc" else 0
                # the weights with which the known examples were predicted
                outside = trained.predict(foreign.test.x[unknown], samples, draw_seed(settings.seed))
                found[at] = {"auroc": ood_auroc(inside[at][known], outside)}
        return found

    def is_current(self, saved: Run, job: Job, study: Study) -> bool:
        """The foreign dataset must be the same."""
        return self.key in saved and saved[self.key]["dataset"] == study.unseen[job.preset]

    def write(self, study: Study, runs: Sequence[Run], folder: Path) -> list[str]:
        """The table of AUROCs."""

        def auroc(run: Run, method: str) -> Mapping[str, float | None]:
            return scores_at({"metrics": run["ood"]}, method)

        lines = write_table(study, cells(study, runs, ["auroc"], auroc), folder, "ood")
        pairs = [f"{Path(preset).stem} against {Path(study.unseen[preset]).stem}" for preset in study.presets]
        return [*lines, f"Known against unknown data: {', '.join(pairs)}.", ""]


class PersonalTable(Report):
    """Personal models on the clients' own test data, beside the global one on all of it."""

    key = "people"
    of_global = False

    def check(self, study: Study) -> None:
        """The runs must make personal models."""
        if lacking := next((p for p in study.presets if not study.settings_of(p).personal), None):
            raise UserError(f"The report 'personal' needs the setting 'personal = true', which '{lacking}' lacks.")

    def collect(self, job: Job, study: Study) -> list[dict[str, Any]]:  # noqa: ARG002
        """Every client's accuracy, with its personal and with the server's model."""
        return list(read_lines(Path(job.settings.run_dir) / "clients.jsonl"))

    def write(self, study: Study, runs: Sequence[Run], folder: Path) -> list[str]:
        """The table, and a figure of the clients of each dataset and variant."""

        def scores(run: Run, method: str) -> Mapping[str, float | None]:
            found = run["metrics"]
            parts = {"pm": found["personal"], "gm": found, "um": found.get("unseen", {})}
            scored = {at: scores_at({"metrics": part}, method) for at, part in parts.items() if "mean" in part}
            return {f"{at}_{key}": part[key] for at, part in scored.items() for key in SCORES}

        unseen = any(job.settings.unseen_clients for job in jobs(study))
        models = ["pm", "gm", *(["um"] if unseen else [])]
        metrics = [f"{at}_accuracy" for at in models] + [f"{at}_{key}" for at in models for key in CALIBRATION]
        drawn = [f"{at}_{key}" for key in ("accuracy", "ece") for at in models]
        lines = write_table(study, cells(study, runs, metrics, scores), folder, "personal", drawn)
        lines += [
            "PM: mean over clients, each on the test data of its classes. GM: the server's model, on all of it."
            + (" UM: like PM, of clients that took no part in the training." if unseen else "")
            + " Where a method has no Gaussian over a model (pFedVEM over the server's, FedIvon at β = 0), it is "
            "scored at its mean.",
            "",
        ]
        methods = {method.removesuffix(AT_MEAN) for method in study.methods}
        shown = "fedivon" if "fedivon" in methods else min(methods)
        for preset, variant in itertools.product(study.presets, [v.label for v in study.variants] or [""]):
            mine = select(runs, preset=preset, variant=variant, method=shown)
            if mine:
                name = "-".join(part for part in ("clients", Path(preset).stem, file_name(variant)) if part)
                title = f"{label(shown)}: {Path(preset).stem}" + (f", {study.column} = {variant}" if variant else "")
                figure = personal_figure(min(mine, key=lambda run: run["seed"])["people"], title)
                lines += [both(figure, folder, name, f"every client's models, {title}"), ""]
        return lines


class Curves(Report):
    """Loss and accuracy over the rounds."""

    key = "curve"

    def collect(self, job: Job, study: Study) -> list[dict[str, Any]]:  # noqa: ARG002
        """The rounds in which the server evaluated."""
        rows = read_metrics(Path(job.settings.run_dir))
        return [{k: row[k] for k in ("round", "train_loss", "mean", "mc") if k in row} for row in rows if "mean" in row]

    def write(self, study: Study, runs: Sequence[Run], folder: Path) -> list[str]:
        """curves.csv, and a figure with a panel for each dataset, or for each variant (method) of a dataset."""
        write_bytes(folder / "curves.csv", curves_csv(study, runs))
        if not study.column:
            panels = {name: by_method(study, select(runs, preset=p)) for p, name in names_of(study).items()}
            lines = curves_shown(panels, folder, "curves")
            return [*lines, *ON_THE_WAY] if lines else []
        lines = []
        for preset in study.presets:
            mine = select(runs, preset=preset)
            if len(study.variants) <= MOST_PANELS:
                names = {v.label: f"{study.column} = {v.label}" for v in study.variants}
                panels = {name: by_method(study, select(mine, variant=v)) for v, name in names.items()}
            else:
                panels = {label(method): by_variant(study, mine, method) for method in study.methods}
            lines += curves_shown(panels, folder, f"curves-{Path(preset).stem}")
        return [*lines, *ON_THE_WAY] if lines else []


def by_method(study: Study, runs: Sequence[Run]) -> list[Curve]:
    """A curve for every method, in the method's colour."""
    found = [(method, mean_curve(runs, method)) for method in study.methods]
    return [
        Curve(label(method), colour(method), "--" if method.endswith(AT_MEAN) else "-", *curve)
        for method, curve in found
        if curve
    ]


def by_variant(study: Study, runs: Sequence[Run], method: str) -> list[Curve]:
    """A curve for every variant, in colours and line styles that tell them apart."""
    found = [(v.label, mean_curve(select(runs, variant=v.label), method)) for v in study.variants]
    styles = zip(shades(len(found)), itertools.cycle(("-", "--", ":")), strict=False)
    drawn = zip(found, styles, strict=True)
    return [Curve(name, shade, line, *curve) for (name, curve), (shade, line) in drawn if curve]


def curves_shown(panels: Mapping[str, Sequence[Curve]], folder: Path, name: str) -> list[str]:
    """The figure of the panels that have curves."""
    drawn = {title: curves for title, curves in panels.items() if curves}
    return (
        [both(convergence_figure(drawn), folder, name, "test loss and accuracy over the rounds"), ""] if drawn else []
    )


def select(runs: Sequence[Run], **wanted: str) -> list[Run]:
    """The runs with these values."""
    return [run for run in runs if all(run[key] == value for key, value in wanted.items())]


def curve_of(run: Run, method: str) -> Iterator[tuple[int, Mapping[str, float | None]]]:
    """A method's scores in the rounds in which they were taken: at the mean if it draws nothing in the last."""
    drawn = "mc" in run["curve"][-1] and not method.endswith(AT_MEAN) if run["curve"] else False
    at = "mc" if drawn else "mean"
    for row in run["curve"]:
        if at in row:
            yield row["round"], row[at]


def mean_curve(runs: Sequence[Run], method: str) -> tuple[list[int], list[float], list[float]] | None:
    """A method's rounds, losses and accuracies (in per cent), averaged over the seeds; None where there are none."""
    mine = [dict(curve_of(run, method)) for run in runs if run["method"] == method.removesuffix(AT_MEAN)]
    rounds = sorted(set.intersection(*(set(curve) for curve in mine))) if mine else []
    if not rounds:
        return None
    loss, accuracy = (
        [mean(nan_if_none(curve[r][metric]) for curve in mine) for r in rounds] for metric in ("nll", "accuracy")
    )
    return rounds, loss, [100 * value for value in accuracy]


def nan_if_none(value: float | None) -> float:
    """JSON has no NaN."""
    return float("nan") if value is None else value


def curves_csv(study: Study, runs: Sequence[Run]) -> bytes:
    """All curves in long form."""
    varied, names = [study.column] if study.column else [], names_of(study)
    rows: list[list[object]] = [["dataset", "method", *varied, "seed", "round", "nll", "accuracy"]]
    for run in runs:
        for method in study.methods:
            if run["method"] == method.removesuffix(AT_MEAN):
                where = [names[run["preset"]], method, *([run["variant"]] if varied else []), run["seed"]]
                for server_round, scores in curve_of(run, method):
                    found = (scores["nll"], 1.0), (scores["accuracy"], 100.0)
                    numbers = ["" if value is None else f"{unit * value:.6g}" for value, unit in found]
                    rows.append([*where, server_round, *numbers])
    return csv_bytes(rows)


class ReliabilityDiagrams(Report):
    """Accuracy against confidence."""

    key = "reliability"

    def check(self, study: Study) -> None:
        """One diagram for each method."""
        if study.variants:
            raise UserError("The report 'reliability' cannot show variants; leave it out of 'reports'.")

    def collect(self, job: Job, study: Study) -> dict[str, Any]:  # noqa: ARG002
        """Accuracy, confidence and count of every bin."""
        kept = predictions(Path(job.settings.run_dir))
        found = {at: reliability(kept[at], kept["labels"]) for at in ("mean", "mc") if at in kept}
        return {at: {name: array.tolist() for name, array in vars(bins).items()} for at, bins in found.items()}

    def write(self, study: Study, runs: Sequence[Run], folder: Path) -> list[str]:
        """A figure for every dataset, from its first seed."""
        lines: list[str] = []
        for preset in study.presets:
            bins = {}
            for method in study.methods:
                mine = select(runs, preset=preset, method=method.removesuffix(AT_MEAN))
                if mine:
                    first = min(mine, key=lambda run: run["seed"])
                    bins[method] = (label(method), as_bins(scores_at({"metrics": first["reliability"]}, method)))
            if bins:
                stem, name = Path(preset).stem, names_of(study)[preset]
                figure = reliability_figure(bins, f"{name}: reliability")
                lines += [both(figure, folder, f"reliability-{stem}", f"reliability diagrams, {name}"), ""]
        return lines


def as_bins(saved: Mapping[str, Any]) -> Reliability:
    """Bins as they were before they went through JSON."""

    def array(name: str) -> NDArray[np.float64]:
        return np.array([nan_if_none(value) for value in saved[name]])

    return Reliability(array("edges"), array("confidence"), array("accuracy"), np.array(saved["count"], dtype=np.int64))


class Partitions(Report):
    """Who has which class: made of the data, without any run."""

    of_runs = of_global = False

    def write(self, study: Study, runs: Sequence[Run], folder: Path) -> list[str]:  # noqa: ARG002
        """partitions.csv, and a figure for every dataset."""
        rows: list[list[object]] = [["dataset", "client", "class", "examples"]]
        lines: list[str] = []
        for preset in study.presets:
            settings, stem = study.settings_of(preset), Path(preset).stem
            counts, figure = who_has_what(settings)
            for client, number in zip(*np.nonzero(counts), strict=True):
                rows.append([Path(settings.dataset).stem, client, number, counts[client, number]])
            lines += [both(figure, folder, f"partition-{stem}", f"who has which class, {stem}"), ""]
        write_bytes(folder / "partitions.csv", csv_bytes(rows))
        return lines


REPORTS.add("scores")(ScoreTable())
REPORTS.add("ood")(OodTable())
REPORTS.add("personal")(PersonalTable())
REPORTS.add("curves")(Curves())
REPORTS.add("reliability")(ReliabilityDiagrams())
REPORTS.add("partitions")(Partitions())


def predictions(folder: Path) -> dict[str, torch.Tensor]:
    """Labels and probabilities that a run has kept."""
    arrays, _ = load_arrays(folder / "predictions.safetensors")
    return {key: torch.from_numpy(array) for key, array in arrays.items()}


# A study's folder


def check_study(study: Study) -> None:
    """Refuse reports that are unknown, or that lack something."""
    of_runs = [name for name in study.reports if REPORTS[name].of_runs]
    if of_runs and not study.methods:
        raise UserError(f"The report '{of_runs[0]}' needs runs; name methods under the key 'methods'.")
    for name in study.reports:
        REPORTS[name].check(study)


def check_job(job: Job, study: Study) -> None:
    """Refuse a run that would give no scores."""
    if (given := job.settings.evaluation) != "server":
        raise UserError(f"The setting 'evaluation' is '{given}' but must be 'server' in a study, which needs scores.")
    method, needing = job.settings.method, [name for name in study.reports if REPORTS[name].of_global]
    if needing and not strategies.STRATEGIES[method].has_global:
        raise UserError(
            f"The method '{method}' trains no model for all, which the report '{needing[0]}' needs; leave one of them "
            "out, or use the report 'personal'."
        )


def collect(job: Job, study: Study) -> dict[str, Any]:
    """A finished run as JSON: its summary, and what the reports need."""
    folder = Path(job.settings.run_dir)
    about: dict[str, Any] = read_json(folder / "provenance.json")
    found: dict[str, Any] = read_json(folder / "summary.json")
    found["git_commits"] = [part["git_commit"] for part in (about, *about.get("resumed", []))]
    for name in study.reports:
        if key := REPORTS[name].key:
            found[key] = REPORTS[name].collect(job, study)
    return found


def is_collected(job: Job, study: Study, saved: Run | None) -> bool:
    """Whether a JSON file is that of this run, with all that the reports need."""
    if not isinstance(saved, Mapping) or not same_run(saved.get("settings"), job.settings):
        return False
    return all(REPORTS[name].is_current(saved, job, study) for name in study.reports)


def write_reports(study: Study, runs: Sequence[Run], folder: Path) -> None:
    """study.toml, README.md, tables and figures of a study, from the runs that are there."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    lines = [f"# {study.title}", "", f"    {command(study)}", ""]
    for name in study.reports:
        lines += REPORTS[name].write(study, runs, folder)
    write_bytes(folder / "study.toml", study.toml())
    write_bytes(folder / "README.md", "\n".join(lines).encode())


def command(study: Study) -> str:
    """What to type for this study: its name where that says it all, or else the description in its folder."""
    plain = study.name.removesuffix("-quick")
    if plain in known_studies() and alike(load_study(plain, plain != study.name), study):
        return f"fedivon study {plain}" + (" --quick" if plain != study.name else "")
    return f"fedivon study results/{study.name}/study.toml"


def alike(one: Study, other: Study) -> bool:
    """Whether two descriptions say the same, or differ in presets only, and there in what none of the runs uses."""
    if one.whole() == other.whole():
        return True
    ours, theirs = ([(job.name, job.settings.identity()) for job in jobs(study)] for study in (one, other))
    bare = [study.model_copy(update={"frozen": {}}) for study in (one, other)]
    return bare[0] == bare[1] and ours == theirs != []
