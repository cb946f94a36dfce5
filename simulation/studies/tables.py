"""A study's scores over seeds, beside the paper's: in long form, and for people."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from simulation.report import AT_MEAN, SCORES, label
from simulation.studies.spec import Study

TABLE_SCORES = {**SCORES, "accuracy": "accuracy (%) ↑", "nll": "NLL (nats) ↓"}
METRICS = {
    **TABLE_SCORES,
    "auroc": "AUROC ↑",
    **{f"pm_{metric}": f"PM {words}" for metric, words in TABLE_SCORES.items()},  # personal models
    **{f"gm_{metric}": f"GM {words}" for metric, words in TABLE_SCORES.items()},  # the global model
    **{f"um_{metric}": f"UM {words}" for metric, words in TABLE_SCORES.items()},  # personal models of unseen clients
}

Run = Mapping[str, Any]  # a JSON file of the results
Values = Callable[[Run, str], Mapping[str, float | None]]  # a run's scores as a row of a table


@dataclass(frozen=True)
class Cell:
    """A metric of one method on one dataset: over the seeds that are there, and in the paper."""

    preset: str
    dataset: str
    variant: str
    method: str
    metric: str
    values: tuple[float, ...]
    paper: float | None

    @property
    def mean(self) -> float | None:
        """Over the seeds; None while no run has finished."""
        return mean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """Over the seeds, of a sample; None for fewer than two."""
        return stdev(self.values) if len(self.values) > 1 else None

    def text(self) -> str:
        """For the Markdown table, e.g. ``62.71 ± 0.20 (62.54)``; a dash where no run has finished."""
        digits = 2 if in_per_cent(self.metric) else 4
        ours = "-" if self.mean is None else f"{self.mean:.{digits}f}"
        spread = "" if self.std is None else f" ± {self.std:.{digits}f}"
        return ours + spread + ("" if self.paper is None else f" ({self.paper:.{digits}f})")


def in_per_cent(metric: str) -> bool:
    """Whether a metric is given in per cent, as the paper gives accuracy."""
    return metric.endswith("accuracy")


def scores_at(run: Run, method: str) -> Mapping[str, float | None]:
    """A run's scores as a row of a table: ``METHOD@mean``, or by Monte Carlo where there is a posterior."""
    found: Mapping[str, Mapping[str, float | None]] = run["metrics"]
    return found["mean"] if method.endswith(AT_MEAN) else found.get("mc", found["mean"])


def cells(study: Study, runs: Sequence[Run], metrics: Sequence[str], values: Values | None = None) -> list[Cell]:
    """All cells of a study's table; those without a finished run are empty."""
    found = []
    names = names_of(study)
    for preset in study.presets:
        for variant in [v.label for v in study.variants] or [""]:
            for method in study.methods:
                mine = [
                    (values or scores_at)(run, method)
                    for run in runs
                    if (run["preset"], run["variant"], run["method"]) == (preset, variant, method.removesuffix(AT_MEAN))
                ]
                paper = study.paper.get(preset, {}).get(method, {})
                for metric in metrics:
                    ours = [scores.get(metric) for scores in mine]
                    known = tuple(100 * value if in_per_cent(metric) else value for value in ours if value is not None)
                    where = (preset, names[preset], variant, method, metric)
                    given = paper.get(metric)
                    found.append(Cell(*where, known, given.get(variant) if isinstance(given, dict) else given))
    return found


def names_of(study: Study) -> dict[str, str]:
    """What the presets are called in tables: by their dataset, or by themselves where two have the same."""
    datasets = {preset: Path(study.settings_of(preset).dataset).stem for preset in study.presets}
    return {
        preset: dataset if list(datasets.values()).count(dataset) == 1 else Path(preset).stem
        for preset, dataset in datasets.items()
    }


def csv_bytes(rows: Iterable[Sequence[object]]) -> bytes:
    """A CSV file."""
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def table_csv(study: Study, table: Sequence[Cell]) -> bytes:
    """The table in long form; accuracy in per cent, as in the paper."""
    varied = [study.column] if study.column else []
    rows: list[list[object]] = [["dataset", "method", *varied, "metric", "mean", "std", "seeds", "paper"]]
    for cell in table:
        numbers = ["" if value is None else f"{value:.6g}" for value in (cell.mean, cell.std)]
        paper = "" if cell.paper is None else f"{cell.paper:g}"
        value = [cell.variant] if study.column else []
        rows.append([cell.dataset, cell.method, *value, cell.metric, *numbers, len(cell.values), paper])
    return csv_bytes(rows)


def table_markdown(study: Study, table: Sequence[Cell]) -> list[str]:
    """The table for people: ours over the seeds and, in brackets, the paper's."""
    metrics = list(dict.fromkeys(cell.metric for cell in table))
    heads = ["data", *([study.column] if study.column else []), "", *(METRICS[metric] for metric in metrics)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * (len(heads) - len(metrics)) + "|--:" * len(metrics) + "|"]
    for start in range(0, len(table), len(metrics)):
        row = table[start : start + len(metrics)]
        names = [row[0].dataset, *([row[0].variant] if study.column else []), label(row[0].method)]
        lines.append("| " + " | ".join([*names, *(cell.text() for cell in row)]) + " |")
    return lines


def explanation(table: Sequence[Cell]) -> str:
    """What the numbers are, under the table."""
    seeds = sorted({len(cell.values) for cell in table})
    count = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    words = f"Mean ± standard deviation over seeds; finished runs a cell: {count}"
    return words + ("; in brackets the paper's number." if any(cell.paper is not None for cell in table) else ".")
