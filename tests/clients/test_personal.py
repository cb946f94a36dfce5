"""Clients with something of their own: what stays with them, what they remember, and known answers of the methods."""

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from grid import LocalGrid
from torch import nn
from torch.nn.functional import cross_entropy, softplus

import clients.pfedme
import strategies
from clients import CLIENTS
from clients.base import LocalData, TorchClient, Work, _state, named
from clients.fedavg import FedAvgClient
from clients.fedivon import FedIvonClient, personal_arrays
from clients.fedper import FedPerClient
from clients.fedrep import FedRepClient
from clients.local import LocalClient
from clients.pfedbayes import PFedBayesClient, to_arrays
from clients.pfedme import PFedMeClient
from clients.pfedvem import PFedVEMClient
from fedivon_flwr.data import load
from fedivon_flwr.errors import UserError
from fedivon_flwr.meanfield import MeanField
from fedivon_flwr.models import build
from fedivon_flwr.posterior import DiagGaussian, Layout, barycentre
from fedivon_flwr.records import NDArrays, flat, model_arrays, to_record
from fedivon_flwr.settings import Settings
from strategies.base import FederatedStrategy, Reply
from strategies.fedivon import FedIvon
from strategies.fedivon import Options as FedIvonOptions

TOLD: dict[str, Any] = {"server-round": 1, "seed": 0, "batch-size": 32, "local-epochs": 1, "eval-samples": 4}
ADAM = TOLD | {"lr": 1e-3}
HEADS = ("head.weight", "head.bias")
COUNT = 60


def mlp() -> nn.Module:
    return build("mlp", (1, 8, 8), 10, seed=3)


def data(count: int = COUNT) -> LocalData:
    return LocalData.part(load("digits"), np.arange(count))


def fit(client: TorchClient, config: dict[str, Any], arrays: NDArrays | None = None) -> NDArrays:
    """What the client sends back."""
    given = arrays or model_arrays(client.model, client.first_hess)
    found, _, _ = client.fit(list(given.values()), config)
    return dict(zip(client.shared_keys(Work.model_validate(config)), found, strict=True))


# What stays with the client


@pytest.mark.parametrize("kind", [FedAvgClient, FedPerClient, FedIvonClient])
def test_a_head_of_its_own_is_neither_sent_nor_lost(kind: type[TorchClient]) -> None:
    """The prefix is a general facility: it works with every method."""
    config = ADAM | {"own": "head"} | ({"ess": 100.0, "lr": 0.1} if kind is FedIvonClient else {})
    first = kind(mlp(), data())
    sent = fit(first, config)
    assert not any("head" in key for key in sent)
    assert {key.split("/")[1] for key in first.memory} == set(HEADS)
    assert {key.split("/")[0] for key in first.memory} == {key.split("/")[0] for key in sent}

    again = kind(mlp(), data())
    again.memory = dict(first.memory)
    given = model_arrays(mlp(), again.first_hess)
    received = again._receive(list(given.values()), Work.model_validate(config))
    for key in received:
        assert np.array_equal(received[key], first.memory.get(key, given[key]))
    for name in HEADS:
        assert torch.equal(again.model.get_parameter(name), torch.from_numpy(first.memory[f"mean/{name}"]))


def test_local_sends_nothing_and_goes_on_from_itself() -> None:
    config = ADAM | {"own": ""}
    client = LocalClient(mlp(), data())
    assert fit(client, config) == {}
    once = dict(client.memory)
    reference = FedAvgClient(mlp(), data())
    alone = fit(reference, ADAM)
    assert all(np.array_equal(once[key], alone[key]) for key in alone)
    fit(client, config | {"server-round": 2}, model_arrays(mlp()))
    twice = fit(FedAvgClient(mlp(), data()), ADAM | {"server-round": 2}, alone)
    assert all(np.array_equal(client.memory[key], twice[key]) for key in twice)


