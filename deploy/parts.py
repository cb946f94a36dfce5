"""Files for the nodes of a demo: a public dataset, cut into the parts that virtual clients would have."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients import local_data
from clients.base import LocalData
from fedivon_flwr.data import NODES, Contract, load
from fedivon_flwr.errors import UserError
from fedivon_flwr.settings import Settings


def export_parts(settings: Settings, folder: Path) -> list[Path]:
    """Write ``<number>.npz`` for every client.

    A node that has such a file as its data, and the number as its own, does what the virtual client does.
    """
    if settings.dataset == NODES:
        raise UserError(f"The key 'dataset' is '{NODES}', but only a dataset that is here can be cut into parts.")
    files = [folder / f"{number}.npz" for number in range(settings.clients)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, file in enumerate(files):
            scratch = file.with_suffix(".part.npz")
            np.savez_compressed(scratch, **arrays(local_data(settings, {"partition-id": number})))  # type: ignore[arg-type]
            scratch.replace(file)
    except OSError as error:
        raise UserError(f"The parts cannot be written to '{folder}' ({error.strerror}).") from None
    return files


def common(settings: Settings) -> dict[str, str | int]:
    """The settings of a run on nodes that have these files."""
    dataset = load(settings.dataset)
    contract = Contract(dataset.shape, dataset.classes, dataset.mean, dataset.std)
    return {"dataset": NODES, **contract.settings(), "evaluation": "clients", "clients": settings.clients}


def arrays(part: LocalData) -> dict[str, NDArray[Any]]:
    """A client's examples, as a node's file has them."""
    train, test = part.dataset.train, part.dataset.test
    return {
        "x_train": train.x[part.train],
        "y_train": train.y[part.train],
        "x_test": test.x[part.test],
        "y_test": test.y[part.test],
    }
