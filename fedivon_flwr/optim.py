"""IVON with any diagonal Gaussian prior, built on `ivon-opt` (Shen et al. 2024, arXiv:2402.17641).

Objective: ``E_q[ℓ̄(θ)] + (β/λ) KL(q ‖ p)`` with the prior ``p = N(m0, 1/Λ0)``. With ``λ' = λ/β`` and
``s = Λ0/λ'`` one step is

    σ² = 1 / (λ' (h + s))          θ = m + σ ε
    ĝ  = ∇ℓ̄(θ)                     ĥ = ĝ (θ − m) / σ²
    g  ← β1 g + (1−β1) ĝ
    h  ← β2 h + (1−β2) ĥ + ½ (1−β2)² (h − ĥ)² / (h + s)
    m  ← m − α (g / (1−β1^t) + s (m − m0)) / (h + s)

`ivon-opt` is the case ``m0 = 0, s = δ, β = 1``, and for it this optimiser gives the same bits.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from ivon import IVON
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

# β below and from which on it counts as 0 and as ∞. As β falls, the last term of h grows like 1/β while α falls like β:
# below the former the mean would stay at the prior instead of going to the maximum likelihood. float32 ends at 3e38.
SMALLEST, LARGEST = 1e-3, 1e30


class IvonSettings(BaseModel):
    """What one local update with IVON needs to know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float = Field(0.1, gt=0, description="learning rate of this round")
    ess: float = Field(5000.0, gt=0, description="effective sample size λ")
    hess_init: float = Field(1.0, gt=0, description="h0: scales the learning rate, and the first round's Hessian")
    weight_decay: float = Field(2e-4, ge=0, description="δ: precision of the zero-mean prior divided by λ")
    beta1: float = Field(0.9, ge=0, lt=1, description="momentum of the gradient")
    beta2: float = Field(0.99999, ge=0, lt=1, description="momentum of the Hessian")
    mc_samples: int = Field(1, ge=1, description="weight samples for each step")
    clip_radius: float = Field(math.inf, gt=0, description="bound of each coordinate of a Newton step")


