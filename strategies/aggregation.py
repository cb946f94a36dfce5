"""Rules that turn the clients' diagonal Gaussians into one.

A rule is a pure function of a stream of terms, one per client, in units of the wire: mean ``m_k``, Hessian
``h_k``, effective sample size ``λ_k`` and weight ``w_k`` (they add up to 1). The precision of a client is
``Λ_k = λ_k (h_k + δ)`` and its variance ``σ_k² = 1/Λ_k``. A rule reads the stream once, keeps sums only, and
returns mean and Hessian ``h̃ = Λ̃/λ̃ − δ`` where ``λ̃ = Σ w_k λ_k``. To add a rule is to add one function here.

Everything is elementwise, so `aggregate` applies a rule block by block: the sums of one block stay in the
processor's cache, and memory does not grow with the number of clients.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from fedivon_flwr.errors import UserError
from fedivon_flwr.registry import Registry

BLOCK = 1 << 18  # elements; the sums stay in the cache, and a block is worth the calls and both cores
CEILING = 1e9  # of a Hessian: the noise of a posterior this narrow is lost in the rounding of float32 weights
FLOOR = 1e-3  # `dwc` subtracts precisions: the result is at least this part of the clients' mean precision


class Term(NamedTuple):
    """One client's posterior (or a block of it)."""

    weight: float
    mean: Tensor
    hess: Tensor
    ess: float


@dataclass(frozen=True)
class Shared:
    """What all terms of a round have in common."""

    weight_decay: float
    ess: float  # λ̃, of the outcome
    count: int  # K, the number of terms
    prior: Term | None = None  # what the server had sent out


Rule = Callable[[Iterable[Term], Shared], tuple[Tensor, Tensor]]
RULES: Registry[Rule] = Registry("aggregation rule")


def precision(term: Term, shared: Shared) -> Tensor:
    """``Λ_k = λ_k (h_k + δ)``."""
    return (term.hess + shared.weight_decay).mul_(term.ess)


def variance(term: Term, shared: Shared) -> Tensor:
    """``σ_k² = 1/Λ_k``."""
    return precision(term, shared).reciprocal_()


def to_hess(total: Tensor, shared: Shared) -> Tensor:
    """``h̃ = Λ̃/λ̃ − δ``, bounded: a rule that counts what the clients share once for each of them grows every round."""
    return total.div_(shared.ess).sub_(shared.weight_decay).clamp_(max=CEILING)


def product(terms: Iterable[Term], shared: Shared, weight: Callable[[Term], float]) -> tuple[Tensor, Tensor]:
    """``Λ = Σ a_k Λ_k`` and ``m = Σ a_k Λ_k m_k / Λ`` with any weights ``a``: the mean, and ``Λ``."""
    terms, (total, shift, grown) = with_zeros(terms, 3)
    for term in terms:
        # Three passes, no new memory: the scalars go into the sums.
        scale = weight(term) * term.ess
        torch.add(term.hess, shared.weight_decay, out=grown)
        shift.addcmul_(grown, term.mean, value=scale)
        total.add_(grown, alpha=scale)
    return shift.div_(total), total


def mean_and_sum(terms: Iterable[Term], part: Callable[[Term], Tensor]) -> tuple[Tensor, Tensor]:
    """``Σ w_k m_k`` and the sum of `part` over the terms."""
    terms, (mean, total) = with_zeros(terms, 2)
    for term in terms:
        mean.add_(term.mean, alpha=term.weight)
        total.add_(part(term))
    return mean, total


def with_zeros(terms: Iterable[Term], count: int) -> tuple[Iterable[Term], list[Tensor]]:
    """The terms again, and vectors of zeros like their means."""
    rest = iter(terms)
    first = next(rest)
    return chain([first], rest), [torch.zeros_like(first.mean) for _ in range(count)]


@RULES.add("rkl")
def rkl(terms: Iterable[Term], shared: Shared) -> tuple[Tensor, Tensor]:
    """Product of Gaussians, the reverse-KL barycentre: ``Λ̃ = Σ w Λ_k``, ``m̃ = Σ w Λ_k m_k / Λ̃``."""
    mean, total = product(terms, shared, lambda term: term.weight)
    return mean, to_hess(total, shared)


@RULES.add("hessian")
def hessian(terms: Iterable[Term], shared: Shared) -> tuple[Tensor, Tensor]:
    """The paper's Algorithm 1 to the letter: ``h̃ = Σ w h_k``, ``m̃ = Σ w h_k m_k / h̃``; refuses ``h̃ ≤ 0``."""
    bare = Shared(weight_decay=0.0, ess=1.0, count=shared.count)
    mean, total = product((term._replace(ess=1.0) for term in terms), bare, lambda term: term.weight)
    if not bool((total > 0).all()):
        raise UserError("The rule 'hessian' met a weighted sum of Hessians that is not positive; use the rule 'rkl'.")
    return mean, total


@RULES.add("nwa")
def nwa(terms: Iterable[Term], shared: Shared) -> tuple[Tensor, Tensor]:
    """Naive weighted average: ``m̃ = Σ w m_k``, ``σ̃² = Σ w σ_k²``."""
    mean, total = mean_and_sum(terms, lambda term: variance(term, shared).mul_(term.weight))
    return mean, to_hess(total.reciprocal_(), shared)


