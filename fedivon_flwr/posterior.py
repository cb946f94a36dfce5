"""The posterior: a diagonal Gaussian over all trainable weights of a model.

``q = N(m, 1/Λ)`` with precision ``Λ = λ (h + δ)``: ``m`` the mean, ``h`` the diagonal Hessian
of the mean loss, ``λ`` the effective sample size, ``δ`` the weight decay. Everything is held as
flat vectors in model order; `Layout` translates between a vector and named parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a model's trainable parameters, in model order.

    >>> layout = Layout.of(nn.Linear(3, 2))
    >>> layout.names, layout.numel
    (('weight', 'bias'), 8)
    >>> {name: tuple(part.shape) for name, part in layout.split(torch.zeros(8)).items()}
    {'weight': (2, 3), 'bias': (2,)}
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: nn.Module) -> "Layout":
        """The layout of a model; frozen parameters are no part of the posterior."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return cls(tuple(name for name, _ in named), tuple(tuple(p.shape) for _, p in named))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each parameter."""
        return tuple(prod(shape) for shape in self.shapes)

    @property
    def numel(self) -> int:
        """The length of the flat vector."""
        return sum(self.sizes)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a vector `(…, numel)` as named tensors `(…, *shape)`; nothing is copied."""
        parts = torch.split(flat, list(self.sizes), dim=-1)
        return {
            name: part.view(*flat.shape[:-1], *shape)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def flatten(self, named: Mapping[str, Tensor]) -> Tensor:
        """The vector of named tensors, in model order."""
        return torch.cat([named[name].reshape(-1) for name in self.names])


@dataclass(frozen=True)
class DiagGaussian:
    """``N(mean, 1/precision)``, diagonal, as two flat vectors."""

    mean: Tensor
    precision: Tensor

    def __post_init__(self) -> None:
        if self.mean.shape != self.precision.shape or self.mean.ndim != 1:
            raise ValueError("mean and precision must be vectors of the same length")

    @classmethod
    def from_hess(cls, mean: Tensor, hess: Tensor, ess: float, weight_decay: float) -> "DiagGaussian":
        """``Λ = λ (h + δ)``."""
        return cls(mean, ess * (hess + weight_decay))

    @classmethod
    def from_natural(cls, shift: Tensor, precision: Tensor) -> "DiagGaussian":
        """From the natural parameters ``(Λ m, Λ)``."""
        return cls(shift / precision, precision)

    @property
    def natural(self) -> tuple[Tensor, Tensor]:
        """The natural parameters ``(Λ m, Λ)``; a product of Gaussians is their sum."""
        return self.precision * self.mean, self.precision

    @property
    def std(self) -> Tensor:
        """``σ = Λ^(−1/2)``."""
        return self.precision.rsqrt()

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """`count` weight vectors ``m + σ ε``, one a row."""
        noise = torch.randn(
            count, self.mean.numel(), generator=generator, device=self.mean.device, dtype=self.mean.dtype
        )
        return noise.mul_(self.std).add_(self.mean)

    def kl(self, other: "DiagGaussian") -> Tensor:
        """``KL(self ‖ other) = ½ Σ [ Λ₂/Λ₁ − 1 − log(Λ₂/Λ₁) + Λ₂ (m₁ − m₂)² ]``."""
        ratio = other.precision / self.precision
        return 0.5 * (ratio - 1 - ratio.log() + other.precision * (self.mean - other.mean).square()).sum()


def barycentre(first: DiagGaussian, second: DiagGaussian, weight: float, kind: Literal["rkl", "w2"]) -> DiagGaussian:
    """The Gaussian between two, nearest to both by the weights ``1 − w`` and ``w``.

    ``rkl`` by the reverse Kullback-Leibler divergence: natural parameters are averaged. ``w2`` by the Wasserstein-2
    distance: means and standard deviations are averaged.
    """
    if kind == "rkl":
        (one, other), (narrow, wide) = zip(first.natural, second.natural, strict=True)
        return DiagGaussian.from_natural(torch.lerp(one, other, weight), torch.lerp(narrow, wide, weight))
    return DiagGaussian(
        torch.lerp(first.mean, second.mean, weight), torch.lerp(first.std, second.std, weight).square().reciprocal()
    )
