"""Every aggregation rule against its formula in float64, and what must hold between rules."""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedivon_flwr.errors import UserError
from strategies.aggregation import BLOCK, CEILING, RULES, Shared, Term, aggregate, weighted_mean

Vector = NDArray[np.float64]
Gaussian = tuple[Vector, Vector]  # mean and precision

# The formulas, of weights w (K,), means m (K, n), precisions p (K, n) and the prior (m0, p0): mean and precision.


def _rkl(w: Vector, m: Vector, p: Vector, prior: Gaussian) -> Gaussian:
    return (w * p * m).sum(0) / (w * p).sum(0), (w * p).sum(0)


def _lp(w: Vector, m: Vector, p: Vector, prior: Gaussian) -> Gaussian:
    mean = (w * m).sum(0)
    return mean, 1 / (w * (1 / p + (m - mean) ** 2)).sum(0)


def _dwc(w: Vector, m: Vector, p: Vector, prior: Gaussian) -> Gaussian:
    others = len(w) - 1
    total = p.sum(0) - others * prior[1]
    return ((p * m).sum(0) - others * prior[1] * prior[0]) / total, total


FORMULAS: dict[str, Callable[[Vector, Vector, Vector, Gaussian], Gaussian]] = {
    "rkl": _rkl,
    "nwa": lambda w, m, p, _: ((w * m).sum(0), 1 / (w / p).sum(0)),
    "ws": lambda w, m, p, _: ((w * m).sum(0), 1 / (w**2 / p).sum(0)),
    "lp": _lp,
    "conflation": lambda w, m, p, _: ((p * m).sum(0) / p.sum(0), p.sum(0)),
    "wc": lambda w, m, p, prior: (_rkl(w, m, p, prior)[0], (w * p).sum(0) / w.max()),
    "w2": lambda w, m, p, _: ((w * m).sum(0), 1 / (w / np.sqrt(p)).sum(0) ** 2),
    "dwc": _dwc,
}
DECAY = 0.05


