"""FedAvg, the client half: local epochs of Adam (McMahan et al. 2017)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from clients.base import Told, TorchClient, Work, mean_loss
from fedivon_flwr.records import MEAN, NDArrays, to_numpy


class Plan(Told):
    """What a FedAvg client is told."""

    lr: float
    weight_decay: float = 0.0
    fused: bool = False


class FedAvgClient(TorchClient):
    """Sends back its weights."""

    def train(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> tuple[NDArrays, float]:  # noqa: ARG002
        """Adam on the node's data."""
        plan = Plan.model_validate(config)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.Adam(named.values(), lr=plan.lr, weight_decay=plan.weight_decay, fused=plan.fused)
        losses = []
        for inputs, labels in self.epochs(work):
            optimizer.zero_grad()
            loss = cross_entropy(self.model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append((loss.detach(), len(labels)))
        return {MEAN + name: to_numpy(p) for name, p in named.items()}, mean_loss(losses)
