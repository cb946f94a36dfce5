"""FedLaplace, the client half: Adam under the server's Gaussian as prior, and an online Laplace approximation.

Liu et al. (2021), A Bayesian Federated Learning Framework with Online Laplace Approximation.
"""

from collections.abc import Mapping
from typing import Any

import torch

from clients.base import Work
from clients.fedavg import FedAvgClient, Plan
from fedivon_flwr.optim import views
from fedivon_flwr.posterior import DiagGaussian, Layout
from fedivon_flwr.records import HESS, MEAN, NDArrays, flat, unflatten


class LaplacePlan(Plan):
    """What a FedLaplace client is told besides Adam's settings."""

    penalty: float
    test_ess: float
    test_prior: float


class FedLaplaceClient(FedAvgClient):
    """Sends back its weights and, as ``hess/*``, the diagonal Fisher information ``Ω`` that it has added to."""

    first_hess = 0.0

    def train(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> tuple[NDArrays, float]:
        """Minimise ``CE + ζ ½ Σ Ω (θ − μ)²``; each batch adds ``|B|/N_k (∇CE)²`` to ``Ω_k``, which starts at Ω."""
        plan, layout = LaplacePlan.model_validate(config), Layout.of(self.model)
        params = [p for p in self.model.parameters() if p.requires_grad]
        means, received = (views(flat(arrays, prefix).to(self.device), params) for prefix in (MEAN, HESS))
        fisher = [omega.clone() for omega in received]

        @torch.no_grad()
        def amend(size: int) -> None:
            for p, mean, prior, omega in zip(params, means, received, fisher, strict=True):
                if p.grad is None:  # the loss did not depend on it
                    continue
                omega.addcmul_(p.grad, p.grad, value=size / len(self.data.train))
                p.grad.addcmul_(prior, p - mean, value=plan.penalty)

        loss = self.adam(plan, work, amend)
        omega = torch.cat([part.reshape(-1) for part in fisher])
        return self.weights() | unflatten(omega, layout, HESS), loss

    def posterior(self, arrays: NDArrays, config: Mapping[str, Any]) -> DiagGaussian:
        """The server's posterior, on the node's device."""
        plan = LaplacePlan.model_validate(config)
        mean, omega = (flat(arrays, prefix).to(self.device) for prefix in (MEAN, HESS))
        return DiagGaussian(mean, plan.test_ess * omega + plan.test_prior)