def draw(seed: int, clients: int, size: int) -> tuple[list[Term], Shared]:
    """Posteriors of clients with different weights and sample sizes; each is surer than the prior."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(clients))
    sizes = rng.uniform(50, 500, clients)
    prior = Term(1.0, tensor(rng.normal(size=size)), tensor(rng.uniform(-0.5 * DECAY, 0.2, size)), 40.0)
    terms = [
        Term(float(w), tensor(rng.normal(size=size)), tensor(np.exp(rng.uniform(-1.5, 2, size))), float(ess))
        for w, ess in zip(weights, sizes, strict=True)
    ]
    return terms, Shared(DECAY, float(weights @ sizes), clients, prior)


def tensor(array: Vector) -> torch.Tensor:
    return torch.from_numpy(array).float()


def exact(name: str, terms: Sequence[Term], shared: Shared) -> Gaussian:
    """Mean and Hessian by the formula, in float64."""

    def precision(term: Term) -> Vector:
        return np.asarray(term.ess * (term.hess.double().numpy() + shared.weight_decay))

    weights = np.array([[term.weight] for term in terms])
    means = np.stack([term.mean.double().numpy() for term in terms])
    if name == "hessian":
        hessians = np.stack([term.hess.double().numpy() for term in terms])
        total: Vector = (weights * hessians).sum(0)
        return (weights * hessians * means).sum(0) / total, total
    assert shared.prior is not None
    prior = shared.prior.mean.double().numpy(), precision(shared.prior)
    mean, total = FORMULAS[name](weights, means, np.stack([precision(term) for term in terms]), prior)
    return mean, total / shared.ess - shared.weight_decay


def assert_close(got: tuple[torch.Tensor, torch.Tensor], expected: Gaussian) -> None:
    for tensor_, array in zip(got, expected, strict=True):
        assert tensor_.dtype == torch.float32
        np.testing.assert_allclose(tensor_.numpy(), array, rtol=2e-5, atol=2e-5)


def test_every_rule_is_in_the_table() -> None:
    assert set(RULES) == {*FORMULAS, "hessian"}


@pytest.mark.parametrize("clients", [1, 2, 7])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_its_formula(name: str, clients: int) -> None:
    terms, shared = draw(0, clients, 300)
    assert_close(aggregate(RULES[name], terms, shared), exact(name, terms, shared))


@pytest.mark.parametrize("name", RULES)
@given(seed=st.integers(0, 2**32 - 1), clients=st.integers(1, 12), size=st.integers(1, 6))
def test_a_rule_is_its_formula_for_any_input(name: str, seed: int, clients: int, size: int) -> None:
    terms, shared = draw(seed, clients, size)
    assert_close(aggregate(RULES[name], terms, shared), exact(name, terms, shared))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_can_go_on_for_many_rounds(name: str) -> None:
    """Also those that count what the clients share once for each of them: they narrow the posterior to the bound."""
    rng, clients = np.random.default_rng(0), 10
    mean, hess = torch.zeros(50), torch.ones(50)
    for _ in range(60):
        terms = [
            Term(1 / clients, mean + tensor(rng.normal(0, 0.01, 50)), hess * 1.001, 1000.0) for _ in range(clients)
        ]
        shared = Shared(2e-4, 1000.0, clients, Term(1.0, mean, hess, 1000.0))
        mean, hess = aggregate(RULES[name], terms, shared)
    assert mean.isfinite().all()
    assert (hess + 2e-4 > 0).all()
    assert (hess <= CEILING).all()
    assert bool((hess == CEILING).all()) == (name in ("ws", "conflation", "wc"))


@pytest.mark.parametrize("name", sorted(set(RULES) - {"hessian"}))
def test_a_negative_hessian_is_fine_while_the_precision_is_positive(name: str) -> None:
    terms, shared = draw(1, 3, 50)
    terms = [term._replace(hess=torch.full_like(term.hess, -0.5 * DECAY)) for term in terms]
    mean, hess = aggregate(RULES[name], terms, shared)
    assert bool((hess + DECAY > 0).all())
    if name != "dwc":  # whose prior is surer than these clients
        assert_close((mean, hess), exact(name, terms, shared))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_reads_a_stream_once(name: str) -> None:
    terms, shared = draw(2, 4, 10)
    read = 0

    def stream() -> Iterator[Term]:
        nonlocal read
        for term in terms:
            read += 1
            yield term

    mean, hess = RULES[name](stream(), shared)
    assert read == 4
    assert_close((mean, hess), exact(name, terms, shared))


@pytest.mark.parametrize("name", RULES)
def test_blocks_do_not_show(name: str) -> None:
    terms, shared = draw(3, 3, 2 * BLOCK + 17)
    whole = RULES[name](iter(terms), shared)
    for got, expected in zip(aggregate(RULES[name], terms, shared), whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    assert_close(aggregate(RULES[name], terms, shared), exact(name, terms, shared))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 5)])
def test_shapes_are_kept(name: str, shape: tuple[int, ...]) -> None:
    terms, shared = draw(4, 3, math.prod(shape))
    assert shared.prior is not None
    shaped = [term._replace(mean=term.mean.view(shape), hess=term.hess.view(shape)) for term in terms]
    prior = shared.prior._replace(mean=shared.prior.mean.view(shape), hess=shared.prior.hess.view(shape))
    mean, hess = aggregate(RULES[name], shaped, Shared(shared.weight_decay, shared.ess, shared.count, prior))
    assert mean.shape == hess.shape == torch.Size(shape)
    assert_close((mean.reshape(-1), hess.reshape(-1)), exact(name, terms, shared))


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_inputs_are_left_alone_and_not_part_of_the_outcome(name: str, clients: int) -> None:
    terms, shared = draw(5, clients, 20)
    assert shared.prior is not None
    everything = [*terms, shared.prior]
    before = [(term.mean.clone(), term.hess.clone()) for term in everything]
    for mean, hess in (aggregate(RULES[name], terms, shared), RULES[name](iter(terms), shared)):
        mean.fill_(9)
        hess.fill_(9)
    for term, (mean, hess) in zip(everything, before, strict=True):
        assert torch.equal(term.mean, mean)
        assert torch.equal(term.hess, hess)


@pytest.mark.parametrize("name", RULES)
def test_one_client_keeps_its_posterior(name: str) -> None:
    terms, shared = draw(6, 1, 40)
    mean, hess = aggregate(RULES[name], terms, shared)
    torch.testing.assert_close(mean, terms[0].mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(hess, terms[0].hess, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(set(RULES) - {"ws", "conflation", "wc", "dwc"}))
def test_equal_clients_agree_on_their_posterior(name: str) -> None:
    terms, _ = draw(7, 4, 40)
    equal = [terms[0]._replace(weight=term.weight) for term in terms]
    mean, hess = aggregate(RULES[name], equal, Shared(DECAY, terms[0].ess, 4))
    torch.testing.assert_close(mean, terms[0].mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hess, terms[0].hess, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_the_order_of_the_clients_does_not_matter(name: str) -> None:
    terms, shared = draw(8, 6, 30)
    forth, back = (aggregate(RULES[name], order, shared) for order in (terms, terms[::-1]))
    for a, b in zip(forth, back, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_a_hundred_clients_lose_no_digits(name: str) -> None:
    terms, shared = draw(9, 100, 50)
    assert shared.prior is not None
    shifted = [term._replace(mean=term.mean + 100) for term in terms]
    far = Shared(DECAY, shared.ess, 100, shared.prior._replace(mean=shared.prior.mean + 100))
    mean, hess = aggregate(RULES[name], shifted, far)
    expected = exact(name, shifted, far)
    np.testing.assert_allclose(mean.numpy(), expected[0], rtol=1e-6)
    np.testing.assert_allclose(hess.numpy(), expected[1], rtol=1e-5, atol=1e-5)


# What single rules refuse, and what they are for


@pytest.mark.parametrize("bad", [-1.0, 0.0, -0.01])
def test_hessian_refuses_a_sum_that_is_not_positive(bad: float) -> None:
    terms, shared = draw(10, 2, 5)
    terms = [term._replace(hess=term.hess.index_fill(0, torch.tensor([3]), bad)) for term in terms]
    with pytest.raises(UserError, match="rkl"):
        aggregate(RULES["hessian"], terms, shared)


def test_dwc_needs_the_prior() -> None:
    terms, shared = draw(11, 2, 5)
    with pytest.raises(ValueError, match="dwc"):
        aggregate(RULES["dwc"], terms, Shared(DECAY, shared.ess, 2))


def local_posteriors(prior_precision: float, clients: int = 5) -> tuple[list[Term], Term, Gaussian]:
    """Linear models with Gaussian noise under one prior: every client's posterior, the prior, and that of all data."""
    rng = np.random.default_rng(12)
    curvature, best = rng.uniform(1, 20, (clients, 30)), rng.normal(size=(clients, 30))
    m0 = rng.normal(size=30)
    p0 = np.full(30, prior_precision)
    ess, terms = 10.0, []
    for a, b in zip(curvature, best, strict=True):
        p = a + p0
        mean = (a * b + p0 * m0) / p
        terms.append(Term(1 / clients, tensor(mean), tensor(p / ess - DECAY), ess))
    total = curvature.sum(0) + p0
    central = ((curvature * best).sum(0) + p0 * m0) / total, total / ess - DECAY
    return terms, Term(1.0, tensor(m0), tensor(p0 / ess - DECAY), ess), central


