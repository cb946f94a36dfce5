"""What the data of all nodes must have in common, so that a server without data can say which model is trained."""

import math
from dataclasses import dataclass, replace

import numpy as np

from fedivon_flwr.data.datasets import Dataset, Split
from fedivon_flwr.errors import UserError

NODES = "nodes"  # as a dataset: every node has its own


@dataclass(frozen=True)
class Contract:
    """Inputs of one shape, labels from 0 to `classes` − 1, and how pixels are normalised.

    `shape` is what a model sees, `(C, H, W)` for images; `mean` and `std` are those of a channel with pixels scaled to
    0…1, and have no meaning for other data.
    """

    shape: tuple[int, ...]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def parse(cls, shape: str, classes: int, mean: str = "", std: str = "") -> "Contract":
        """From the keys of a run config; pixels are scaled to −1…1 where nothing is said.

        >>> Contract.parse("3x32x32", 10)
        Contract(shape=(3, 32, 32), classes=10, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        >>> Contract.parse("30", 2, "", "").shape
        (30,)
        """
        try:
            sides = tuple(int(side) for side in shape.split("x"))
        except ValueError:
            sides = ()
        if not sides or min(sides) < 1:
            raise UserError(
                f"The key 'input-shape' is '{shape}' but must be CHANNELSxHEIGHTxWIDTH, e.g. 3x32x32, or the number of "
                f"features, e.g. 30, when 'dataset' is '{NODES}'."
            )
        if classes < 2:
            raise UserError(f"The key 'classes' is {classes} but must be at least 2 when 'dataset' is '{NODES}'.")
        channels = sides[0] if len(sides) == 3 else 1
        return cls(
            sides, classes, _numbers("pixel-mean", mean, channels), _numbers("pixel-std", std, channels, least=0)
        )

    def settings(self) -> dict[str, str | int]:
        """The keys of a run config of which `parse` makes this.

        >>> Contract((1, 8, 8), 10, (0.25,), (0.5,)).settings()
        {'input-shape': '1x8x8', 'classes': 10, 'pixel-mean': '0.25', 'pixel-std': '0.5'}
        """
        mean, std = (",".join(map(repr, values)) for values in (self.mean, self.std))
        return {
            "input-shape": "x".join(map(str, self.shape)),
            "classes": self.classes,
            "pixel-mean": mean,
            "pixel-std": std,
        }

    def fit(self, dataset: Dataset) -> Dataset:
        """A node's data as the federation's model takes them; refused where they do not fit."""
        if dataset.shape != self.shape:
            raise UserError(
                f"The inputs in '{dataset.name}' have the shape {dataset.shape} but the model takes {self.shape}."
            )
        if dataset.classes > self.classes:
            raise UserError(
                f"The labels in '{dataset.name}' go up to {dataset.classes - 1} but the model knows the classes 0 to "
                f"{self.classes - 1}."
            )
        return replace(dataset, classes=self.classes, mean=self.mean, std=self.std)

    def without_data(self) -> Dataset:
        """What a server knows that has no data."""
        labels = np.empty(0, np.int64)
        nothing = Split(np.empty((0, *self.shape), np.float32), labels, labels)
        return Dataset(NODES, nothing, nothing, self.classes, self.shape, self.mean, self.std)


def _numbers(key: str, text: str, count: int, least: float = -math.inf) -> tuple[float, ...]:
    """One number for each channel, from a list with commas; 0.5 where nothing is said."""
    try:
        found = tuple(float(part) for part in text.split(",")) if text else (0.5,) * count
    except ValueError:
        found = ()
    if len(found) != count or not all(least < value < math.inf for value in found):
        wanted = "positive numbers" if least == 0 else "numbers"
        raise UserError(
            f"The key '{key}' is '{text}' but must have {count} {wanted} with commas between them, one a channel."
        )
    return found