def test_fedrep_fits_the_head_to_the_base_that_came_and_then_the_base() -> None:
    seen: list[tuple[bool, bool]] = []
    client = FedRepClient(mlp(), data())
    before = {name: p.detach().clone() for name, p in client.model.named_parameters()}

    def watch(module: nn.Module, inputs: object, output: object) -> None:
        moved = {name: not torch.equal(p, before[name]) for name, p in module.named_parameters()}
        seen.append((any(moved[name] for name in HEADS), any(moved[name] for name in moved if name not in HEADS)))

    client.model.register_forward_hook(watch)
    fit(client, ADAM | {"own": "head", "head-epochs": 2, "local-epochs": 1})
    assert [base for _, base in seen[:5]] == [False] * 5  # two epochs of two batches, and the first of the base's own
    assert seen[-1] == (True, True)
    assert len(seen) == 6


# The message and the memory of a node


@pytest.mark.parametrize("method", ["local", "fedper", "fedrep", "pfedbayes", "pfedvem"])
def test_a_node_remembers_between_messages_and_forgets_nothing_by_evaluating(method: str) -> None:
    config = {"method": method, "clients": 4, "clients-per-round": 4, "rounds": 2, "partitioner": "iid"}
    settings = strategies.complete(Settings.from_config({**config, "evaluation": "none"}))
    grid, strategy = LocalGrid(settings.to_config(), settings.clients), strategies.build(settings)
    arrays = to_record(strategy.model_arrays(mlp()))
    result = strategy.start(grid, arrays, num_rounds=2)
    assert result.arrays is not None
    kept = {node: state["fedivon.memory"] for node, state in grid.states.items()}
    assert len(kept) == 4
    replies = strategy.personal(grid, result.arrays, ConfigRecord({"eval-samples": 2}), [0, 1, 2, 3])
    assert [reply.client for reply in replies] == [0, 1, 2, 3]
    assert all(grid.states[node]["fedivon.memory"] is memory for node, memory in kept.items())
    again = strategy.personal(grid, result.arrays, ConfigRecord({"eval-samples": 2}), [2])
    assert again[0].metrics == replies[2].metrics


def test_a_node_without_a_partition_goes_by_its_id(tmp_path: Path) -> None:
    client = FedPerClient(mlp(), data())
    context = Context(1, 77, {"state-dir": str(tmp_path)}, RecordDict(), {})
    state = _state(client, context, Work(run="r"))
    assert state.folder == tmp_path / "r" / "node-77"


# Known answers


def test_a_personal_model_of_fedivon_is_the_posterior_under_the_servers() -> None:
    """With β = ∞ the server's posterior itself; with the prior of the round's training or not."""
    config = TOLD | {"lr": 0.1, "ess": 100.0, "hess-init": 1.0, "weight-decay": 1e-3, "prior": "zero"}
    arrays = model_arrays(mlp(), 1.0)

    def personal(temperature: float) -> tuple[TorchClient, DiagGaussian]:
        client = FedIvonClient(mlp(), data())
        told = config | {"temperature": temperature, "personal": True}
        posterior = client.personalise(arrays, told, Work.model_validate(told))
        assert posterior is not None
        return client, posterior

    prior = DiagGaussian.from_hess(flat(arrays, "mean/"), flat(arrays, "hess/"), 100.0, 1e-3)
    _, kept = personal(math.inf)
    torch.testing.assert_close(kept.mean, prior.mean)
    torch.testing.assert_close(kept.precision, prior.precision)
    client, free = personal(1.0)
    assert float((free.mean - prior.mean).abs().max()) > 1e-3
    weights = torch.cat([p.detach().reshape(-1) for p in client.model.parameters()])
    assert torch.equal(weights, free.mean)  # what predicts at the mean
    strong = personal(100.0)[1]
    assert float((strong.mean - prior.mean).norm()) < float((free.mean - prior.mean).norm())


def told_by(strategy: FederatedStrategy, **changes: Any) -> dict[str, Any]:
    """What a server tells a client that makes a personal model."""
    return TOLD | strategy.personal_config() | {key.replace("_", "-"): value for key, value in changes.items()}


