"""The figures show the numbers they are given."""

from io import BytesIO

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from simulation.plots import partition_figure


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