class Ivon(IVON):  # type: ignore[misc]  # ivon-opt has no types
    """IVON under the prior ``N(m0, 1/Λ0)``; without `use_prior`, `ivon-opt`'s zero-mean one.

    Beyond `ivon-opt`: frozen parameters are left alone; a parameter that got no gradient counts as one
    with gradient zero (the loss did not depend on it); an exception inside `sampled_params` leaves the
    mean in place; weights keep their own storage and memory format; `current_step` is in the state.
    """

    def __init__(
        self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], settings: IvonSettings | None = None
    ) -> None:
        super().__init__(trainable(params), **(settings or IvonSettings()).model_dump())
        self._shift: list[Tensor | None] = [None] * len(self.param_groups)  # m0; None is zero
        self._base: list[Tensor | None] = [None] * len(self.param_groups)  # h0, the Hessian of a prior that was given
        self._pull: list[float | Tensor] = [group["weight_decay"] for group in self.param_groups]  # s
        self._temperature = 1.0  # β
        self._precision = [group["hess"] + pull for group, pull in zip(self.param_groups, self._pull, strict=True)]

    @property
    def current_step(self) -> int:
        """Steps taken, kept where `state_dict` sees it."""
        return int(self.state["current_step"])

    @current_step.setter
    def current_step(self, value: int) -> None:
        self.state["current_step"] = value

    def start_at(self, hess: Tensor) -> None:
        """Continue from a Hessian (one flat vector in the optimiser's order); the means are the weights."""
        for group, part in zip(self.param_groups, self._per_group(hess), strict=True):
            group["hess"] = part.to(self._device, self._dtype, copy=True)
        self._new_precision()

    def use_prior(self, mean: Tensor, hess: Tensor, temperature: float = 1.0) -> None:
        """Take ``N(m0, 1/(λ (h0 + δ)))`` as prior with strength β, and start at it.

        ``s = β (h0 + δ)`` and ``h`` starts at 0: it holds only what this data adds. ``β = 0`` is maximum
        likelihood (no prior, no noise, preconditioned by ``h0 + δ``); ``β = ∞`` keeps the prior as it is.
        """
        if not temperature >= 0:  # NaN neither
            raise ValueError(f"temperature must not be negative, but is {temperature}")
        self._temperature = to_its_end(temperature)
        means, hessians = self._per_group(mean), self._per_group(hess)
        for i, group in enumerate(self.param_groups):
            shift = self._shift[i] = means[i].to(self._device, self._dtype, copy=True)
            base = self._base[i] = hessians[i].to(self._device, self._dtype, copy=True)
            precision = base + group["weight_decay"]
            # At β = 0 and β = ∞ the formulas are taken to their limits, which use `precision` itself.
            self._pull[i] = precision * temperature if self._proper else precision
            group["hess"] = torch.zeros_like(precision)
            write(group["params"], shift)
        self._new_precision()

    def hess(self) -> Tensor:
        """What goes on the wire, ``Λ/λ − δ``: ``h`` itself, or ``h0 + h/β`` under a prior given by `use_prior`."""
        parts = []
        for group, base in zip(self.param_groups, self._base, strict=True):
            if base is None:
                parts.append(group["hess"])
            else:
                parts.append(base + group["hess"] / self._temperature if self._proper else base)
        return torch.cat(parts)

    def mean(self) -> Tensor:
        """The weights as one flat vector."""
        return torch.cat([p.detach().reshape(-1) for group in self.param_groups for p in group["params"]])

    @contextmanager
    def sampled_params(self, train: bool = False) -> Iterator[None]:
        """Put ``θ ~ q`` into the weights; with `train`, collect the gradient when the block ends."""
        params = [p for group in self.param_groups for p in group["params"]]
        means = [p.data for p in params]
        noise = self._noise()
        samples = torch._foreach_add(means, views(noise, params))  # one call for all: small tensors cost calls
        for p, sample in zip(params, samples, strict=True):
            p.data = sample
        try:
            yield
        finally:
            for p, mean in zip(params, means, strict=True):
                p.data = mean
        if train:
            self._collect(params, noise)

    @property
    def _proper(self) -> bool:
        """Whether β is none of the ends 0 and ∞, where ``h`` has no part."""
        return 0 < self._temperature < math.inf

    def _new_precision(self) -> None:
        """Keep ``h + s``, which sampling and both updates use."""
        for group, pull, precision in zip(self.param_groups, self._pull, self._precision, strict=True):
            torch.add(group["hess"], pull, out=precision)

    def _noise(self) -> Tensor:
        """``σ ε``, for all groups in one vector."""
        parts = []
        for group, precision in zip(self.param_groups, self._precision, strict=True):
            if self._temperature == 0:
                parts.append(torch.zeros_like(precision))
                continue
            noise = torch.randn(group["numel"], device=self._device, dtype=self._dtype)
            ess = group["ess"] / self._temperature if self._proper else group["ess"]
            parts.append(noise.div_(precision.mul(ess).sqrt_()))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _collect(self, params: list[nn.Parameter], noise: Tensor) -> None:
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in params]
        grad = torch.cat([g.reshape(-1) for g in grads])
        count = self.state["count"] = self.state["count"] + 1
        for key, value in (("avg_grad", grad), ("avg_nxg", noise.mul_(grad))):
            old = self.state[key]
            self.state[key] = value if old is None else old.add_(value.sub_(old).div_(count))

    def _update(self) -> None:
        if self.state["avg_grad"] is None:
            raise RuntimeError("step() needs a gradient: run backward() inside sampled_params(train=True) first")
        self.current_step += 1
        offset = 0
        for i, group in enumerate(self.param_groups):
            part = slice(offset, offset + group["numel"])
            offset += group["numel"]
            grad, scratch = self.state["avg_grad"][part], self.state["avg_nxg"][part]
            group["momentum"].mul_(group["beta1"]).add_(grad.mul_(1 - group["beta1"]))
            if self._proper:
                ess, precision = group["ess"] / self._temperature, self._precision[i]
                update_hess(group["hess"], scratch, precision, ess, group["beta2"])
                torch.add(group["hess"], self._pull[i], out=precision)
            torch.div(group["momentum"], 1.0 - math.pow(group["beta1"], float(self.current_step)), out=grad)
            write(group["params"], self._new_mean(i, grad, scratch))

    def _new_mean(self, i: int, gradient: Tensor, scratch: Tensor) -> Tensor:
        """The mean after a step along a gradient; both arguments are used up."""
        group, shift, pull, precision = self.param_groups[i], self._shift[i], self._pull[i], self._precision[i]
        mean = torch.cat([p.detach().reshape(-1) for p in group["params"]])
        radius, rate = group["clip_radius"], group["lr"] * (group["hess_init"] + group["weight_decay"])
        if shift is None:
            torch.mul(mean, pull, out=scratch)
            return mean.sub_(clip(gradient.add_(scratch).div_(precision), radius).mul_(rate))
        if self._temperature == math.inf:
            return shift
        step = clip(gradient.div_(precision), radius)
        if self._temperature == 0:
            return mean.sub_(step.mul_(rate))
        # The prior's pull is taken implicitly (a proximal step): stable for every β, with the same fixed point.
        rate *= self._temperature
        shrink = torch.div(pull, precision, out=scratch).mul_(rate).add_(1.0)
        return mean.sub_(shift).sub_(step.mul_(rate)).div_(shrink).add_(shift)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state; a prior given by `use_prior` is not part of it."""
        super().load_state_dict(state_dict)
        self._new_precision()

    def _per_group(self, flat: Tensor) -> list[Tensor]:
        if flat.numel() != self._numel:
            raise ValueError(f"expected a vector of {self._numel} values, but got {flat.numel()}")
        return list(torch.split(flat, [group["numel"] for group in self.param_groups]))


def update_hess(hess: Tensor, noise_times_grad: Tensor, precision: Tensor, ess: float, beta2: float) -> None:
    """In place ``h ← β2 h + (1−β2) ĥ + ½ (1−β2)² (h − ĥ)² / (h + s)``, ``ĥ = ĝ (θ−m) λ' (h+s)``.

    The order of the operations is `ivon-opt`'s, so that the roundings are too.
    """
    estimate = noise_times_grad.mul_(precision).mul_(ess)
    correction = (hess - estimate).square_().mul_(0.5 * (1 - beta2) ** 2).div_(precision)
    hess.mul_(beta2).add_(estimate.mul_(1.0 - beta2)).add_(correction)


def to_its_end(temperature: float) -> float:
    """β, or the end that it counts as.

    >>> [to_its_end(temperature) for temperature in (0.0, 1e-6, 1e-3, 10.0, 1e30)]
    [0.0, 0.0, 0.001, 10.0, inf]
    """
    if temperature < SMALLEST:
        return 0.0
    return temperature if temperature < LARGEST else math.inf


def clip(step: Tensor, radius: float) -> Tensor:
    """Bound each coordinate, in place; an infinite radius costs nothing."""
    return step if radius == math.inf else step.clamp_(-radius, radius)


def trainable(params: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups without their frozen parameters."""
    given: list[Any] = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    kept = []
    for group in groups:
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        kept.append({**group, "params": [p for p in members if p.requires_grad]})
    return kept


def write(params: list[nn.Parameter], flat: Tensor) -> None:
    """Copy a flat vector into parameters, which keep their storage."""
    torch._foreach_copy_([p.data for p in params], views(flat, params))


def views(flat: Tensor, params: list[nn.Parameter]) -> list[Tensor]:
    """A flat vector as tensors of the parameters' shapes."""
    parts = torch.split(flat, [p.numel() for p in params])
    return [part.view(p.shape) for part, p in zip(parts, params, strict=True)]