def personal(arrays: NDArrays, config: dict[str, Any]) -> DiagGaussian:
    """The personal posterior of a FedIvon client."""
    client, work = FedIvonClient(mlp(), data()), Work.model_validate(config)
    with client._seeded(work):
        found = client.personalise(arrays, config, work)
    assert found is not None
    return found


def test_without_a_prior_a_personal_model_has_no_width() -> None:
    """β = 0 is maximum likelihood: the limit of the posterior is a point."""
    config = told_by(FedIvon(FedIvonOptions(temperature=0.0)))
    client = FedIvonClient(mlp(), data())
    assert client.personalise(model_arrays(mlp(), 1.0), config, Work.model_validate(config)) is None
    _, _, metrics = client.evaluate(list(model_arrays(mlp(), 1.0).values()), config)
    assert "mean-nll" in metrics
    assert "mc-nll" not in metrics


def test_a_personal_model_predicts_as_wide_as_the_global_one() -> None:
    arrays = model_arrays(mlp(), 1.0)
    plain, wide = (told_by(FedIvon(FedIvonOptions(ess=100.0, test_ess=ess))) for ess in (0.0, 20.0))
    narrow, broad = personal(arrays, plain), personal(arrays, wide)
    assert torch.equal(narrow.mean, broad.mean)
    torch.testing.assert_close(narrow.precision, 5 * broad.precision)


@pytest.mark.parametrize("temperature", [1.0, 100.0, math.inf])
def test_the_servers_posterior_keeps_its_width_where_lambda_is_the_number_of_examples(temperature: float) -> None:
    """λ is the client's number of examples in the loss; the prior is the server's, with the server's λ."""
    strategy = FedIvon(FedIvonOptions(ess="local", temperature=temperature, weight_decay=1e-3))
    strategy.load_state({"ess": 4.0 * COUNT})
    config, arrays = told_by(strategy), model_arrays(mlp(), 1.0)
    found, server = personal(arrays, config), strategy.posterior(arrays)
    assert server is not None
    if temperature == math.inf:
        torch.testing.assert_close(found.mean, server.mean)
        torch.testing.assert_close(found.precision, server.precision)
        return
    # the same as a client whose λ is the server's, with a prior as much stronger
    other = config | {"local-ess": False, "temperature": 4.0 * temperature}
    same = personal(arrays, other)
    assert torch.equal(found.mean, same.mean)
    assert torch.equal(found.precision, same.precision)


@pytest.mark.parametrize("temperature", [1.0, 1e6, 1e35, math.inf])
def test_rounds_under_the_servers_prior_keep_its_width_too(temperature: float) -> None:
    """λ is the client's number of examples; β → ∞ gives the server its own posterior back."""
    strategy = FedIvon(
        FedIvonOptions(ess="local", prior="server", temperature=temperature, weight_decay=1e-3, rule="conflation")
    )
    arrays = model_arrays(mlp(), 1.0)
    fresh = FedIvonClient(mlp(), data()).fit(list(arrays.values()), TOLD | strategy.train_config(1))[0]
    strategy.load_state({"ess": 4.0 * COUNT})
    config, server = TOLD | strategy.train_config(2), strategy.posterior(arrays)
    client = FedIvonClient(mlp(), data())
    sent = fit(client, config, arrays)
    combined = strategy.combine([Reply(0, COUNT, sent, {})], arrays)
    found = strategy.posterior(combined)
    assert found is not None
    assert server is not None
    torch.testing.assert_close(found.precision, server.precision, rtol=1e-3, atol=0.0)  # the data add little in a round
    if temperature > 1:
        torch.testing.assert_close(found.mean, server.mean, rtol=1e-4, atol=1e-5)
    else:
        assert float((found.mean - server.mean).abs().max()) > 1e-3
        assert not np.array_equal(fresh[0], sent[client.keys[0]])  # in round 1 λ̃ is the client's own


