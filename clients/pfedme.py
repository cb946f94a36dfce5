"""pFedMe, the client half: a personal model near the shared one, by Moreau envelopes (Dinh et al. 2020)."""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch.nn.functional import cross_entropy

from clients.base import Told, TorchClient, Work, mean_loss
from fedivon_flwr.records import MEAN, NDArrays, to_numpy


class Plan(Told):
    """What a pFedMe client is told."""

    lr: float
    lr_personal: float
    penalty: float
    inner_steps: int = Field(ge=1)


class PFedMeClient(TorchClient):
    """Sends back the shared weights ``w``; the personal model ``θ`` is what training leaves in the network."""

    def train(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> tuple[NDArrays, float]:  # noqa: ARG002
        """For every batch ``θ ← θ − η_p (∇f(θ) + μ (θ − w))`` some times, then ``w ← w − η μ (w − θ)``.

        The inner steps approach ``prox(w) = argmin f(θ) + μ/2 ‖θ − w‖²``, where ``μ (w − θ)`` is the gradient of
        the Moreau envelope.
        """
        plan = Plan.model_validate(config)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        personal, shared = list(named.values()), [p.detach().clone() for p in named.values()]
        losses = []
        for inputs, labels in self.epochs(work):
            for _ in range(plan.inner_steps):
                loss = cross_entropy(self.model(inputs), labels)
                grads = torch.autograd.grad(loss, personal)
                with torch.no_grad():
                    for theta, w, grad in zip(personal, shared, grads, strict=True):
                        theta.sub_(grad + plan.penalty * (theta - w), alpha=plan.lr_personal)
                losses.append((loss.detach(), len(labels)))
            with torch.no_grad():
                for theta, w in zip(personal, shared, strict=True):
                    w.sub_(w - theta, alpha=plan.lr * plan.penalty)
        return {MEAN + name: to_numpy(w) for name, w in zip(named, shared, strict=True)}, mean_loss(losses)
