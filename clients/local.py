"""Local, the client half: every client alone, from the common initialisation; the baseline without federation."""

from collections.abc import Mapping
from typing import Any

from clients.base import Work
from clients.fedavg import FedAvgClient
from fedivon_flwr.records import NDArrays


class LocalClient(FedAvgClient):
    """Trains like FedAvg and keeps everything: the server's prefix `own` is empty, with which every name begins."""

    def personalise(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> None:
        """What the client has trained is its own model already; one that was never asked trains now."""
        if not self.memory:
            self.train(arrays, config, work)