@pytest.mark.parametrize("prior_precision", [0.5, 3.0, 100.0])
def test_dwc_gives_the_posterior_of_all_data_together(prior_precision: float) -> None:
    terms, prior, central = local_posteriors(prior_precision)
    mean, hess = aggregate(RULES["dwc"], terms, Shared(DECAY, 10.0, len(terms), prior))
    np.testing.assert_allclose(mean.numpy(), central[0], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(hess.numpy(), central[1], rtol=1e-4)


def test_conflation_gives_it_under_a_flat_prior_and_counts_any_other_twice() -> None:
    terms, prior, central = local_posteriors(0.0)
    mean, hess = aggregate(RULES["conflation"], terms, Shared(DECAY, 10.0, len(terms), prior))
    np.testing.assert_allclose(mean.numpy(), central[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(hess.numpy(), central[1], rtol=1e-5)
    terms, prior, central = local_posteriors(3.0)
    _, hess = aggregate(RULES["conflation"], terms, Shared(DECAY, 10.0, len(terms), prior))
    np.testing.assert_allclose(hess.numpy() - central[1], 4 * 3.0 / 10.0, rtol=1e-4)


@pytest.mark.parametrize("surer", [1.1, 3.0, 1000.0])
def test_dwc_stays_proper_where_the_prior_is_surer_than_the_clients(surer: float) -> None:
    terms, shared = draw(13, 4, 20)
    assert shared.prior is not None
    total = sum((term.ess * (term.hess + DECAY) for term in terms), torch.zeros(20))
    prior = shared.prior._replace(hess=surer * total / 3 / shared.prior.ess - DECAY)
    mean, hess = aggregate(RULES["dwc"], terms, Shared(DECAY, shared.ess, 4, prior))
    assert bool((hess + DECAY > 0).all())
    means = torch.stack([term.mean for term in terms])
    assert bool(((mean >= means.amin(0) - 1e-5) & (mean <= means.amax(0) + 1e-5)).all())
    assert bool((shared.ess * (hess + DECAY) < total).all())


def test_lp_keeps_the_spread_of_means_far_from_zero() -> None:
    """``Σ w m² − m̃²`` would give noise of the size of 1e8 · 1e-7 here."""
    means = [1e4 - 0.5, 1e4 + 0.5]
    terms = [Term(0.5, torch.full((3,), m), torch.full((3,), 1e6), 1.0) for m in means]
    mean, hess = aggregate(RULES["lp"], terms, Shared(0.0, 1.0, 2))
    torch.testing.assert_close(mean, torch.full((3,), 1e4))
    torch.testing.assert_close(1 / hess, torch.full((3,), 0.25 + 1e-6), rtol=1e-3, atol=0)


@given(seed=st.integers(0, 1000), clients=st.integers(1, 8))
def test_weighted_mean_of_numbers(seed: int, clients: int) -> None:
    rng = np.random.default_rng(seed)
    weights, arrays = rng.dirichlet(np.ones(clients)), rng.normal(size=(clients, 2, 3))
    tensors = [tensor(array) for array in arrays]
    before = [t.clone() for t in tensors]
    mean = weighted_mean(weights.tolist(), tensors)
    np.testing.assert_allclose(mean.numpy(), np.tensordot(weights, arrays, 1), rtol=1e-5, atol=1e-6)
    assert mean.dtype == torch.float32
    mean.fill_(9)
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_weighted_mean_of_counters_is_the_largest(dtype: torch.dtype) -> None:
    tensors = [torch.tensor([1, 0]).to(dtype), torch.tensor([0, 0]).to(dtype)]
    mean = weighted_mean([0.1, 0.9], tensors)
    assert mean.dtype == dtype
    assert mean.tolist() == [1, 0]
    assert weighted_mean([0.5, 0.5], [torch.tensor(3), torch.tensor(2**40)]).item() == 2**40