@RULES.add("ws")
def ws(terms: Iterable[Term], shared: Shared) -> tuple[Tensor, Tensor]:
    """Sum of independent normals: ``m̃ = Σ w m_k``, ``σ̃² = Σ w² σ_k²``."""
    mean, total = mean_and_sum(terms, lambda term: variance(term, shared).mul_(term.weight**2))
    return mean, to_hess(total.reciprocal_(), shared)


@RULES.add("lp")
def lp(terms: Iterable[Term], shared: Shared) -> tuple[Tensor, Tensor]:
    """Linear pool, moment-matched, the forward-KL barycentre: ``σ̃² = Σ w (σ_k² + (m_k − m̃)²)``.

    The spread of the means is summed by West's update (1979), since ``Σ w m² − m̃²`` loses all digits.
    """
    terms, (mean, total) = with_zeros(terms, 2)
    weights = 0.0
    for term in terms:
        weights += term.weight
        gap = term.mean - mean
        mean.add_(gap, alpha=term.weight / weights)
        total.add_(variance(term, shared).addcmul_(gap, term.mean - mean), alpha=term.weight)
    return mean, to_hess(total.reciprocal_(), shared)


@RULES.add("conflation")
def conflation(terms: Iterable[Term], shared: Shared) -> tuple[Tensor, Tensor]:
    """Unweighted product: ``Λ̃ = Σ Λ_k``, ``m̃ = Σ Λ_k m_k / Λ̃``."""
    mean, total = product(terms, shared, lambda _: 1.0)
    return mean, to_hess(total, shared)


@RULES.add("wc")
def wc(terms: Iterable[Term], shared: Shared) -> tuple[Tensor, Tensor]:
    """Weighted conflation: the mean of `rkl`, ``σ̃² = max(w) / Σ w Λ_k``."""
    largest = 0.0

    def weight(term: Term) -> float:
        nonlocal largest
        largest = max(largest, term.weight)
        return term.weight

    mean, total = product(terms, shared, weight)
    return mean, to_hess(total.div_(largest), shared)


@RULES.add("w2")
def w2(terms: Iterable[Term], shared: Shared) -> tuple[Tensor, Tensor]:
    """Wasserstein-2 barycentre: ``m̃ = Σ w m_k``, ``σ̃ = Σ w σ_k``."""
    mean, total = mean_and_sum(terms, lambda term: precision(term, shared).rsqrt_().mul_(term.weight))
    return mean, to_hess(total.square_().reciprocal_(), shared)


@RULES.add("dwc")
def dwc(terms: Iterable[Term], shared: Shared) -> tuple[Tensor, Tensor]:
    """Conflation with the shared prior divided out: ``Λ̃ = Σ Λ_k − (K−1) Λ0``, ``m̃ = (Σ Λ_k m_k − (K−1) Λ0 m0)/Λ̃``.

    Where the difference is not safely positive (below `FLOOR` of the clients' mean precision) the prior cannot be
    divided out, and the conflation's mean is kept with the floor as precision. Float64: it is a difference.
    """
    if shared.prior is None:
        raise ValueError("the rule 'dwc' needs the posterior that the clients started from")
    mean, total = product((_double(term) for term in terms), shared, lambda _: 1.0)
    prior = _double(shared.prior)
    extra = precision(prior, shared).mul_(shared.count - 1)
    left, floor = total - extra, FLOOR / shared.count * total
    divided = (total * mean - extra * prior.mean) / left
    safe = left > floor
    return torch.where(safe, divided, mean).float(), to_hess(torch.where(safe, left, floor), shared).float()


def _double(term: Term) -> Term:
    return term._replace(mean=term.mean.double(), hess=term.hess.double())


def aggregate(rule: Rule, terms: Sequence[Term], shared: Shared) -> tuple[Tensor, Tensor]:
    """Apply a rule to whole parameters (tensors of any one shape), block by block."""
    shape = terms[0].mean.shape
    mean, hess = torch.empty(shape), torch.empty(shape)
    for block in blocks(mean.numel()):
        prior = _cut(shared.prior, block) if shared.prior else None
        part = rule((_cut(term, block) for term in terms), replace(shared, prior=prior))
        mean.view(-1)[block], hess.view(-1)[block] = part
    return mean, hess


def blocks(numel: int) -> Iterator[slice]:
    """Slices that cover a vector."""
    return (slice(start, min(start + BLOCK, numel)) for start in range(0, numel, BLOCK))


def _cut(term: Term, block: slice) -> Term:
    return Term(term.weight, term.mean.reshape(-1)[block], term.hess.reshape(-1)[block], term.ess)


def weighted_mean(weights: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    """``Σ w_k x_k`` of floating-point tensors; of integer ones (counters) the largest."""
    if not tensors[0].is_floating_point():
        return torch.stack(list(tensors)).amax(0)
    total = torch.zeros_like(tensors[0])
    for weight, tensor in zip(weights, tensors, strict=True):
        total.add_(tensor, alpha=weight)
    return total
