"""pFedBayes, the server half: the mean of the clients' Gaussians in μ and ρ (Zhang et al. 2022)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.nn.functional import softplus

from fedivon_flwr.meanfield import inverse_softplus
from fedivon_flwr.posterior import DiagGaussian
from fedivon_flwr.records import HESS, MEAN, NDArrays, flat, model_arrays, tensor
from fedivon_flwr.settings import MethodOptions
from strategies.aggregation import weighted_mean
from strategies.base import FederatedStrategy, Reply, average, weights, without_width


class Options(MethodOptions):
    """The keys ``pfedbayes.*`` of the run config."""

    lr: float = Field(1e-3, gt=0, description="Adam's learning rate in the first round")
    lr_final: float = Field(1e-3, gt=0, description="Adam's learning rate in the last round; linear in between")
    zeta: float = Field(10.0, ge=0, description="ζ, the strength of the server's Gaussian as prior")
    rho_init: float = Field(-2.5, description="the first standard deviation is log(1 + exp(rho-init))")
    mc_samples: int = Field(1, ge=1, description="weight samples for each training step")
    noise: float = Field(
        1.0,
        gt=0,
        description="factor on the noise of weight samples; 1 is variational inference, the authors' code has 0.001",
    )


class PFedBayes(FederatedStrategy):
    """Averages Gaussians that arrive as means and, as ``hess/*``, precisions."""

    options_type: ClassVar[type[MethodOptions]] = Options
    options: Options
    remembers = True

    def model_arrays(self, model: nn.Module) -> NDArrays:
        """The model's weights with one width for all."""
        return model_arrays(model, float(softplus(torch.tensor(self.options.rho_init)) ** -2))

    def train_config(self, server_round: int) -> dict[str, Any]:
        """The learning rate decays linearly over the rounds."""
        return self.decaying(server_round, "rho_init")

    def refuse(self, arrays: NDArrays) -> str | None:
        """A precision must be positive."""
        return without_width(arrays)

    def combine(self, replies: Sequence[Reply], sent: NDArrays) -> NDArrays:
        """``Σ w μ_k`` and ``Σ w ρ_k``; buffers are averaged."""
        combined, share = average(replies, [key for key in sent if not key.startswith(HESS)]), weights(replies)
        for key in sent:
            if key.startswith(HESS):
                rhos = [inverse_softplus(tensor(reply.arrays[key]).rsqrt()) for reply in replies]
                combined[key] = softplus(weighted_mean(share, rhos)).pow(-2).numpy()
        return {key: combined[key] for key in sent}

    def posterior(self, arrays: NDArrays) -> DiagGaussian:
        """The means, and the widths with the noise's factor."""
        return DiagGaussian(flat(arrays, MEAN), flat(arrays, HESS) / self.options.noise**2)

    def scale(self) -> dict[str, float]:
        """``Λ = λ (h + δ)`` with ``δ = 0``."""
        return {"ess": self.options.noise**-2, "weight_decay": 0.0}
