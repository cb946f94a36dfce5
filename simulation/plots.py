"""Figures, made with matplotlib's objects: no global state, no display needed."""

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

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
