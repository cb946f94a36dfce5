"""`Ivon` against `ivon-opt` bit for bit, and against known answers: quadratic losses have Gaussian posteriors."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ivon import IVON
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedivon_flwr.optim import Ivon, IvonSettings

Optimizer = Any  # both optimisers; ivon-opt has no types


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(8, 4))


INPUTS = {mlp: (6,), conv: (2, 5, 5)}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Every parameter its own group, with its own hyperparameters; the first has the defaults."""
    own: list[dict[str, Any]] = [
        {},
        {"lr": 0.03, "weight_decay": 1e-2, "hess_init": 3.0},
        {"ess": 40.0, "beta1": 0.5, "clip_radius": 0.02},
        {"beta2": 0.9},
    ]
    return [{"params": [p], **own[i % len(own)]} for i, p in enumerate(model.parameters())]


def trained(make: type, model: nn.Module, shape: tuple[int, ...], grouped: bool, settings: IvonSettings) -> Optimizer:
    torch.manual_seed(1)
    params = groups_of(model) if grouped else model.parameters()
    optimizer = Ivon(params, settings) if make is Ivon else IVON(params, **settings.model_dump())
    data = torch.Generator().manual_seed(2)
    for _ in range(6):
        inputs, labels = torch.randn(5, *shape, generator=data), torch.randint(4, (5,), generator=data)
        for _ in range(settings.mc_samples):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("clip_radius", [math.inf, 0.05])
@pytest.mark.parametrize("mc_samples", [1, 3])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("net", INPUTS)
def test_without_a_prior_it_is_ivon_opt_bit_for_bit(
    net: Callable[[], nn.Module], grouped: bool, mc_samples: int, clip_radius: float
) -> None:
    torch.manual_seed(0)
    ours = net()
    original = copy.deepcopy(ours)
    settings = IvonSettings(
        lr=0.2, ess=100.0, hess_init=0.5, beta2=0.99, weight_decay=1e-3, mc_samples=mc_samples, clip_radius=clip_radius
    )
    a = trained(Ivon, ours, INPUTS[net], grouped, settings)
    b = trained(IVON, original, INPUTS[net], grouped, settings)
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), original.parameters(), strict=True))
    for mine, theirs in zip(a.param_groups, b.param_groups, strict=True):
        assert torch.equal(mine["hess"], theirs["hess"])
        assert torch.equal(mine["momentum"], theirs["momentum"])
    assert torch.equal(a.hess(), torch.cat([group["hess"] for group in b.param_groups]))


# Known answers: under the loss ½ a (θ − b)² and a Gaussian prior the posterior is Gaussian.

A = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0], dtype=torch.float64)
B = torch.tensor([-1.0, 0.5, 2.0, 0.0, 1.0], dtype=torch.float64)
M0 = torch.tensor([1.0, -1.0, 0.5, 2.0, 0.0], dtype=torch.float64)
H0 = torch.tensor([0.5, 2.0, 1.0, 0.1, 4.0], dtype=torch.float64)
QUADRATIC = IvonSettings(lr=0.1, ess=3.0, hess_init=1.0, weight_decay=0.3, beta2=0.99, mc_samples=2)


def on_quadratic(steps: int, prepare: Callable[[Ivon], None] | None = None, copies: int = 1) -> tuple[Tensor, Tensor]:
    """Mean and Hessian after some steps, averaged over independent copies: both jitter with the noise for ever."""
    torch.manual_seed(0)
    a, b = A.repeat(copies), B.repeat(copies)
    theta = nn.Parameter(torch.zeros_like(a))
    optimizer = Ivon([theta], QUADRATIC)
    if prepare:
        prepare(optimizer)
    for _ in range(steps):
        for _ in range(QUADRATIC.mc_samples):
            with optimizer.sampled_params(train=True):
                theta.grad = a * (theta.detach() - b)
        optimizer.step()
    return optimizer.mean().view(copies, -1).mean(0), optimizer.hess().view(copies, -1).mean(0)