def test_a_remembered_posterior_keeps_the_lambda_that_it_was_trained_with() -> None:
    strategy = FedIvon(FedIvonOptions(ess="local", personalise="rkl", personal_weight=1.0, weight_decay=1e-3))
    client, arrays = FedIvonClient(mlp(), data()), model_arrays(mlp(), 1.0)
    own = fit(client, TOLD | strategy.train_config(1), arrays)
    strategy.load_state({"ess": 4.0 * COUNT})
    for test_ess in (0.0, 8.0 * COUNT):  # the ratio to the server's stays
        config = told_by(strategy, test_ess=test_ess)
        found = client.personalise(arrays, config, Work.model_validate(config))
        trained = DiagGaussian.from_hess(flat(own, "mean/"), flat(own, "hess/"), COUNT, 1e-3)
        assert found is not None
        torch.testing.assert_close(found.precision, trained.precision * (test_ess / (4.0 * COUNT) if test_ess else 1.0))


@pytest.mark.parametrize("method", ["fedavg", "fedper", "local"])
def test_the_servers_model_is_scored_where_it_is_a_whole_one(method: str) -> None:
    strategy = strategies.build(Settings.from_config({"method": method}))
    config = told_by(strategy) | ({} if strategy.own is None else {"own": strategy.own})
    client = CLIENTS[method](mlp(), data())
    fit(client, config)
    given = model_arrays(mlp())
    _, _, metrics = client.evaluate(list(given.values()), config)
    assert ("global-mean-accuracy" in metrics) == (method == "fedavg")
    if method == "local":  # its model is what it has trained, and is not trained further
        assert all(np.array_equal(client.weights()[key], client.memory[key]) for key in client.weights())


def test_a_model_that_diverged_knows_nothing() -> None:
    labels = torch.tensor([1, 1, 2])
    found = named("mean", torch.tensor([[0.0, 1.0, 0.0], [math.nan] * 3, [0.0, 0.0, 1.0]]).double(), labels)
    assert found["mean-nll"] == pytest.approx(math.log(3) / 3)
    assert found["mean-accuracy"] == pytest.approx(2 / 3)


def test_the_draws_of_a_prediction_are_not_the_noise_of_the_training() -> None:
    client, work = FedIvonClient(mlp(), data()), Work()
    assert client._seed(work).integers(2**63) != client._seed(work, "predict").integers(2**63)


@pytest.mark.parametrize(("kind", "weight"), [("rkl", 0.3), ("w2", 0.3), ("rkl", 0.0), ("w2", 1.0)])
def test_a_projection_lies_between_the_server_and_the_clients_last_posterior(kind: str, weight: float) -> None:
    config = TOLD | {"lr": 0.1, "ess": 100.0, "weight-decay": 1e-3, "personalise": kind, "personal-weight": weight}
    client = FedIvonClient(mlp(), data())
    own = fit(client, config)
    arrays = {key: array + (0.5 if key.startswith("hess") else 0.1) for key, array in own.items()}
    assert all(np.array_equal(client.memory[key], own[key]) for key in own)
    found = client.personalise(arrays, config, Work.model_validate(config))
    assert found is not None
    server, last = (client.posterior(part, config) for part in (arrays, own))
    if kind == "rkl":
        precision = (1 - weight) * server.precision + weight * last.precision
        mean = ((1 - weight) * server.precision * server.mean + weight * last.precision * last.mean) / precision
    else:
        mean = (1 - weight) * server.mean + weight * last.mean
        precision = ((1 - weight) * server.std + weight * last.std) ** -2
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.precision, precision)
    alone = personal_arrays(mlp(), arrays, data(), config)  # at a site, after the federation has ended
    trained = fit(FedIvonClient(mlp(), data()), config, arrays)
    there, here = (client.posterior(part, config) for part in (arrays, trained))
    expected = barycentre(there, here, weight, kind)  # type: ignore[arg-type]
    torch.testing.assert_close(flat(alone, "mean/"), expected.mean)
    torch.testing.assert_close(client.posterior(alone, config).precision, expected.precision)
    fewer = config | {"ess": 400.0, "local-ess": True}  # 400 is the server's; the site trains with its examples
    alone = personal_arrays(mlp(), arrays, data(), fewer)
    local = fit(FedIvonClient(mlp(), data()), config | {"ess": float(COUNT)}, arrays)
    there, here = (client.posterior(part, config | {"ess": ess}) for part, ess in ((arrays, 400.0), (local, COUNT)))
    expected = barycentre(there, here, weight, kind)  # type: ignore[arg-type]
    torch.testing.assert_close(flat(alone, "mean/"), expected.mean)
    torch.testing.assert_close(client.posterior(alone, fewer).precision, expected.precision)
    new = FedIvonClient(mlp(), data())  # never trained: the server's
    unmoved = new.personalise(arrays, config, Work.model_validate(config))
    assert unmoved is not None
    torch.testing.assert_close(unmoved.mean, server.mean)


