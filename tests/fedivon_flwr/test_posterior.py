import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from fedivon_flwr.posterior import DiagGaussian, Layout, barycentre

seeds = st.integers(0, 10**6)
sizes = st.integers(1, 20)


def gaussian(seed: int, size: int) -> DiagGaussian:
    gen = torch.Generator().manual_seed(seed)
    mean, spread = torch.randn(2, size, generator=gen, dtype=torch.float64)
    return DiagGaussian(mean, (2 * spread).exp())


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4, bias=False))


def test_layout_follows_the_model() -> None:
    layout = Layout.of(net())
    assert layout.names == ("0.weight", "0.bias", "2.weight")
    assert layout.shapes == ((3, 2, 3, 3), (3,), (4, 12))
    assert layout.sizes == (54, 3, 48)
    assert layout.numel == 105


def test_frozen_parameters_are_left_out() -> None:
    model = net()
    model[0].requires_grad_(requires_grad=False)  # type: ignore[index]
    assert Layout.of(model) == Layout(("2.weight",), ((4, 12),))


@pytest.mark.parametrize("lead", [(), (5,), (2, 3)])
def test_split_gives_views_in_order(lead: tuple[int, ...]) -> None:
    layout = Layout.of(net())
    flat = torch.arange(105.0).repeat(*lead, 1)
    parts = layout.split(flat)
    assert [tuple(part.shape) for part in parts.values()] == [(*lead, *shape) for shape in layout.shapes]
    torch.testing.assert_close(torch.cat([part.flatten(len(lead)) for part in parts.values()], -1), flat)
    parts["0.bias"].fill_(-1)
    assert (flat[..., 54:57] == -1).all()


def test_flatten_is_the_inverse_of_split_in_any_order() -> None:
    layout = Layout.of(net())
    flat = torch.randn(105, generator=torch.Generator().manual_seed(0))
    parts = dict(reversed(layout.split(flat).items()))
    again = layout.flatten(parts)
    assert torch.equal(again, flat)
    again.zero_()
    assert flat.abs().sum() > 0


def test_split_of_a_wrong_length_is_refused() -> None:
    with pytest.raises(RuntimeError):
        Layout.of(net()).split(torch.zeros(104))


def test_flat_weights_reproduce_the_model() -> None:
    model, x = net(), torch.randn(2, 2, 4, 4)
    layout = Layout.of(model)
    parts = layout.split(layout.flatten(dict(model.named_parameters())))
    torch.testing.assert_close(torch.func.functional_call(model, parts, (x,)), model(x))


@pytest.mark.parametrize("shapes", [((3,), (4,)), ((2, 2), (2, 2)), ((), ())])
def test_shapes_are_checked(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="same length"):
        DiagGaussian(torch.zeros(shapes[0]), torch.ones(shapes[1]))


@given(first=seeds, second=seeds, size=sizes)
def test_kl_is_that_of_torch(first: int, second: int, size: int) -> None:
    q, p = gaussian(first, size), gaussian(second, size)
    wanted = kl_divergence(Normal(q.mean, q.std), Normal(p.mean, p.std)).sum()
    torch.testing.assert_close(q.kl(p), wanted)
    torch.testing.assert_close(q.kl(q), torch.zeros((), dtype=torch.float64))


@given(seed=seeds, size=sizes)
def test_natural_parameters_and_back(seed: int, size: int) -> None:
    q = gaussian(seed, size)
    again = DiagGaussian.from_natural(*q.natural)
    torch.testing.assert_close(again.mean, q.mean)
    assert torch.equal(again.precision, q.precision)


@given(seed=seeds, size=sizes, ess=st.floats(1, 1e5), decay=st.floats(1e-5, 1))
def test_from_a_hessian(seed: int, size: int, ess: float, decay: float) -> None:
    mean, hess = gaussian(seed, size).natural
    q = DiagGaussian.from_hess(mean, hess, ess, decay)
    torch.testing.assert_close(q.std, (ess * (hess + decay)) ** -0.5)


@given(seed=seeds, weight=st.floats(0, 1))
def test_between_two_by_reverse_kl_is_the_weighted_product_of_their_densities(seed: int, weight: float) -> None:
    first, second = gaussian(seed, 1), gaussian(seed + 1, 1)
    between = barycentre(first, second, weight, "rkl")
    points = between.mean + between.std * torch.linspace(-3, 3, 7, dtype=torch.float64)

    def log_density(q: DiagGaussian) -> Tensor:
        return -0.5 * q.precision * (points - q.mean).square()

    gap = log_density(between) - (1 - weight) * log_density(first) - weight * log_density(second)
    # up to a constant factor
    torch.testing.assert_close(gap, gap[0].expand(7), atol=1e-6, rtol=1e-8)


def test_sample_moments() -> None:
    q = DiagGaussian(torch.tensor([-3.0, 0.0, 10.0]), torch.tensor([100.0, 1.0, 0.04]))
    draws = q.sample(100_000, torch.Generator().manual_seed(0))
    assert draws.shape == (100_000, 3)
    error = 4 / 100_000**0.5
    assert ((draws.mean(0) - q.mean).abs() < error * q.std).all()
    assert ((draws.std(0) / q.std - 1).abs() < error).all()
    assert torch.corrcoef(draws.T).triu(1).abs().max() < error


def test_sample_is_reproducible_and_needs_no_global_state() -> None:
    q = gaussian(0, 33)
    state = torch.get_rng_state()
    first, same, other = (q.sample(2, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.allclose(first, other)
    assert torch.equal(state, torch.get_rng_state())
    assert first.dtype == torch.float64


@settings(max_examples=10)
@given(seed=seeds, size=sizes)
def test_nothing_is_changed_in_place(seed: int, size: int) -> None:
    q, p = gaussian(seed, size), gaussian(seed + 1, size)
    kept = [t.clone() for t in (q.mean, q.precision, p.mean, p.precision)]
    q.sample(3, torch.Generator().manual_seed(0))
    q.kl(p)
    barycentre(q, p, 0.3, "rkl")
    DiagGaussian.from_natural(*q.natural)
    assert all(torch.equal(a, b) for a, b in zip(kept, (q.mean, q.precision, p.mean, p.precision), strict=True))
