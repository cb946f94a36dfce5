"""FedLaplace's client against a loop written by hand with autograd on the penalised loss."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients.base import LocalData, Work
from clients.fedavg import FedAvgClient
from clients.fedlaplace import FedLaplaceClient
from fedivon_flwr.data import load
from fedivon_flwr.models import build
from fedivon_flwr.records import model_arrays

COUNT = 70
TOLD: dict[str, Any] = {
    "server-round": 3,
    "seed": 1,
    "batch-size": 32,
    "local-epochs": 2,
    "lr": 3e-3,
    "weight-decay": 1e-3,
    "penalty": 2.0,
    "test-ess": 100.0,
    "test-prior": 50.0,
}


def mlp() -> nn.Module:
    return build("mlp", (1, 8, 8), 10, seed=3)


def client() -> FedLaplaceClient:
    return FedLaplaceClient(mlp(), LocalData.part(load("digits"), np.arange(COUNT)))


def received(omega: float = 0.0) -> dict[str, np.ndarray]:
    """The server's weights, and an Ω that differs from weight to weight."""
    arrays = model_arrays(mlp(), 1.0)
    generator = np.random.default_rng(0)
    for key in arrays:
        if key.startswith("hess/"):
            arrays[key] = (omega * generator.uniform(0, 1, arrays[key].shape)).astype(np.float32)
    return arrays


def fit(arrays: dict[str, np.ndarray], **changes: Any) -> dict[str, np.ndarray]:
    own = client()
    trained, _, _ = own.fit(list(arrays.values()), TOLD | {k.replace("_", "-"): v for k, v in changes.items()})
    return dict(zip(own.keys, trained, strict=True))


def by_hand(arrays: dict[str, np.ndarray], penalty: float) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and Ω after minimising ``CE + ζ ½ Σ Ω (θ − μ)²`` as one loss, differentiated by autograd."""
    own = client()
    params = list(own.model.parameters())
    mu = [p.detach().clone() for p in params]
    prior = [torch.tensor(array) for key, array in arrays.items() if key.startswith("hess/")]
    omega = [o.clone() for o in prior]
    optimizer = torch.optim.Adam(params, lr=TOLD["lr"], weight_decay=TOLD["weight-decay"])
    for inputs, labels in own.epochs(Work.model_validate(TOLD)):
        loss = cross_entropy(own.model(inputs), labels)
        for o, g in zip(omega, torch.autograd.grad(loss, params, retain_graph=True), strict=True):
            o += len(labels) / COUNT * g**2
        pull = sum((o * (p - m) ** 2).sum() for o, p, m in zip(prior, params, mu, strict=True))
        optimizer.zero_grad()
        (loss + penalty / 2 * pull).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [p.detach() for p in params], omega


@pytest.mark.parametrize("penalty", [0.5, 2.0, 20.0])
def test_the_priors_gradient_reaches_the_weights(penalty: float) -> None:
    arrays = received(omega=30.0)
    trained = fit(arrays, penalty=penalty)
    weights, _ = by_hand(arrays, penalty)
    for ours, theirs in zip((v for k, v in trained.items() if k.startswith("mean/")), weights, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-4, atol=2e-6)
    free = fit(arrays, penalty=0.0)
    assert distance(trained) < 0.95 * distance(free)


def test_a_strong_prior_holds_the_weights() -> None:
    distances = [distance(fit(received(omega=1.0), penalty=penalty)) for penalty in (0.0, 10.0, 1e3)]
    assert distances[0] > distances[1] > distances[2]


def distance(trained: dict[str, np.ndarray]) -> float:
    start = model_arrays(mlp())
    return float(np.sqrt(sum(np.sum((trained[key] - start[key]) ** 2) for key in start)))


def test_omega_is_the_sum_of_squared_gradients_on_top_of_the_servers() -> None:
    arrays = received(omega=0.3)
    _, omega = by_hand(arrays, 2.0)
    trained = fit(arrays)
    for ours, theirs in zip((v for k, v in trained.items() if k.startswith("hess/")), omega, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-3, atol=1e-7)
    assert all((trained[key] >= arrays[key]).all() for key in arrays if key.startswith("hess/"))


def test_without_a_prior_it_trains_like_fedavg() -> None:
    fedavg = FedAvgClient(mlp(), LocalData.part(load("digits"), np.arange(COUNT)))
    plain, _, _ = fedavg.fit(list(model_arrays(mlp()).values()), TOLD)
    for trained in (fit(received(omega=0.0)), fit(received(omega=5.0), penalty=0.0)):
        assert all(np.array_equal(trained[key], array) for key, array in zip(fedavg.keys, plain, strict=True))


def test_the_posterior_has_the_precision_that_was_told() -> None:
    arrays = received(omega=2.0)
    posterior = client().posterior(arrays, TOLD)
    omega = np.concatenate([array.ravel() for key, array in arrays.items() if key.startswith("hess/")])
    np.testing.assert_allclose(posterior.precision.numpy(), 100.0 * omega + 50.0, rtol=1e-6)
