"""Mean-field variational inference by reparameterisation: a Gaussian whose mean and width are trained by gradients.

``σ = softplus(ρ) = log(1 + e^ρ)``, so that ρ is unbounded (Blundell et al. 2015, Weight uncertainty in neural nets).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fedivon_flwr.posterior import DiagGaussian


def inverse_softplus(sigma: Tensor) -> Tensor:
    """``ρ = log(e^σ − 1)``, without overflow.

    >>> inverse_softplus(softplus(torch.tensor([-2.5, 0.0, 30.0])))
    tensor([-2.5000,  0.0000, 30.0000])
    """
    return sigma + torch.log(-torch.expm1(-sigma))


@dataclass(frozen=True)
class MeanField:
    """``N(μ, softplus(ρ)²)`` with leaves that an optimiser can change."""

    mu: Tensor
    rho: Tensor

    @classmethod
    def of(cls, gaussian: DiagGaussian) -> "MeanField":
        """A Gaussian, to be trained."""
        leaves = gaussian.mean.clone(), inverse_softplus(gaussian.std)
        return cls(*(leaf.requires_grad_() for leaf in leaves))

    @property
    def sigma(self) -> Tensor:
        """``σ = softplus(ρ)``."""
        return softplus(self.rho)

    @property
    def leaves(self) -> list[Tensor]:
        """What an optimiser changes."""
        return [self.mu, self.rho]

    def sample(self, noise: float = 1.0) -> Tensor:
        """``μ + σ ε``, through which gradients flow; `noise` is the standard deviation of ε."""
        return self.mu + noise * self.sigma * torch.randn_like(self.mu)

    def gaussian(self) -> DiagGaussian:
        """As it is now; gradients flow through it."""
        return DiagGaussian(self.mu, self.sigma.square().reciprocal())

    def detached(self) -> DiagGaussian:
        """As it is now, for good."""
        now = self.gaussian()
        return DiagGaussian(now.mean.detach().clone(), now.precision.detach())
