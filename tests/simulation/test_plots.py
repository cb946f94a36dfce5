"""The figures show the numbers they are given."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from simulation.plots import (
    COLOURS,
    Curve,
    Point,
    convergence_figure,
    curves_figure,
    partition_figure,
    save_figure,
    scores_figure,
)


def test_partition_figure_shows_sizes_and_counts() -> None:
    counts = np.array([[3, 0, 1], [0, 7, 2]])
    figure = partition_figure(counts, "who has what")
    sizes, cells, _ = figure.axes
    bars = [patch.get_height() for patch in sizes.patches if isinstance(patch, Rectangle)]
    assert bars == [4, 9]
    shown = cells.images[0].get_array()
    assert isinstance(shown, np.ma.MaskedArray)
    assert shown.filled(0).tolist() == counts.T.tolist()
    assert shown.mask.tolist() == (counts.T == 0).tolist()  # a class a client lacks is left white
    assert (cells.get_xlabel(), cells.get_ylabel(), sizes.get_ylabel()) == ("client", "class", "examples")
    assert figure.get_suptitle() == "who has what"


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (200, 10), (50, 100)])
def test_partition_figure_is_900_pixels_wide(shape: tuple[int, int]) -> None:
    counts = np.random.default_rng(0).integers(0, 9, shape)
    counts[0, 0] = 1
    file = BytesIO()
    partition_figure(counts, "any size").savefig(file, format="png")
    header = file.getvalue()[16:24]
    width, height = int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")
    assert width == 900
    assert 300 <= height <= 800


def curve(label: str) -> Curve:
    return Curve(label, "#0072b2", "-", [1, 2], [1.0, 0.5], [50.0, 60.0])


def test_every_curve_has_a_name_in_whichever_panel_it_is() -> None:
    figure = convergence_figure({"one": [curve("FedAvg")], "two": [curve("FedAvg"), curve("FedIvon")]})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FedAvg", "FedIvon"]
    assert figure.axes[0].get_ylabel() == "test loss (NLL, nats)"


def test_scores_ours_and_the_papers() -> None:
    ours, theirs = (
        Point("digits", "fedavg", "FedAvg", 0.5, None, 0.6),
        Point("digits", "fedivon", "FedIvon", None, None, 0.7),
    )
    figure = scores_figure({"accuracy": [ours, theirs]})
    drawn = {(line.get_color(), float(np.asarray(line.get_ydata())[0])) for line in figure.axes[0].lines}
    assert drawn == {(COLOURS["fedavg"], 0.5), (COLOURS["fedavg"], 0.6), (COLOURS["fedivon"], 0.7)}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FedAvg", "FedIvon", "the paper"]


def test_a_run_that_diverged_has_a_figure() -> None:
    row = {"round": 1, "train_loss": None, "mean": {"nll": None, "accuracy": None}}
    figure = curves_figure([row, {**row, "round": 2}], "diverged", "fedavg")
    assert np.isnan(np.asarray(figure.axes[0].lines[0].get_ydata())).all()


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_figure_gives_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    for name in ("a", "b"):
        save_figure(partition_figure(np.array([[1, 2], [3, 4]]), "title"), tmp_path / f"{name}.{suffix}")
    assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
