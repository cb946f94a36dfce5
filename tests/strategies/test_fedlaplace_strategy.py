"""FedLaplace's server: weights by Fisher information, and the Gaussian it stands for."""

from pathlib import Path

import numpy as np
import torch
from grid import LocalGrid
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as array_of

import strategies
from fedivon_flwr.models import build
from fedivon_flwr.records import NDArrays
from fedivon_flwr.runs import load_arrays, read_json
from fedivon_flwr.settings import Settings
from fedivon_flwr.trained import Trained
from simulation.federation import run
from strategies.base import Reply
from strategies.fedlaplace import FedLaplace, Options

THREE = array_of(np.float32, 3, elements=st.floats(-100, 100, width=32))
POSITIVE = array_of(np.float32, 3, elements=st.floats(0, 1e4, width=32))


def reply(client: int, examples: int, theta: np.ndarray | list[float], omega: np.ndarray | list[float]) -> Reply:
    arrays = {"mean/w": np.asarray(theta, np.float32), "hess/w": np.asarray(omega, np.float32)}
    return Reply(client, examples, arrays, {})


def combined(*replies: Reply) -> NDArrays:
    return FedLaplace().combine(replies, replies[0].arrays)


def test_a_case_by_hand() -> None:
    found = combined(reply(0, 30, [1, 5, -2], [2, 0, 0]), reply(1, 10, [3, 1, 2], [4, 0, 1e-12]))
    assert found["hess/w"].tolist() == [0.75 * 2 + 0.25 * 4, 0, np.float32(0.25e-12)]
    # where no client has information the plain mean; where one has, however little, its weight
    assert found["mean/w"].tolist() == [np.float32((0.75 * 2 * 1 + 0.25 * 4 * 3) / 2.5), 0.75 * 5 + 0.25 * 1, 2]


@given(THREE, THREE, POSITIVE, POSITIVE, st.integers(1, 1000), st.integers(1, 1000))
def test_the_mean_lies_between_the_clients(
    a: np.ndarray, b: np.ndarray, omega_a: np.ndarray, omega_b: np.ndarray, n_a: int, n_b: int
) -> None:
    found = combined(reply(0, n_a, a, omega_a), reply(1, n_b, b, omega_b))
    slack = 1e-5 * (1 + np.abs(a) + np.abs(b))
    assert (found["mean/w"] >= np.minimum(a, b) - slack).all()
    assert (found["mean/w"] <= np.maximum(a, b) + slack).all()
    assert (found["hess/w"] >= 0).all()
    assert found["mean/w"].dtype == found["hess/w"].dtype == np.float32


@given(THREE, POSITIVE, st.integers(1, 1000))
def test_one_client_alone_is_taken_as_it_is(theta: np.ndarray, omega: np.ndarray, examples: int) -> None:
    found = combined(reply(0, examples, theta, omega))
    np.testing.assert_allclose(found["mean/w"], theta, rtol=1e-6)
    np.testing.assert_array_equal(found["hess/w"], omega)


def test_a_negative_fisher_information_is_refused() -> None:
    assert FedLaplace().refuse({"hess/w": np.array([0.0, -1e-9])}) == "hess/w has a negative value"
    assert FedLaplace().refuse({"hess/w": np.zeros(2), "mean/w": np.array([-1.0])}) is None


def test_the_first_prior_knows_nothing() -> None:
    arrays = FedLaplace().model_arrays(build("mlp", (1, 8, 8), 10, seed=0))
    assert all((array == 0).all() for key, array in arrays.items() if key.startswith("hess/"))


def test_the_posterior_is_the_one_that_the_file_of_a_run_stands_for(tmp_path: Path) -> None:
    config = {"method": "fedlaplace", "clients": 6, "clients-per-round": 3, "rounds": 3, "test-samples": 3}
    chosen = {"partitioner": "iid", "fedlaplace.test-ess": 300.0, "fedlaplace.test-prior": 2000.0}
    settings = strategies.complete(Settings.from_config({**config, **chosen, "run-dir": str(tmp_path / "run")}))
    run(LocalGrid(settings.to_config(), settings.clients), settings)
    trained = Trained.load(tmp_path / "run")
    arrays, _ = load_arrays(tmp_path / "run" / "posterior.safetensors")
    posterior = strategies.build(settings).predictive(arrays)
    assert trained.posterior is not None
    assert posterior is not None
    torch.testing.assert_close(trained.posterior.precision, posterior.precision)
    assert posterior.precision.min() >= 2000
    assert posterior.precision.max() > 2001
    assert "mc" in read_json(tmp_path / "run" / "summary.json")["metrics"]


def test_the_precision_of_the_posterior() -> None:
    arrays = {"mean/w": np.ones(2, np.float32), "hess/w": np.array([0.0, 2.0], np.float32)}
    posterior = FedLaplace(Options(test_ess=300.0, test_prior=2000.0)).predictive(arrays)
    assert torch.equal(posterior.precision, torch.tensor([2000.0, 2600.0]))