def test_pfedme_finds_the_proximal_operator_of_a_quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    """``f(θ) = ½ ‖X θ − y‖²`` has ``prox(w) = (XᵀX + μ I)⁻¹ (Xᵀ y + μ w)``; then ``w ← w − η μ (w − θ)``."""
    generator = np.random.default_rng(0)
    x, target = generator.normal(size=(20, 3)).astype(np.float32), torch.from_numpy(generator.normal(size=(20, 2)))
    model = nn.Linear(3, 2, bias=False)
    local = LocalData.of(x, np.arange(20) % 2, x, np.arange(20) % 2)
    client = PFedMeClient(model, local)
    w = model.weight.detach().double().clone()
    config = TOLD | {"batch-size": 20, "lr": 0.02, "lr-personal": 0.01, "penalty": 4.0, "inner-steps": 500}
    work = Work.model_validate(config)
    order = client._seed(work).permutation(20)
    ordered = target[order].float()
    monkeypatch.setattr(clients.pfedme, "cross_entropy", lambda out, _: 0.5 * (out - ordered).square().sum())
    sent = fit(client, config)
    features = torch.from_numpy(x).double()
    prox = torch.linalg.solve(features.T @ features + 4.0 * torch.eye(3), features.T @ target + 4.0 * w.T).T
    torch.testing.assert_close(model.weight.detach().double(), prox, atol=1e-4, rtol=1e-4)
    expected = w - 0.02 * 4.0 * (w - prox)
    torch.testing.assert_close(torch.from_numpy(sent["mean/weight"]).double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("noise", [1.0, 0.1])
def test_pfedbayes_trains_a_real_gaussian(noise: float) -> None:
    """Its first step follows the gradient of ``E_q[ℓ̄] + ζ/N KL``, and the copy follows the personal Gaussian."""
    config = TOLD | {"batch-size": COUNT, "lr": 1e-2, "zeta": 10.0, "mc-samples": 1, "noise": noise}
    client, layout = PFedBayesClient(mlp(), data()), Layout.of(mlp())
    arrays = model_arrays(mlp(), float(softplus(torch.tensor(-2.5)) ** -2))
    client.memory = to_arrays(DiagGaussian(flat(arrays, "mean/") + 0.05, flat(arrays, "hess/") * 2), layout)
    before, server = dict(client.memory), client._gaussian(arrays)
    own = MeanField.of(client._gaussian(client.memory))
    work = Work.model_validate(config)
    with client._seeded(work):
        inputs, labels = next(client.epochs(work))
        logits = torch.func.functional_call(client.model, layout.split(own.sample(noise)), (inputs,))
    loss = cross_entropy(logits, labels) + 10.0 / COUNT * own.gaussian().kl(server)
    slopes = torch.autograd.grad(loss, own.leaves)
    sent = fit(client, config, arrays)
    after = MeanField.of(client._gaussian(client.memory))
    for moved, start, slope in zip(after.leaves, own.leaves, slopes, strict=True):
        clear = slope.abs() > 1e-4  # Adam's first step is lr times the sign
        torch.testing.assert_close((moved - start)[clear], -1e-2 * slope.sign()[clear], atol=2e-4, rtol=0.0)
    assert not np.array_equal(before["hess/head.bias"], client.memory["hess/head.bias"])
    copy, predicts = client._gaussian(sent), client.posterior(sent, config)
    assert float(own.detached().kl(copy)) < float(own.detached().kl(server))
    torch.testing.assert_close(predicts.std, noise * copy.std)  # it predicts with the noise of the training


def test_the_width_of_a_mean_field_goes_there_and_back() -> None:
    given = DiagGaussian(torch.randn(5), torch.tensor([1e-2, 1.0, 160.0, 1e4, 1e8]))
    torch.testing.assert_close(MeanField.of(given).detached().precision, given.precision, rtol=1e-3, atol=0.0)


def test_pfedvem_estimates_how_far_the_head_has_gone() -> None:
    config = TOLD | strategies.build(Settings.from_config({"method": "pfedvem"})).train_config(1)
    client = PFedVEMClient(mlp(), data())
    arrays = model_arrays(mlp())
    sent = fit(client, config, arrays)
    centre = np.concatenate([arrays[f"mean/{name}"].ravel() for name in HEADS])
    mean, precision = client.memory["head"], client.memory["precision"]
    expected = ((1 / precision).sum() + ((mean - centre) ** 2).sum()) / len(mean)
    assert client.told["head-variance"] == pytest.approx(expected, rel=1e-4)
    assert float(client.memory["head-variance"]) == pytest.approx(expected, rel=1e-4)
    assert np.array_equal(np.concatenate([sent[f"mean/{name}"].ravel() for name in HEADS]), mean)
    with pytest.raises(UserError, match="named 'head'"):
        fit(PFedVEMClient(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), data()), config)


