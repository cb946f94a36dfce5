"""The clients as Flower `NumPyClient`s on digits: what they are given, what they answer, and what decides it."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.client import NumPyClient
from grid import LocalGrid
from numpy.typing import NDArray
from torch import nn

import clients
import strategies
from clients.base import LocalData, TorchClient
from clients.fedavg import FedAvgClient
from clients.fedivon import FedIvonClient
from clients.fedlaplace import FedLaplaceClient
from fedivon_flwr.data import load
from fedivon_flwr.errors import UserError
from fedivon_flwr.models import build as build_model
from fedivon_flwr.records import from_record, model_arrays, to_record, wire_keys
from fedivon_flwr.settings import Settings

Arrays = list[NDArray[Any]]
KINDS: list[type[TorchClient]] = [FedIvonClient, FedAvgClient, FedLaplaceClient]
TOLD: dict[str, Any] = {"server-round": 1, "seed": 0, "batch-size": 32, "local-epochs": 1, "eval-samples": 4}
PLAN: dict[type[TorchClient], dict[str, Any]] = {
    FedIvonClient: TOLD | {"lr": 0.1, "ess": 1000.0, "hess-init": 1.0, "weight-decay": 1e-3, "beta2": 0.999},
    FedAvgClient: TOLD | {"lr": 1e-3, "weight-decay": 1e-4},
    FedLaplaceClient: TOLD | {"lr": 1e-3, "weight-decay": 1e-4, "penalty": 0.01, "test-ess": 1e3, "test-prior": 5e3},
}


def mlp() -> nn.Module:
    return build_model("mlp", (1, 8, 8), 10, seed=3)


def with_norm() -> nn.Module:
    torch.manual_seed(0)
    frozen = nn.Linear(64, 16).requires_grad_(requires_grad=False)
    return nn.Sequential(nn.Flatten(), frozen, nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def rows(count: int, first: int = 0) -> LocalData:
    return LocalData.part(load("digits"), np.arange(first, first + count))


def client(kind: type[TorchClient], number: int = 0, model: nn.Module | None = None, count: int = 100) -> TorchClient:
    return kind(model or mlp(), rows(count), "cpu", number)


def sent(kind: type[TorchClient], model: nn.Module | None = None) -> Arrays:
    """What a server sends: read-only, as it comes off the wire."""
    arrays = list(model_arrays(model or mlp(), kind.first_hess).values())
    for array in arrays:
        array.flags.writeable = False
    return arrays


def same(a: Arrays, b: Arrays) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


# Training


@pytest.mark.parametrize("kind", KINDS)
def test_seed_round_and_client_decide_everything(kind: type[TorchClient]) -> None:
    def fit(number: int = 0, **told: Any) -> Arrays:
        config = PLAN[kind] | {key.replace("_", "-"): value for key, value in told.items()}
        return client(kind, number).fit(sent(kind), config)[0]

    torch.manual_seed(1)
    first = fit()
    torch.manual_seed(2)
    assert same(fit(), first)
    others = [fit(number=1), fit(seed=1), fit(server_round=2)]
    assert not any(same(other, first) for other in others)
    assert not same(others[0], others[1])
    assert not same(others[1], others[2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_keeps_nothing_between_rounds(kind: type[TorchClient]) -> None:
    """One model serves all virtual clients of a process, one after the other."""
    model = mlp()
    one, two = client(kind, 0, model), client(kind, 1, model, count=60)
    first = one.fit(sent(kind), PLAN[kind])[0]
    kept = [array.copy() for array in first]
    two.fit(sent(kind), PLAN[kind] | {"lr": 0.5})
    two.evaluate(sent(kind), PLAN[kind])
    assert same(first, kept)
    assert same(one.fit(sent(kind), PLAN[kind])[0], kept)


@pytest.mark.parametrize("kind", KINDS)
def test_fit_answers_in_the_order_of_the_wire(kind: type[TorchClient]) -> None:
    own = client(kind)
    assert isinstance(own, NumPyClient)
    given = sent(kind)
    before = [array.copy() for array in given]
    arrays, examples, metrics = own.fit(given, PLAN[kind])
    assert own.keys == wire_keys(own.model, kind.first_hess is not None)
    assert examples == 100
    assert list(metrics) == ["train-loss"]
    assert 0 < metrics["train-loss"] < 3
    assert same(given, before)
    trained = dict(zip(own.keys, arrays, strict=True))
    for name, p in own.model.named_parameters():
        assert np.array_equal(trained[f"mean/{name}"], p.detach().numpy())
        assert not np.array_equal(trained[f"mean/{name}"], dict(zip(own.keys, given, strict=True))[f"mean/{name}"])
    assert [array.shape for array in arrays] == [array.shape for array in given]
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_the_generators_of_the_process_are_left_alone(kind: type[TorchClient], call: str) -> None:
    states = torch.get_rng_state(), repr(np.random.get_state()), random.getstate()
    getattr(client(kind), call)(sent(kind), PLAN[kind])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert repr(np.random.get_state()) == states[1]
    assert random.getstate() == states[2]


@pytest.mark.parametrize("kind", KINDS)
def test_training_learns(kind: type[TorchClient]) -> None:
    own = client(kind, count=600)
    before = own.evaluate(sent(kind), PLAN[kind])[0]
    lr = 0.3 if kind is FedIvonClient else 5e-3
    arrays, _, metrics = own.fit(sent(kind), PLAN[kind] | {"local-epochs": 4, "batch-size": 16, "lr": lr})
    after, _, scores = own.evaluate(arrays, PLAN[kind])
    assert after < 0.5 * before
    assert metrics["train-loss"] < before
    assert scores["mean-accuracy"] > 0.8


def test_every_example_is_seen_once_an_epoch() -> None:
    own = client(FedAvgClient, count=50)
    work = clients.base.Work.model_validate({"batch-size": 16, "local-epochs": 2})
    labels = [batch.tolist() for _, batch in own.epochs(work)]
    inputs = [len(batch) for batch, _ in own.epochs(work)]
    assert inputs == [len(batch) for batch in labels] == [16, 16, 16, 2] * 2
    flat = [label for batch in labels for label in batch]
    expected = sorted(load("digits").train.y[:50].tolist())
    assert sorted(flat[:50]) == sorted(flat[50:]) == expected
    assert flat[:50] != flat[50:]


def test_inputs_and_labels_of_a_batch_belong_together() -> None:
    own, train = client(FedAvgClient, count=40), load("digits").train
    of_image = {train.x[i].tobytes(): int(train.y[i]) for i in range(40)}
    [(inputs, labels)] = own.epochs(clients.base.Work.model_validate({"batch-size": 40}))
    mean, std = load("digits").mean[0], load("digits").std[0]
    images = (inputs * std + mean).mul(255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()
    assert [of_image[image.tobytes()] for image in images] == labels.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_batch_norm_and_frozen_layers(kind: type[TorchClient]) -> None:
    own = client(kind, model=with_norm(), count=96)
    given = sent(kind, with_norm())
    own.model.eval()  # as an evaluation may leave it
    arrays, _, _ = own.fit(given, PLAN[kind])
    before, after = (dict(zip(own.keys, values, strict=True)) for values in (given, arrays))
    assert after["buffer/2.num_batches_tracked"] == before["buffer/2.num_batches_tracked"] + 3
    assert after["buffer/2.num_batches_tracked"].dtype == np.int64
    assert not np.array_equal(after["buffer/2.running_mean"], before["buffer/2.running_mean"])
    assert np.array_equal(after["buffer/1.weight"], before["buffer/1.weight"])
    assert not any(key.startswith(("mean/1.", "hess/1.")) for key in after)
    # The statistics start from the server's, not from what an earlier round left in the model.
    assert same(own.fit(given, PLAN[kind])[0], arrays)
    own.evaluate(arrays, PLAN[kind])
    kept = dict(zip(own.keys, own.get_parameters({}), strict=True))
    assert all(np.array_equal(kept[key], after[key]) for key in own.keys if not key.startswith("hess"))


# FedIvon's plan


def test_the_hessian_goes_on_from_the_servers() -> None:
    """With β2 next to 1 it hardly moves; the noise, and with it everything else, depends on it."""
    outcomes = []
    for hess in (1.0, 2.0):
        arrays = list(model_arrays(mlp(), hess).values())
        own = client(FedIvonClient)
        trained = dict(zip(own.keys, own.fit(arrays, PLAN[FedIvonClient] | {"beta2": 0.999999})[0], strict=True))
        np.testing.assert_allclose(trained["hess/head.weight"], hess, rtol=1e-2)
        outcomes.append(trained["mean/head.weight"])
    assert not np.array_equal(outcomes[0], outcomes[1])


@pytest.mark.parametrize(
    "change", [{"prior": "server"}, {"prior": "server", "temperature": 3.0}, {"ess": "local"}, {"mc-samples": 2}]
)
def test_every_part_of_the_plan_matters(change: dict[str, Any]) -> None:
    kind = FedIvonClient
    plain = client(kind).fit(sent(kind), PLAN[kind])[0]
    other = client(kind).fit(sent(kind), PLAN[kind] | change)[0]
    assert not same(plain, other)
    assert all(np.isfinite(array).all() for array in other)


def test_a_local_sample_size_is_the_number_of_examples() -> None:
    kind = FedIvonClient
    local = client(kind).fit(sent(kind), PLAN[kind] | {"ess": "local"})[0]
    told = client(kind).fit(sent(kind), PLAN[kind] | {"ess": 100.0})[0]
    assert same(local, told)


def test_an_infinite_temperature_returns_what_was_sent() -> None:
    kind = FedIvonClient
    plan = PLAN[kind] | {"prior": "server", "temperature": float("inf")}
    for got, given in zip(client(kind).fit(sent(kind), plan)[0], sent(kind), strict=True):
        np.testing.assert_allclose(got, given, rtol=1e-6)


# Evaluation


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_gives_loss_examples_and_scores(kind: type[TorchClient]) -> None:
    own = client(kind)
    loss, examples, metrics = own.evaluate(sent(kind), PLAN[kind])
    assert examples == len(own.data.test) == len(load("digits").test)
    assert loss == metrics["mean-nll"]
    assert loss > 0
    modes = ["mean"] if kind.first_hess is None else ["mean", "mc"]
    assert set(metrics) == {f"{mode}-{score}" for mode in modes for score in ("accuracy", "nll", "ece", "brier")}
    for mode in modes:
        assert 0 <= metrics[f"{mode}-accuracy"] <= 1
        assert 0 <= metrics[f"{mode}-ece"] <= 1
        assert 0 <= metrics[f"{mode}-brier"] <= 2
    assert own.evaluate(sent(kind), PLAN[kind]) == (loss, examples, metrics)


def test_a_posterior_as_narrow_as_can_be_predicts_like_its_mean() -> None:
    kind = FedIvonClient
    narrow = client(kind).evaluate(sent(kind), PLAN[kind] | {"ess": 1e12})[2]
    wide = client(kind).evaluate(sent(kind), PLAN[kind] | {"ess": 10.0})[2]
    assert narrow["mc-nll"] == pytest.approx(narrow["mean-nll"], rel=1e-4)
    assert abs(wide["mc-nll"] - wide["mean-nll"]) > 1e-3


def test_a_node_tests_on_the_classes_it_has() -> None:
    digits = load("digits")
    threes = np.flatnonzero(digits.train.y == 3)[:10]
    data = LocalData.part(digits, threes)
    assert set(digits.test.y[data.test]) == {3}
    assert len(data.test) == (digits.test.y == 3).sum()


def test_no_test_data_is_said() -> None:
    data = LocalData(load("digits"), np.arange(10), np.arange(0))
    with pytest.raises(UserError, match="no test data"):
        FedAvgClient(mlp(), data).evaluate(sent(FedAvgClient), PLAN[FedAvgClient])


# Arrays in and out


@pytest.mark.parametrize("kind", KINDS)
def test_get_parameters_is_the_model_as_it_is(kind: type[TorchClient]) -> None:
    own = client(kind)
    arrays = own.get_parameters({})
    assert len(arrays) == len(own.keys)
    for key, array, p in zip(own.keys, arrays, own.model.parameters(), strict=False):
        assert key.startswith("mean/")
        assert np.array_equal(array, p.detach().numpy())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_the_wrong_number_of_arrays_is_said(kind: type[TorchClient], call: str) -> None:
    for wrong in (sent(kind)[:-1], [*sent(kind), np.zeros(1)], []):
        with pytest.raises(UserError, match=f"sent {len(wrong)} arrays .* has {len(sent(kind))}"):
            getattr(client(kind), call)(wrong, PLAN[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1,), (10, 1), (3,)])
def test_an_array_of_the_wrong_shape_is_said(kind: type[TorchClient], shape: tuple[int, ...]) -> None:
    """Also one that could be broadcast."""
    own, arrays = client(kind), sent(kind)
    arrays[own.keys.index("mean/head.bias")] = np.zeros(shape, np.float32)
    with pytest.raises(UserError, match=r"mean/head\.bias with the shape .* has \(10,\)"):
        own.fit(arrays, PLAN[kind])


# Building a node's client


def settings(**changes: Any) -> Settings:
    config = {"clients": 4, "clients-per-round": 2, "partitioner": "dirichlet", "device": "cpu"} | changes
    return Settings.from_config(config)


@pytest.mark.parametrize(
    ("method", "kind"), [("fedivon", FedIvonClient), ("fedavg", FedAvgClient), ("fedlaplace", FedLaplaceClient)]
)
def test_a_node_gets_its_part(method: str, kind: type[TorchClient]) -> None:
    parts = []
    for number in range(4):
        own = clients.build(settings(method=method), {"partition-id": number, "num-partitions": 4})
        assert type(own) is kind
        assert own.client == number
        parts.append(own.data.train)
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together) == len(load("digits").train)


def test_a_node_without_a_partition_has_all_data() -> None:
    own = clients.build(settings(), {})
    assert len(own.data.train) == len(load("digits").train)
    assert len(own.data.test) == len(load("digits").test)


@pytest.mark.parametrize("number", [-1, 4, 100])
def test_a_partition_out_of_range_is_said(number: int) -> None:
    with pytest.raises(UserError, match=f"partition-id is {number} but must be from 0 to 3"):
        clients.build(settings(), {"partition-id": number})


def test_another_number_of_nodes_is_said() -> None:
    with pytest.raises(UserError, match=r"federation has 5 nodes but the key 'clients' is 4"):
        clients.build(settings(), {"partition-id": 0, "num-partitions": 5})


OWN = {"dataset": "nodes", "input-shape": "1x8x8", "classes": 10, "evaluation": "clients"}


def own_file(path: Path) -> str:
    digits = load("digits")
    np.savez(path, x_train=digits.train.x[:30], y_train=digits.train.y[:30])
    return str(path)


def test_a_node_with_data_of_its_own(tmp_path: Path) -> None:
    node = {"data": own_file(tmp_path / "own.npz")}
    built = clients.build(settings(**OWN, **{"pixel-mean": "0.3"}), node, node_id=77)
    assert (len(built.data.train), len(built.data.test), built.client) == (30, 0, 77)
    assert (built.data.dataset.classes, built.data.dataset.mean) == (10, (0.3,))
    assert clients.build(settings(**OWN), {**node, "partition-id": 5}, node_id=77).client == 5
    with pytest.raises(UserError, match=r'start it with data="/path/to/own.npz" in its --node-config'):
        clients.build(settings(**OWN), {"partition-id": 5})
    with pytest.raises(UserError, match=r"the model takes \(3, 8, 8\)"):
        clients.build(settings(**OWN | {"input-shape": "3x8x8"}), node)


def test_a_server_without_data(tmp_path: Path) -> None:
    assert clients.server_data(settings(**OWN)).shape == (1, 8, 8)
    with pytest.raises(
        UserError, match=r"with the dataset 'nodes' the server has no test data; use 'clients' or 'none'"
    ):
        clients.server_data(settings(**OWN | {"evaluation": "server"}))
    with pytest.raises(UserError, match="the server has no test data"):
        clients.server_data(settings(dataset=own_file(tmp_path / "own.npz")))


def test_an_unknown_method_is_said() -> None:
    with pytest.raises(UserError, match=r"Unknown method 'base'; choose one of: fedavg, fedivon"):
        clients.build(settings(method="base"), {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_said(device: str) -> None:
    with pytest.raises(UserError, match=rf"'device' is '{device}' but this process sees no GPU"):
        clients.build(settings(device=device), {})


def test_auto_finds_a_device() -> None:
    assert clients.build(settings(device="auto"), {}).device.type == ("cuda" if torch.cuda.is_available() else "cpu")


# Both halves


def test_a_round_of_fedivon_is_the_product_of_its_clients_by_hand() -> None:
    config = {
        "clients": 3,
        "clients-per-round": 3,
        "partitioner": "dirichlet",
        "device": "cpu",
        "rounds": 1,
        "fedivon.ess": 700.0,
        "fedivon.weight-decay": 0.01,
        "fedivon.beta2": 0.99,
        "seed": 4,
    }
    chosen = Settings.from_config(config)
    strategy = strategies.build(chosen)
    start = strategy.model_arrays(mlp())
    result = strategy.start(LocalGrid(config, 3), to_record(start), num_rounds=1)

    told = strategy.train_config(1) | {"server-round": 1, "seed": 4}
    nodes = [clients.build(chosen, {"partition-id": k, "num-partitions": 3}) for k in range(3)]
    replies = [node.fit(list(start.values()), told) for node in nodes]
    total = sum(examples for _, examples, _ in replies)
    for key, combined in from_record(result.arrays).items():
        if key.startswith("mean/"):
            at, twin = nodes[0].keys.index(key), nodes[0].keys.index(key.replace("mean/", "hess/"))
            weights = [examples / total for _, examples, _ in replies]
            precisions = [
                w * 700.0 * (r[0][twin].astype(np.float64) + 0.01) for w, r in zip(weights, replies, strict=True)
            ]
            shifts = [p * r[0][at] for p, r in zip(precisions, replies, strict=True)]
            np.testing.assert_allclose(combined, sum(shifts) / sum(precisions), rtol=1e-4, atol=1e-6)
            hess = from_record(result.arrays)[key.replace("mean/", "hess/")]
            np.testing.assert_allclose(hess, sum(precisions) / 700.0 - 0.01, rtol=1e-4, atol=1e-6)
            assert len({float(r[0][twin].flat[0]) for r in replies}) == 3
