"""pFedBayes, the client half: a personal Gaussian near the server's (Zhang et al. 2022).

The client keeps a mean-field Gaussian ``q`` of its own. On the wire a Gaussian is its mean and, as ``hess/*``, its
precision.
"""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from clients.base import Told, TorchClient, Work, mean_loss
from fedivon_flwr.meanfield import MeanField
from fedivon_flwr.optim import write
from fedivon_flwr.posterior import DiagGaussian, Layout
from fedivon_flwr.records import HESS, MEAN, NDArrays, flat, unflatten


class Plan(Told):
    """What a pFedBayes client is told."""

    lr: float
    zeta: float
    mc_samples: int = Field(ge=1)
    noise: float = Field(1.0, gt=0)


class PFedBayesClient(TorchClient):
    """Sends back its local copy of the server's Gaussian; the personal one is remembered."""

    first_hess = 1.0

    def train(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> tuple[NDArrays, float]:
        """For every batch a step of ``q`` on ``E_q[ℓ̄] + ζ/N KL(q ‖ copy)``, and one of the copy on ``KL(q ‖ copy)``."""
        plan, layout = Plan.model_validate(config), Layout.of(self.model)
        copy, own = (MeanField.of(self._gaussian(part)) for part in (arrays, self.memory or arrays))
        optimizers = [torch.optim.Adam(each.leaves, lr=plan.lr) for each in (own, copy)]
        losses = []
        for inputs, labels in self.epochs(work):
            for _ in range(plan.mc_samples):
                logits = functional_call(self.model, layout.split(own.sample(plan.noise)), (inputs,))
                loss = cross_entropy(logits, labels)
                (loss / plan.mc_samples).backward()  # type: ignore[no-untyped-call]
                losses.append((loss.detach(), len(labels)))
            near = plan.zeta / len(self.data.train) * own.gaussian().kl(copy.detached())
            near.backward()  # type: ignore[no-untyped-call]
            optimizers[0].step()
            own.detached().kl(copy.gaussian()).backward()  # type: ignore[no-untyped-call]
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        write([p for p in self.model.parameters() if p.requires_grad], own.mu.detach())
        self.memory = to_arrays(own.detached(), layout)
        return to_arrays(copy.detached(), layout), mean_loss(losses)

    def _gaussian(self, arrays: NDArrays) -> DiagGaussian:
        """Mean and precision, as they are on the wire."""
        return DiagGaussian(*(flat(arrays, prefix).to(self.device) for prefix in (MEAN, HESS)))

    def posterior(self, arrays: NDArrays, config: Mapping[str, Any]) -> DiagGaussian:
        """The Gaussian that predicts: with the noise of the training."""
        found = self._gaussian(arrays)
        return DiagGaussian(found.mean, found.precision / Plan.model_validate(config).noise ** 2)

    def personalise(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> DiagGaussian:
        """The client's own Gaussian after one more local update."""
        self.train(arrays, config, work)
        return self.posterior(self.memory, config)


def to_arrays(gaussian: DiagGaussian, layout: Layout) -> NDArrays:
    """A Gaussian for the wire."""
    return unflatten(gaussian.mean, layout, MEAN) | unflatten(gaussian.precision, layout, HESS)
