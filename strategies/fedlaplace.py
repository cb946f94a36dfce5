"""FedLaplace, the server half: clients' Laplace approximations become one Gaussian, the prior of the next round.

Liu et al. (2021), A Bayesian Federated Learning Framework with Online Laplace Approximation.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import nn

from fedivon_flwr.posterior import DiagGaussian
from fedivon_flwr.records import HESS, MEAN, NDArrays, flat, model_arrays, tensor
from fedivon_flwr.settings import MethodOptions
from strategies import fedavg
from strategies.base import Reply, average, weights


class Options(fedavg.Options):
    """The keys ``fedlaplace.*`` of the run config: Adam's, and those of the Gaussian."""

    penalty: float = Field(1.0, ge=0, description="ζ, the strength of the server's Gaussian as prior in training")
    test_ess: float = Field(100.0, gt=0, description="λ: the precision in prediction is λ Ω + test-prior")
    test_prior: float = Field(1000.0, gt=0, description="precision of the posterior where Ω is 0")


class FedLaplace(fedavg.FedAvg):
    """Averages weights by the clients' Fisher information, which travels as ``hess/*``."""

    options_type: ClassVar[type[MethodOptions]] = Options
    options: Options

    def model_arrays(self, model: nn.Module) -> NDArrays:
        """The model's weights, and ``Ω = 0``: no prior in the first round."""
        return model_arrays(model, 0.0)

    def refuse(self, arrays: NDArrays) -> str | None:
        """Squared gradients are not negative."""
        for key, array in arrays.items():
            if key.startswith(HESS) and array.size and array.min() < 0:
                return f"{key} has a negative value"
        return None

    def combine(self, replies: Sequence[Reply], sent: NDArrays) -> NDArrays:
        """``Ω = Σ w Ω_k`` and ``μ = Σ w Ω_k θ_k / Ω``; the plain mean where Ω is 0; buffers are averaged."""
        combined, share = average(replies, list(sent)), weights(replies)
        for key in sent:
            if key.startswith(MEAN):
                twin = HESS + key.removeprefix(MEAN)
                # float64: products of small squared gradients would leave the range of float32
                total = torch.zeros(sent[key].shape, dtype=torch.float64)
                pulled = torch.zeros_like(total)
                for weight, reply in zip(share, replies, strict=True):
                    omega = tensor(reply.arrays[twin]).double()
                    total.add_(omega, alpha=weight)
                    pulled.addcmul_(omega, tensor(reply.arrays[key]).double(), value=weight)
                plain = tensor(combined[key])
                combined[key] = torch.where(total > 0, pulled / total, plain).to(plain.dtype).numpy()
        return combined

    def predictive(self, arrays: NDArrays) -> DiagGaussian:
        """``N(μ, 1/(λ Ω + prior precision))``; training does without a width, so there is no `posterior` on the way."""
        return DiagGaussian(flat(arrays, MEAN), self.options.test_ess * flat(arrays, HESS) + self.options.test_prior)

    def scale(self) -> dict[str, float]:
        """``λ`` and ``δ``, as for a posterior of FedIvon: ``λ Ω + prior = λ (Ω + δ)``."""
        return {"ess": self.options.test_ess, "weight_decay": self.options.test_prior / self.options.test_ess}