def test_under_the_zero_prior_the_quadratic_posterior_is_found() -> None:
    mean, hess = on_quadratic(800, copies=1000)
    torch.testing.assert_close(hess + 0.3, A + 0.3, rtol=0.02, atol=0)
    torch.testing.assert_close(mean, A * B / (A + 0.3), rtol=0.02, atol=5e-3)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
def test_under_a_prior_the_quadratic_posterior_is_found(temperature: float) -> None:
    mean, hess = on_quadratic(
        800, lambda ivon: ivon.use_prior(M0.repeat(1000), H0.repeat(1000), temperature), copies=1000
    )
    pull = temperature * (H0 + 0.3)
    torch.testing.assert_close(mean, (A * B + pull * M0) / (A + pull), rtol=0.02, atol=5e-3)
    torch.testing.assert_close((hess - H0) * temperature, A, rtol=0.03, atol=0)


def test_start_at_goes_on_from_a_hessian() -> None:
    theta = nn.Parameter(M0.clone())
    optimizer = Ivon([theta], QUADRATIC)
    optimizer.start_at(H0)
    assert torch.equal(optimizer.hess(), H0)
    torch.manual_seed(3)
    with optimizer.sampled_params():
        noise = theta.detach() - M0
    torch.manual_seed(3)
    torch.testing.assert_close(noise, torch.randn(5, dtype=torch.float64) / (3.0 * (H0 + 0.3)).sqrt())
    given = H0 + 1
    optimizer.start_at(given)
    with optimizer.sampled_params(train=True):
        theta.grad = A * (theta.detach() - B)
    optimizer.step()
    assert torch.equal(given, H0 + 1)
    assert not torch.equal(optimizer.hess(), given)


def test_use_prior_starts_at_the_prior_and_copies_it() -> None:
    theta = nn.Parameter(torch.zeros_like(A))
    optimizer = Ivon([theta], QUADRATIC)
    mean, hess = M0.clone(), H0.clone()
    optimizer.use_prior(mean, hess, 2.0)
    torch.testing.assert_close(optimizer.hess(), H0)
    assert torch.equal(theta.detach(), M0)
    torch.manual_seed(3)
    with optimizer.sampled_params():
        noise = theta.detach() - M0
    torch.manual_seed(3)  # the prior's own width, N(m0, 1/(λ (h0 + δ))), whatever β
    torch.testing.assert_close(noise, torch.randn(5, dtype=torch.float64) / (3.0 * (H0 + 0.3)).sqrt())
    mean.zero_()  # what the caller does with the vectors does not matter any more
    hess.zero_()
    torch.testing.assert_close(optimizer.hess(), H0)
    optimizer.use_prior(mean.copy_(M0), hess.copy_(H0), math.inf)
    mean.zero_()
    with optimizer.sampled_params(train=True):
        theta.grad = torch.ones_like(theta)
    optimizer.step()
    assert torch.equal(theta.detach(), M0)


def test_temperature_zero_is_gradient_descent_without_noise() -> None:
    mean, hess = on_quadratic(7, lambda ivon: ivon.use_prior(M0, H0, 0.0))
    theta, momentum = M0.clone(), torch.zeros_like(A)
    for t in range(1, 8):
        momentum = 0.9 * momentum + 0.1 * A * (theta - B)
        theta = theta - 0.1 * (1.0 + 0.3) * momentum / (1 - 0.9**t) / (H0 + 0.3)
    torch.testing.assert_close(mean, theta)
    torch.testing.assert_close(hess, H0)


