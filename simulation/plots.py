"""Figures, made with matplotlib's objects: no global state, no display needed."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm, PowerNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatter, MaxNLocator

from fedivon_flwr.metrics import Reliability
from fedivon_flwr.runs import write_bytes
from simulation.report import AT_MEAN

COLOURS = {  # Okabe and Ito's palette, safe for the colour-blind; the same method has the same colour everywhere
    "fedavg": "#0072b2",
    "fedlaplace": "#009e73",
    "fedivon@mean": "#e69f00",
    "fedivon": "#d55e00",
    "local": "#999999",
    "pfedme": "#56b4e9",
    "pfedvem": "#cc79a7",
    "pfedbayes": "#ddaa33",  # of Tol's palette, like fedrep's: Okabe and Ito's yellow is too faint on white
    "fedper": "#000000",
    "fedrep": "#882255",
}
OTHER = "#44aa99"
TRAINING = "#7f7f7f"
WIDTH = 9.0  # inches: 900 pixels at 100 dpi, the width of a README


class Curve(NamedTuple):
    """Test loss and accuracy (in per cent) over the rounds."""

    label: str
    colour: str
    line: str  # matplotlib's style: "-", "--"
    rounds: Sequence[int]
    loss: Sequence[float]
    accuracy: Sequence[float]


class Point(NamedTuple):
    """A method's score in a group, its spread over the seeds, and the paper's score, as far as known."""

    group: str
    method: str
    label: str
    value: float | None
    spread: float | None
    paper: float | None


def colour(method: str) -> str:
    """A method's colour.

    >>> colour("fedivon"), colour("fedavg@mean") == colour("fedavg")
    ('#d55e00', True)
    """
    return COLOURS.get(method) or COLOURS.get(method.removesuffix(AT_MEAN), OTHER)


def shades(count: int) -> list[str]:
    """Colours for what is no method, from dark to light; the lightest are hard to see on white and left out.

    >>> shades(2)
    ['#440154', '#7ad151']
    """
    return [to_hex(colormaps["viridis"](0.8 * i / max(1, count - 1))) for i in range(count)]


def partition_figure(counts: np.ndarray, title: str) -> Figure:
    """Who has what: examples of each class (columns of `counts`) at each client (rows).

    >>> figure = partition_figure(np.array([[3, 0], [1, 2]]), "two clients")
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['examples', 'class', 'examples (white: none)']
    """
    clients, classes = counts.shape
    figure = Figure(figsize=(WIDTH, 2.6 + 0.16 * min(max(classes, 8), 30)), dpi=100, layout="constrained")
    sizes, cells = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2.6))

    sizes.bar(np.arange(clients), counts.sum(axis=1), width=0.8 if clients <= 60 else 1.0, color="#31688e")
    sizes.set_ylabel("examples")
    sizes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    sizes.spines[["top", "right"]].set_visible(False)
    sizes.tick_params(axis="x", length=0)
    figure.suptitle(title)

    present = np.ma.masked_equal(counts.T, 0)  # an empty cell is white: "few" and "none" must differ
    norm = PowerNorm(0.5, vmin=0)  # counts are often skewed: a linear scale would show one colour
    image = cells.imshow(present, aspect="auto", origin="lower", cmap="viridis_r", norm=norm, interpolation="nearest")
    cells.set_xlabel("client")
    cells.set_ylabel("class")
    cells.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    cells.yaxis.set_major_locator(MaxNLocator(10 if classes > 12 else classes, integer=True, min_n_ticks=1))
    figure.colorbar(image, ax=cells, label="examples (white: none)", pad=0.01)
    return figure


def curves_figure(rows: Sequence[Mapping[str, Any]], title: str, method: str) -> Figure:
    """Loss and accuracy over the rounds of a run (`rows` of its metrics.jsonl)."""
    figure = Figure(figsize=(WIDTH, 3.4), dpi=100, layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    train = [(row["round"], row["train_loss"]) for row in rows if row["train_loss"] is not None]
    if train:
        loss.plot(*zip(*train, strict=True), color=TRAINING, linewidth=0.8, label="training, sampled clients")
    sampled = any("mc" in row for row in rows)
    for at, label in (("mean", "test, at the mean"), ("mc", "test, Monte Carlo")):
        scored = [(row["round"], row[at]) for row in rows if at in row]
        if scored:
            rounds = [number for number, _ in scored]
            shade = colour(method + AT_MEAN if at == "mean" and sampled else method)
            # None, which stands for NaN, becomes NaN again
            nll, right = (np.array([s[key] for _, s in scored], dtype=float) for key in ("nll", "accuracy"))
            loss.plot(rounds, nll, color=shade, label=label)
            accuracy.plot(rounds, 100 * right, color=shade, label=label)
    loss.set(xlabel="round", ylabel="negative log-likelihood (nats)", ylim=(0, None))
    accuracy.set(xlabel="round", ylabel="test accuracy (%)")
    for axes in (loss, accuracy):
        tidy(axes)
    if loss.lines:
        loss.legend(frameon=False)
    figure.suptitle(title)
    return figure


def personal_figure(people: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Accuracy of every client's personal model on its own test data, at the mean.

    Against that of the server's model, with the number of examples as colour; or, where the server has no whole model,
    against the number of examples.
    """
    figure = Figure(figsize=(WIDTH * 0.62, 4.6), dpi=100, layout="constrained")
    axes, both = figure.subplots(), all("global" in row for row in people)
    sizes = [row["examples"] for row in people]
    scale = LogNorm(min(sizes), max(*sizes, min(sizes) + 1))
    for seen, marker, name in ((True, "o", "took part"), (False, "^", "unseen")):
        if some := [row for row in people if row["seen"] == seen]:
            examples = [row["examples"] for row in some]
            x = [100 * row["global"]["mean"]["accuracy"] for row in some] if both else examples
            y = [100 * row["mean"]["accuracy"] for row in some]
            axes.scatter(x, y, c=examples, norm=scale, cmap="viridis_r", marker=marker, s=28, label=name)
    axes.set_ylabel("personal model: accuracy (%)")
    if both:
        low, high = (bound(*axes.get_xlim(), *axes.get_ylim()) for bound in (min, max))
        axes.plot([low, high], [low, high], ":", color="black", linewidth=1)
        axes.set(xlim=(low, high), ylim=(low, high), aspect="equal", xlabel="the server's model: accuracy (%)")
        bar = figure.colorbar(axes.collections[0], ax=axes, label="training examples of the client")
        plain_numbers(bar.ax.yaxis)
    else:
        axes.set(xscale="log", xlabel="training examples of the client")
        plain_numbers(axes.xaxis)
    tidy(axes)
    if not all(row["seen"] for row in people):
        axes.legend(frameon=False)
    figure.suptitle(title)
    return figure


