"""A finished run for people: report.md with its figures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import clients
from fedivon_flwr.data import class_counts, load
from fedivon_flwr.evaluation import Predictions
from fedivon_flwr.metrics import reliability
from fedivon_flwr.runs import write_bytes
from fedivon_flwr.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORES = {"accuracy": "accuracy ↑", "ece": "ECE ↓", "nll": "NLL ↓", "brier": "Brier ↓"}
LABELS = {
    "fedavg": "FedAvg",
    "fedlaplace": "FedLaplace",
    "fedivon": "FedIvon",
    "local": "Local",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "pfedme": "pFedMe",
    "pfedbayes": "pFedBayes",
    "pfedvem": "pFedVEM",
}
AT_MEAN = "@mean"  # a method's row without Monte Carlo


def label(row: str) -> str:
    """A row's name for people.

    >>> label("fedivon@mean"), label("mine")
    ('FedIvon@mean', 'mine')
    """
    method = row.removesuffix(AT_MEAN)
    return LABELS.get(method, method) + row.removeprefix(method)


def rows_of(summary: Mapping[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """The lines that a run has in a table: at the mean, and by Monte Carlo where there is a posterior.

    First the server's model on its test data, then, where there are any, the personal models of the clients that took
    part and of those that did not, each the mean over clients on their own test data.
    """
    name, found = label(summary["method"]), summary["metrics"]
    rows = _rows(name, found)
    for who in ("personal", "unseen"):
        rows += _rows(f"{name}, {who}", found.get(who, {}))
    return rows


def _rows(name: str, found: Mapping[str, Any]) -> list[tuple[str, dict[str, float]]]:
    if "mc" not in found:
        return [(name, found["mean"])] if "mean" in found else []
    return [(name + AT_MEAN, found["mean"]), (f"{name} ({found['mc']['samples']} samples)", found["mc"])]


def number(value: float | None, digits: int = 4) -> str:
    """A score for people; None stands for what is not a number."""
    return "-" if value is None else f"{value:.{digits}f}"


def markdown_table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Scores of runs as a Markdown table."""
    lines = ["| | " + " | ".join(SCORES.values()) + " |", "|---" * (len(SCORES) + 1) + "|"]
    for summary in summaries:
        for name, scores in rows_of(summary):
            lines.append(f"| {name} | " + " | ".join(number(scores[key]) for key in SCORES) + " |")
    return "\n".join(lines)


def with_scores(row: Mapping[str, Any]) -> dict[str, Any]:
    """A round with the scores of its evaluation where those of the server would be, also if the nodes made it.

    >>> with_scores({"round": 5, "clients": {"loss": 0.4, "mean": {"nll": 0.4}}})["mean"]
    {'nll': 0.4}
    """
    return {**row, **row.get("clients", {})}


def time_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where the time of a round goes, as a Markdown table: means over the rounds in which clients measured it.

    >>> timeline = {"client": 7, "push": 2.0, "start": 1.0, "import": 3.0, "load": 0.1, "train": 4.0, "reply": 1.9}
    >>> print(*time_table([{"seconds": 12.5, "timeline": timeline}, {"seconds": 30.0}]), sep="\\n")
    | push | start | import | load | train | reply | the rest | a round |
    |--:|--:|--:|--:|--:|--:|--:|--:|
    | 2.00 | 1.00 | 3.00 | 0.10 | 4.00 | 1.90 | 0.50 | 12.50 |
    """
    found = []
    for row in rows:
        if timeline := row.get("timeline"):
            phases = {phase: seconds for phase, seconds in timeline.items() if phase != "client"}
            found.append({**phases, "the rest": row["seconds"] - sum(phases.values()), "a round": row["seconds"]})
    if not found:
        return []
    means = [f"{np.mean([each[name] for each in found]):.2f}" for name in found[0]]
    return [f"| {' | '.join(found[0])} |", "|--:" * len(means) + "|", f"| {' | '.join(means)} |"]


def write_report(
    folder: Path,
    summary: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    predictions: Predictions | None,
    people: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write report.md, curves.png, (with predictions) reliability.png and (with personal models) personal.png."""
    from simulation.plots import curves_figure, personal_figure, reliability_figure, save_figure

    method = summary["method"]
    title = f"{label(method)} on {summary['dataset']}, seed {summary['seed']}"
    save_figure(curves_figure([with_scores(row) for row in rows], title, method), folder / "curves.png")
    text = [
        f"# {title}",
        "",
        f"{summary['rounds']} rounds, {summary['clients']} clients, {summary['seconds']:.0f} s.",
        "",
    ]
    if predictions is not None:
        at = {method + AT_MEAN: ("at the mean", predictions.mean)}
        if predictions.mc is not None:
            at[method] = (f"Monte Carlo, {predictions.samples} samples", predictions.mc)
        bins = {row: (name, reliability(probs, predictions.labels)) for row, (name, probs) in at.items()}
        save_figure(reliability_figure(bins, title), folder / "reliability.png")
    text += [markdown_table([summary]), ""]
    text += ["![reliability](reliability.png)", ""] if predictions is not None else []
    if people:
        save_figure(personal_figure(people, title), folder / "personal.png")
        text += ["![personal models](personal.png)", ""]
    text += ["![curves](curves.png)", ""]
    if times := time_table(rows):
        text += ["Seconds of a round, by the client that worked the longest; means over the rounds:", "", *times, ""]
    text += ["## Settings", "", "```toml"]
    text += [f"{key} = {toml_value(value)}" for key, value in summary["settings"].items()] + ["```", ""]
    write_bytes(folder / "report.md", "\n".join(text).encode())


def who_has_what(settings: Settings) -> "tuple[NDArray[np.int64], Figure]":
    """The examples of every class (columns) at every client (rows), and a picture of them."""
    from simulation.plots import partition_figure

    dataset = load(settings.dataset)
    parts = clients.split(settings.dataset, clients.partition_spec(settings))
    counts = class_counts(parts, dataset.train.y, dataset.classes)
    split = f"{settings.partitioner}, {settings.clients} clients, seed {settings.partition_seed}"
    return counts, partition_figure(counts, f"{Path(settings.dataset).stem}: {split}")


def toml_value(value: str | float | bool) -> str:
    """A scalar in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