@pytest.mark.parametrize("temperature", [1e-12, 1e-6, 1e-4])
def test_a_tiny_temperature_is_the_limit(temperature: float) -> None:
    """Steps that shrink with β would not leave the prior, under which h grows as 1/β."""
    none = on_quadratic(50, lambda ivon: ivon.use_prior(M0, H0, 0.0))
    tiny = on_quadratic(50, lambda ivon: ivon.use_prior(M0, H0, temperature))
    assert all(torch.equal(one, other) for one, other in zip(none, tiny, strict=True))


def test_temperature_zero_samples_the_mean() -> None:
    theta = nn.Parameter(torch.zeros_like(A))
    optimizer = Ivon([theta], QUADRATIC)
    optimizer.use_prior(M0, H0, 0.0)
    with optimizer.sampled_params():
        assert torch.equal(theta.detach(), M0)


def test_infinite_temperature_returns_the_prior() -> None:
    mean, hess = on_quadratic(20, lambda ivon: ivon.use_prior(M0, H0, math.inf))
    assert torch.equal(mean, M0)
    torch.testing.assert_close(hess, H0)


def test_a_huge_temperature_is_stable_and_stays_at_the_prior() -> None:
    mean, hess = on_quadratic(200, lambda ivon: ivon.use_prior(M0, H0, 1e6))
    torch.testing.assert_close(mean, M0, rtol=0, atol=1e-4)
    torch.testing.assert_close(hess, H0, rtol=1e-3, atol=0)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.3, 1.0, 30.0, 1e6])
def test_the_first_step_under_a_prior_is_that_of_standard_training(temperature: float) -> None:
    """From the prior's mean the pull is zero: ``lr (h0 + δ)/(h̃ + δ) ĝ``, divided by 1 + lr β (h0 + δ) (proximal)."""
    theta = nn.Parameter(torch.zeros_like(A))
    optimizer = Ivon([theta], QUADRATIC)
    optimizer.use_prior(M0, H0, temperature)
    with optimizer.sampled_params(train=True):
        theta.grad = torch.ones_like(theta)
    optimizer.state["avg_nxg"].zero_()  # without the first look at the curvature
    optimizer.step()
    step = 0.1 * 1.3 / (H0 + 0.3)
    torch.testing.assert_close(theta.detach(), M0 - step / (1 + 0.1 * 1.3 * temperature))


@pytest.mark.parametrize("temperature", [-1.0, -1e-9, math.nan])
def test_a_temperature_that_is_no_strength_is_refused(temperature: float) -> None:
    theta = nn.Parameter(torch.zeros_like(A))
    with pytest.raises(ValueError, match="temperature"):
        Ivon([theta]).use_prior(M0, H0, temperature)
    assert torch.equal(theta.detach(), torch.zeros_like(A))


def test_the_clip_radius_bounds_the_step() -> None:
    settings = IvonSettings(lr=1.0, hess_init=1.0, weight_decay=0.0, clip_radius=0.01)
    theta = nn.Parameter(torch.zeros(3))
    optimizer = Ivon([theta], settings)
    with optimizer.sampled_params(train=True):
        theta.grad = torch.tensor([100.0, -100.0, 0.001])
    optimizer.step()
    torch.testing.assert_close(theta.detach()[:2], torch.tensor([-0.01, 0.01]))
    assert -0.01 < theta[2].item() < 0


def test_an_exception_leaves_the_mean_and_collects_nothing() -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = Ivon(model.parameters(), IvonSettings(ess=1.0))
    before = [p.detach().clone() for p in model.parameters()]
    places = [p.data_ptr() for p in model.parameters()]

    def interrupted() -> None:
        with optimizer.sampled_params(train=True):
            assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
            model(torch.randn(2, 6)).sum().backward()
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert [p.data_ptr() for p in model.parameters()] == places
    with pytest.raises(RuntimeError, match="needs a gradient"):
        optimizer.step()
    assert optimizer.current_step == 0


def test_sampling_without_train_collects_nothing() -> None:
    model = mlp()
    optimizer = Ivon(model.parameters())
    with optimizer.sampled_params():
        model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="sampled_params"):
        optimizer.step()


