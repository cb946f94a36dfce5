"""What a node does: one file per method, each a Flower `NumPyClient`, named like its other half in `strategies`."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clients.base import LocalData, TorchClient
from fedivon_flwr.data import NODES, Contract, Dataset, PartitionSpec, load, partition
from fedivon_flwr.errors import UserError
from fedivon_flwr.models import build as build_model
from fedivon_flwr.registry import Plugins
from fedivon_flwr.settings import Settings

CLIENTS: Plugins[type[TorchClient]] = Plugins("method", "clients", TorchClient)  # type: ignore[type-abstract]


def build(settings: Settings, node_config: Mapping[str, Any], node_id: int = 0) -> TorchClient:
    """The client that the settings name, on this node's data.

    With seed and round, a node's ``partition-id`` decides batches and noise, or else its node id. Data, split and
    model are kept in the process, so that the virtual clients of one process share them.
    """
    data = local_data(settings, node_config)
    model = _model(settings.model, data.dataset.shape, data.dataset.classes)
    number = int(node_config.get("partition-id", node_id))
    return CLIENTS[settings.method](model, data, pick_device(settings.device), number)


def local_data(settings: Settings, node_config: Mapping[str, Any]) -> LocalData:
    """A node's data: its own, or its part of a dataset, or, for a node without a ``partition-id``, all of that."""
    if settings.dataset == NODES:
        if not node_config.get("data"):
            raise UserError(
                f"The key 'dataset' is '{NODES}' but this node has no data; start it with data=\"/path/to/own.npz\" in "
                "its --node-config."
            )
        return LocalData.whole(contract(settings).fit(load(str(Path(str(node_config["data"])).absolute()))))
    dataset = load(settings.dataset)
    if "partition-id" not in node_config:
        return LocalData.whole(dataset)
    number = int(node_config["partition-id"])
    if (count := int(node_config.get("num-partitions", settings.clients))) != settings.clients:
        raise UserError(
            f"The federation has {count} nodes but the key 'clients' is {settings.clients}; make them equal "
            f"(simulation: --federation-config num-supernodes={settings.clients})."
        )
    if not 0 <= number < settings.clients:
        raise UserError(f"The node's partition-id is {number} but must be from 0 to {settings.clients - 1}.")
    return LocalData.part(dataset, split(settings.dataset, partition_spec(settings))[number])


def server_data(settings: Settings) -> Dataset:
    """The dataset as the server sees it: without examples if these are on the nodes."""
    dataset = contract(settings).without_data() if settings.dataset == NODES else load(settings.dataset)
    if settings.evaluation == "server" and not len(dataset.test):
        raise UserError(
            f"The key 'evaluation' is 'server' but with the dataset '{settings.dataset}' the server has no test data; "
            "use 'clients' or 'none'."
        )
    return dataset


def contract(settings: Settings) -> Contract:
    """What the data of all nodes must have in common."""
    return Contract.parse(settings.input_shape, settings.classes, settings.pixel_mean, settings.pixel_std)


def partition_spec(settings: Settings) -> PartitionSpec:
    """The split that the settings describe."""
    return PartitionSpec(
        name=settings.partitioner,
        clients=settings.clients,
        seed=settings.partition_seed,
        alpha=settings.alpha,
        shards_per_client=settings.shards_per_client,
        max_examples=settings.max_examples,
        quantity_skew=settings.quantity_skew,
        classes_per_client=settings.classes_per_client,
    )


@lru_cache(maxsize=4)
def split(dataset: str, spec: PartitionSpec) -> tuple[NDArray[np.int64], ...]:
    """The rows of every client."""
    train = load(dataset).train
    return partition(spec, train.y, train.group)


@lru_cache(maxsize=4)
def _model(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    return build_model(name, shape, classes, seed=0)  # the weights come with each message


def pick_device(name: str) -> torch.device:
    """The device that a setting names; ``auto`` is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"The key 'device' is '{name}' but this process sees no GPU that PyTorch can use; use 'auto' or 'cpu', "
            "or give virtual clients a share with --client-gpus."
        )
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False  # the same seed, the same numbers
    return torch.device(name)
