"""Data: named datasets, the user's own `.npz` files, and how they are divided among clients."""

from fedivon_flwr.data.contract import NODES, Contract
from fedivon_flwr.data.datasets import (
    DATASETS,
    IMAGES,
    VALIDATION,
    Dataset,
    DatasetSpec,
    Split,
    batch_to_tensor,
    channels_last,
    load,
    normalise,
    read_image,
)
from fedivon_flwr.data.partition import PARTITIONERS, PartitionSpec, class_counts, partition

__all__ = [
    "DATASETS",
    "IMAGES",
    "NODES",
    "PARTITIONERS",
    "VALIDATION",
    "Contract",
    "Dataset",
    "DatasetSpec",
    "PartitionSpec",
    "Split",
    "batch_to_tensor",
    "channels_last",
    "class_counts",
    "load",
    "normalise",
    "partition",
    "read_image",
]