def test_no_gradient_is_a_gradient_of_zero() -> None:
    outcomes = []
    for told in (False, True):
        torch.manual_seed(0)
        used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        optimizer = Ivon([unused, used], IvonSettings(beta2=0.9, weight_decay=0.5))
        for _ in range(3):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                used.square().sum().backward()  # type: ignore[no-untyped-call]
                if told:
                    unused.grad = torch.zeros(2)
            optimizer.step()
        outcomes.append(torch.cat([optimizer.mean(), optimizer.hess()]))
    assert torch.equal(*outcomes)
    assert bool((outcomes[0][:2] < 1).all())  # the prior pulls all the same


def test_frozen_parameters_are_left_alone() -> None:
    torch.manual_seed(0)
    model = mlp()
    model[0].requires_grad_(requires_grad=False)  # type: ignore[index]
    frozen = [p.detach().clone() for p in model[0].parameters()]  # type: ignore[index]
    optimizer = Ivon(model.parameters(), IvonSettings(lr=1.0, ess=1.0))
    assert optimizer.mean().numel() == optimizer.hess().numel() == 36
    with optimizer.sampled_params(train=True):
        assert all(torch.equal(p, q) for p, q in zip(model[0].parameters(), frozen, strict=True))  # type: ignore[index]
        model(torch.randn(5, 6)).square().sum().backward()
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model[0].parameters(), frozen, strict=True))  # type: ignore[index]
    assert torch.equal(optimizer.mean(), torch.cat([p.detach().flatten() for p in model[2].parameters()]))  # type: ignore[index]


def steps(model: nn.Module, optimizer: Ivon, count: int) -> None:
    for _ in range(count):
        torch.manual_seed(100 + optimizer.current_step)
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()


def test_a_saved_state_goes_on_bit_for_bit() -> None:
    torch.manual_seed(0)
    settings = IvonSettings(lr=0.1, beta2=0.9)
    model = mlp()
    optimizer = Ivon(groups_of(model), settings)
    steps(model, optimizer, 3)
    other = copy.deepcopy(model)
    resumed = Ivon(groups_of(other), settings)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.current_step == 3
    steps(model, optimizer, 3)
    steps(other, resumed, 3)
    assert resumed.current_step == 6
    assert torch.equal(optimizer.mean(), resumed.mean())
    assert torch.equal(optimizer.hess(), resumed.hess())


@pytest.mark.parametrize("under_prior", [False, True])
def test_weights_keep_their_storage(under_prior: bool) -> None:
    torch.manual_seed(0)
    model = conv().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    places = [(p.data_ptr(), p.stride()) for p in model.parameters()]
    optimizer = Ivon(model.parameters())
    if under_prior:
        optimizer.use_prior(optimizer.mean(), optimizer.hess())
    before = optimizer.mean()
    for _ in range(2):
        with optimizer.sampled_params(train=True):
            model(torch.randn(2, 2, 5, 5)).square().sum().backward()
        optimizer.step()
    assert [(p.data_ptr(), p.stride()) for p in model.parameters()] == places
    assert not torch.equal(optimizer.mean(), before)


@pytest.mark.parametrize("length", [0, 4, 6])
def test_a_vector_of_the_wrong_length_is_refused(length: int) -> None:
    optimizer = Ivon([nn.Parameter(torch.zeros(5))])
    wrong, right = torch.ones(length), torch.ones(5)
    said = f"expected a vector of 5 values, but got {length}"
    with pytest.raises(ValueError, match=said):
        optimizer.start_at(wrong)
    with pytest.raises(ValueError, match=said):
        optimizer.use_prior(wrong, right)
    with pytest.raises(ValueError, match=said):
        optimizer.use_prior(right, wrong)
    assert torch.equal(optimizer.mean(), torch.zeros(5))
    assert torch.equal(optimizer.hess(), torch.ones(5))