def convergence_figure(panels: Mapping[str, Sequence[Curve]]) -> Figure:
    """Test loss (above) and accuracy (below) over the rounds; a column for each panel."""
    figure = Figure(figsize=(WIDTH, 5.6), dpi=100, layout="constrained")
    grid = figure.subplots(2, len(panels), sharex="col", squeeze=False)
    for column, (title, curves) in enumerate(panels.items()):
        loss, accuracy = grid[:, column]
        for curve in curves:
            style = {"color": curve.colour, "linestyle": curve.line}
            loss.plot(curve.rounds, curve.loss, label=curve.label, **style)
            accuracy.plot(curve.rounds, curve.accuracy, **style)
        loss.set_title(title)
        accuracy.set_xlabel("round")
        tidy(loss)
        tidy(accuracy)
    grid[0, 0].set_ylabel("test loss (NLL, nats)")
    grid[1, 0].set_ylabel("test accuracy (%)")
    named = {line.get_label(): line for axes in grid[0] for line in axes.lines}  # a panel may lack some
    figure.legend(handles=list(named.values()), loc="outside lower center", ncols=5, frameon=False)
    return figure


def scores_figure(metrics: Mapping[str, Sequence[Point]], title: str = "", apart: bool = False) -> Figure:
    """A panel for each metric: the methods side by side in each group, with the spread; the paper's as rings.

    With `apart` each group (column) has panels of its own, for groups of which each needs its own scale.
    """
    groups = list(dict.fromkeys(point.group for points in metrics.values() for point in points))
    columns = len(groups) if apart else min(2, len(metrics))
    rows = len(metrics) if apart else (len(metrics) + 1) // 2
    figure = Figure(figsize=(WIDTH, (1.7 if apart else 3.1) * rows + 0.8), dpi=100, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    if apart:
        for (row, (metric, points)), (column, group) in product(enumerate(metrics.items()), enumerate(groups)):
            _draw(grid[row, column], [point for point in points if point.group == group])
            grid[row, 0].set_ylabel(metric)
            grid[0, column].set_title(group)
            grid[row, column].set_xticks([])
    else:
        for axes, (metric, points) in zip(grid.flat, metrics.items(), strict=False):
            _draw(axes, points)
            axes.set_xticks(range(len(groups)), groups, rotation=0 if len(groups) < 5 else 45)
            axes.set_ylabel(metric)
    figure.align_ylabels()
    every = [point for points in metrics.values() for point in points]
    names = dict.fromkeys((point.method, point.label) for point in every)
    handles = [Line2D([], [], marker="o", linestyle="", color=colour(method), label=label) for method, label in names]
    if any(point.paper is not None for point in every):
        ring = Line2D([], [], marker="o", markersize=9, fillstyle="none", linestyle="", color=TRAINING)
        ring.set_label("the paper")
        handles.append(ring)
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(title)
    return figure


def _draw(axes: Axes, points: Sequence[Point]) -> None:
    """Points by group and, within it, by method."""
    groups = list(dict.fromkeys(point.group for point in points))
    methods = list(dict.fromkeys(point.method for point in points))
    for point in points:
        step = min(0.16, 0.8 / len(methods))
        x = groups.index(point.group) + step * (methods.index(point.method) - (len(methods) - 1) / 2)
        if point.paper is not None:
            axes.plot(x, point.paper, "o", markersize=9, fillstyle="none", color=colour(point.method))
        if point.value is not None:
            dot: dict[str, Any] = {"fmt": "o", "markersize": 5, "capsize": 3, "color": colour(point.method)}
            axes.errorbar(x, point.value, point.spread, **dot)
    axes.margins(x=0.15, y=0.15)
    tidy(axes)


def reliability_figure(bins: Mapping[str, tuple[str, Reliability]], title: str) -> Figure:
    """Accuracy against confidence by method, with the number of examples in each bin below."""
    figure = Figure(figsize=(WIDTH, 4.6 if len(bins) < 3 else 3.8), dpi=100, layout="constrained")
    grid = figure.subplots(2, len(bins), sharex=True, sharey="row", squeeze=False, height_ratios=(3, 1))
    for column, (method, (name, found)) in enumerate(bins.items()):
        diagram, counts = grid[0, column], grid[1, column]
        centres, width = (found.edges[:-1] + found.edges[1:]) / 2, np.diff(found.edges)
        bars = {"color": colour(method), "edgecolor": "white"}
        diagram.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1)
        diagram.bar(centres, np.nan_to_num(found.accuracy), width, alpha=0.75, **bars)
        diagram.plot(found.confidence, found.accuracy, ".", color="black", markersize=4)
        diagram.set(title=f"{name}\nECE {found.ece:.4f}", xlim=(0, 1), ylim=(0, 1))
        counts.bar(centres, found.count, width, **bars)
        counts.set(xlabel="confidence", yscale="log", ylim=(0.5, None))  # a bin of few images is not to be relied on
    grid[0, 0].set_ylabel("accuracy")
    grid[1, 0].set_ylabel("examples")
    figure.suptitle(title)
    return figure


def plain_numbers(axis: Axis) -> None:
    """60 instead of 6 × 10¹ on a logarithmic axis."""
    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter())


def tidy(axes: Axes) -> None:
    """A light grid, and no frame where there is no axis."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in one step, in the format of its suffix."""
    buffer = BytesIO()
    with rc_context({"svg.hashsalt": "fedivon"}):  # the same figure gives the same bytes
        about = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(buffer, format=path.suffix.removeprefix("."), metadata=about)
    write_bytes(path, buffer.getvalue())
