"""FedAvg, the client half: local epochs of Adam (McMahan et al. 2017)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from clients.base import Told, TorchClient, Work, mean_loss
from fedivon_flwr.records import NDArrays


class Plan(Told):
    """What a FedAvg client is told."""

    lr: float
    weight_decay: float = 0.0
    fused: bool = False


class FedAvgClient(TorchClient):
    """Sends back its weights."""

    def train(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> tuple[NDArrays, float]:  # noqa: ARG002
        """Adam on the node's data."""
        loss = self.adam(Plan.model_validate(config), work)
        return self.weights(), loss

    def adam(
        self,
        plan: Plan,
        work: Work,
        amend: Callable[[int], None] | None = None,
        only: Callable[[str], bool] = lambda name: True,  # noqa: ARG005
    ) -> float:
        """Local epochs of Adam on all parameters, or `only` on some by name (the others need no gradient); mean loss.

        `amend` is called with the batch's size when the weights have the gradient of the batch's mean loss, and may
        change it before the step.
        """
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        params, aside = ([p for name, p in named if only(name) == trained] for trained in (True, False))
        optimizer = torch.optim.Adam(params, lr=plan.lr, weight_decay=plan.weight_decay, fused=plan.fused)
        losses = []
        with frozen(aside):
            for inputs, labels in self.epochs(work):
                optimizer.zero_grad()
                loss = cross_entropy(self.model(inputs), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                if amend is not None:
                    amend(len(labels))
                optimizer.step()
                losses.append((loss.detach(), len(labels)))
        return mean_loss(losses)


@contextmanager
def frozen(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, parameters need no gradient, so that none is computed for them or for what lies before them."""
    for p in params:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in params:
            p.requires_grad_(True)
