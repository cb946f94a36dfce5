"""Your own model and your own data: three clinics tell benign from malignant tumours by 30 measurements.

``python tumours.py FOLDER`` writes what each clinic has (Wisconsin's breast-cancer data, which come with scikit-learn).
The model is `network`; in the settings it is ``model = "tumours:network"``.
"""

import argparse
from collections import OrderedDict
from pathlib import Path

import numpy as np
from torch import nn

CLINICS = ("north", "south", "west")


def network(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Any module will do; one that ends in a part named `head` also works with methods that keep that at home."""
    (features,) = shape
    layers = nn.Sequential(nn.Linear(features, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh())
    return nn.Sequential(OrderedDict(features=layers, head=nn.Linear(16, classes)))


def write_data(folder: Path) -> None:
    """A file for each clinic, with different numbers of patients and shares of malignant tumours."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    random = np.random.default_rng(0)
    lean = random.random(len(y)) + 0.25 * y  # 1 is benign
    clinic = np.digitize(lean, np.quantile(lean, [0.5, 0.8]))
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(CLINICS):
        rows = random.permutation(np.flatnonzero(clinic == number))
        test, train = np.split(rows, [len(rows) // 4])
        # A scale on which all clinics agree beforehand: none sees the others' patients.
        scaled = np.log1p(x).astype(np.float32)
        np.savez(folder / f"{name}.npz", x_train=scaled[train], y_train=y[train], x_test=scaled[test], y_test=y[test])
        print(f"{name}: {len(train)} patients to train, {len(test)} to test, {y[rows].mean():.0%} benign")  # noqa: T201


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write what each of three clinics has.")
    parser.add_argument("folder", type=Path, help="where the files go")
    write_data(parser.parse_args().folder)