def test_the_e_step_of_pfedvem_ends_at_the_prior_where_the_data_say_nothing() -> None:
    """Inputs that are all 0 tell of the bias only: ``KL(q ‖ N(μ_g, ρ²))`` decides the weights alone."""
    model = nn.Sequential(OrderedDict(features=nn.Linear(2, 2, bias=False), head=nn.Linear(2, 3)))
    x, y = np.zeros((4, 2), np.float32), np.arange(4) % 3
    client = PFedVEMClient(model, LocalData.of(x, y, x, y))
    strategy = strategies.build(Settings.from_config({"method": "pfedvem", "pfedvem.head-steps": 3000}))
    client.memory = {
        "head": np.full(9, 2.0, np.float32),
        "precision": np.full(9, 400.0, np.float32),
        "head-variance": np.array(0.25, np.float32),
    }
    centre = model.get_parameter("head.weight").detach().clone().reshape(-1)
    fit(client, TOLD | strategy.train_config(1))
    mean, std = torch.from_numpy(client.memory["head"]), torch.from_numpy(client.memory["precision"]).rsqrt()
    torch.testing.assert_close(mean[:6], centre, atol=0.02, rtol=0.0)
    torch.testing.assert_close(std[:6], torch.full((6,), 0.5), atol=0.02, rtol=0.0)
    assert float((mean[6:] - mean[6:].mean()).abs().max()) > 0.05  # the labels are not equally many


def test_only_the_head_of_pfedvem_is_uncertain() -> None:
    config = TOLD | strategies.build(Settings.from_config({"method": "pfedvem"})).train_config(1)
    client = PFedVEMClient(mlp(), data())
    found = client.personalise(model_arrays(mlp()), config, Work.model_validate(config))
    assert len(found.mean) == sum(client.model.get_parameter(name).numel() for name in HEADS)
    inputs = torch.randn(7, 1, 8, 8)
    probabilities = client.predict(found, [inputs[:4], inputs[4:]], 3, torch.Generator().manual_seed(1))
    generator, expected = torch.Generator().manual_seed(1), torch.zeros(7, 10, dtype=torch.float64)
    for _ in range(3):  # the whole network, with a head that was drawn
        head = Layout.of(client.model.get_submodule("head")).split(found.sample(1, generator)[0])
        drawn = torch.func.functional_call(client.model, {f"head.{key}": p for key, p in head.items()}, (inputs,))
        expected += drawn.detach().double().softmax(-1) / 3
    torch.testing.assert_close(probabilities, expected, atol=1e-6, rtol=1e-5)
