"""Figures, made with matplotlib's objects: no global state, no display needed."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedivon_flwr.metrics import Reliability
from fedivon_flwr.runs import write_bytes

COLOURS = {"mean": "#0072b2", "mc": "#d55e00", "train": "#7f7f7f"}  # Okabe and Ito's palette, safe for the colour-blind
WIDTH = 9.0  # inches: 900 pixels at 100 dpi, the width of a README


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


def curves_figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Loss and accuracy over the rounds of a run (`rows` of its metrics.jsonl)."""
    figure = Figure(figsize=(WIDTH, 3.4), dpi=100, layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    train = [(row["round"], row["train_loss"]) for row in rows if row["train_loss"] is not None]
    if train:
        loss.plot(*zip(*train, strict=True), color=COLOURS["train"], linewidth=0.8, label="training, sampled clients")
    for at, label in (("mean", "test, at the mean"), ("mc", "test, Monte Carlo")):
        scored = [(row["round"], row[at]) for row in rows if at in row]
        if scored:
            rounds = [number for number, _ in scored]
            loss.plot(rounds, [s["nll"] for _, s in scored], color=COLOURS[at], label=label)
            accuracy.plot(rounds, [100 * s["accuracy"] for _, s in scored], color=COLOURS[at], label=label)
    loss.set(xlabel="round", ylabel="negative log-likelihood (nats)", ylim=(0, None))
    accuracy.set(xlabel="round", ylabel="test accuracy (%)")
    for axes in (loss, accuracy):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    if loss.lines:
        loss.legend(frameon=False)
    figure.suptitle(title)
    return figure


def reliability_figure(bins: Mapping[str, Reliability], title: str) -> Figure:
    """Accuracy against confidence, with the number of examples in each bin below."""
    figure = Figure(figsize=(WIDTH, 4.6), dpi=100, layout="constrained")
    grid = figure.subplots(2, len(bins), sharex=True, sharey="row", squeeze=False, height_ratios=(3, 1))
    for column, ((name, found), colour) in enumerate(zip(bins.items(), COLOURS.values(), strict=False)):
        diagram, counts = grid[0, column], grid[1, column]
        centres, width = (found.edges[:-1] + found.edges[1:]) / 2, np.diff(found.edges)
        diagram.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1)
        diagram.bar(centres, np.nan_to_num(found.accuracy), width, color=colour, alpha=0.75, edgecolor="white")
        diagram.plot(found.confidence, found.accuracy, ".", color="black")
        diagram.set(title=f"{name}: ECE {found.ece:.4f}", xlim=(0, 1), ylim=(0, 1))
        counts.bar(centres, found.count, width, color=colour, edgecolor="white")
        counts.set(xlabel="confidence (top probability)")
    grid[0, 0].set_ylabel("accuracy")
    grid[1, 0].set_ylabel("examples")
    figure.suptitle(title)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in one step, in the format of its suffix."""
    buffer = BytesIO()
    figure.savefig(buffer, format=path.suffix.removeprefix("."))
    write_bytes(path, buffer.getvalue())
