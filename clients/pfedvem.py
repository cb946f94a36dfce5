"""pFedVEM, the client half: a shared base and a Gaussian over a personal head (Zhu et al. 2023).

The head's prior is ``N(μ_g, ρ_k²)`` around the server's head; how far clients may stray from it, ``ρ_k²``, is estimated
by variational expectation maximisation, and tells the server how much to trust a client's head.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from clients.base import EVALUATION_BATCH, Told, TorchClient, Work, mean_loss
from fedivon_flwr.errors import UserError
from fedivon_flwr.meanfield import MeanField
from fedivon_flwr.optim import write
from fedivon_flwr.posterior import DiagGaussian, Layout
from fedivon_flwr.predict import outputs, predict_mc
from fedivon_flwr.records import NDArrays, to_numpy

HEAD, PRECISION, VARIANCE = "head", "precision", "head-variance"


class Plan(Told):
    """What a pFedVEM client is told."""

    lr: float
    momentum: float
    head_lr: float
    head_steps: int = Field(ge=1)
    mc_samples: int = Field(ge=1)
    head_std: float = Field(gt=0)
    head_variance: float = Field(gt=0)


class PFedVEMClient(TorchClient):
    """Sends back base and head, and the head's variance; the Gaussian over its head is remembered."""

    def train(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> tuple[NDArrays, float]:  # noqa: ARG002
        """E-step on the head, local epochs of SGD on the base, M-step on the variance of the prior."""
        plan = Plan.model_validate(config)
        base, head = base_and_head(self.model)
        centre, own = self._heads(head, plan)
        variance = float(self.memory.get(VARIANCE, np.float32(plan.head_variance)))
        prior = DiagGaussian(centre, torch.full_like(centre, 1 / variance))
        self._fit_head(base, head, own, prior, plan)
        write(list(head.parameters()), own.mu.detach())
        loss = self._fit_base(base, head, own, plan, work)
        found = own.detached()
        variance = float(((1 / found.precision).sum() + (found.mean - centre).square().sum()) / found.mean.numel())
        self.told = {VARIANCE: variance}
        self.memory = {
            HEAD: to_numpy(found.mean),
            PRECISION: to_numpy(found.precision),
            VARIANCE: np.array(variance, np.float32),
        }
        return self.weights(), loss

    def personalise(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> DiagGaussian:
        """The Gaussian over the head after one more local update of base and head."""
        self.train(arrays, config, work)
        return DiagGaussian(*(torch.from_numpy(self.memory[key]).to(self.device) for key in (HEAD, PRECISION)))

    def predict(
        self, posterior: DiagGaussian, batches: list[Tensor], samples: int, generator: torch.Generator
    ) -> Tensor:
        """Only the head is uncertain: the features are the same for every draw, and computed once."""
        base, head = base_and_head(self.model)
        return predict_mc(head, Layout.of(head), posterior, outputs(base, batches), samples, generator)

    def _heads(self, head: nn.Module, plan: Plan) -> tuple[Tensor, MeanField]:
        """The server's head, and the client's own as it was left; a new client starts at the server's."""
        centre = torch.cat([p.detach().reshape(-1) for p in head.parameters()])
        mean, precision = centre, torch.full_like(centre, plan.head_std**-2)
        if self.memory:
            mean, precision = (torch.from_numpy(self.memory[key]).to(self.device) for key in (HEAD, PRECISION))
        return centre, MeanField.of(DiagGaussian(mean, precision))

    def _fit_head(self, base: nn.Module, head: nn.Module, own: MeanField, prior: DiagGaussian, plan: Plan) -> None:
        """E-step: full-batch steps on ``E_q[ℓ̄] + KL(q ‖ prior) / N``; the features are computed once."""
        train, rows = self.data.dataset.train, self.data.train
        features = torch.cat(outputs(base, self._batches(train, rows, EVALUATION_BATCH)))
        (labels,) = self._labels(train, rows, len(rows))
        optimizer = torch.optim.Adam(own.leaves, lr=plan.head_lr)
        for _ in range(plan.head_steps):
            optimizer.zero_grad()
            draws = [own.sample() for _ in range(plan.mc_samples)]
            loss = own.gaussian().kl(prior) / len(rows) + expected_loss(head, draws, features, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def _fit_base(self, base: nn.Module, head: nn.Module, own: MeanField, plan: Plan, work: Work) -> float:
        """Local epochs of SGD on ``E_q[ℓ̄]``: the base sees the head with its uncertainty."""
        optimizer = torch.optim.SGD([p for p in base.parameters() if p.requires_grad], plan.lr, plan.momentum)
        losses = []
        for inputs, labels in self.epochs(work):
            optimizer.zero_grad()
            draws = [own.sample().detach() for _ in range(plan.mc_samples)]
            loss = expected_loss(head, draws, base(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append((loss.detach(), len(labels)))
        return mean_loss(losses)


def expected_loss(head: nn.Module, draws: Sequence[Tensor], features: Tensor, labels: Tensor) -> Tensor:
    """The mean loss over draws of the head's weights."""
    layout = Layout.of(head)
    losses = [cross_entropy(functional_call(head, layout.split(draw), (features,)), labels) for draw in draws]
    return torch.stack(losses).mean()


def base_and_head(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A network as features and the last layer."""
    if not (isinstance(model, nn.Sequential) and [name for name, _ in model.named_children()][-1:] == [HEAD]):
        raise UserError("The method pfedvem needs a torch.nn.Sequential as model, with a last part named 'head'.")
    return model[:-1], model[-1]
