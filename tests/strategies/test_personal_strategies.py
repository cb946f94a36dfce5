"""The server halves of the personal methods, by hand."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from grid import SMALL, LocalGrid

import strategies
from fedivon_flwr.errors import UserError
from fedivon_flwr.models import build
from fedivon_flwr.records import NDArrays, from_record, to_record
from fedivon_flwr.settings import Settings
from strategies.base import FederatedStrategy, Reply, scores_amiss
from strategies.pfedbayes import PFedBayes
from strategies.pfedme import Options as MeOptions
from strategies.pfedme import PFedMe
from strategies.pfedvem import PFedVEM

METHODS = ["local", "fedper", "fedrep", "pfedme", "pfedbayes", "pfedvem"]


def reply(client: int, examples: int, arrays: dict[str, Any], **metrics: float) -> Reply:
    found = {key: np.array(value, np.float32) for key, value in arrays.items()}
    return Reply(client, examples, found, {key.replace("_", "-"): value for key, value in metrics.items()})


def test_pfedvem_trusts_a_head_by_its_confidence() -> None:
    first = {"mean/features.w": [0.0], "mean/head.w": [0.0]}
    second = {"mean/features.w": [4.0], "mean/head.w": [4.0]}
    replies = [reply(0, 10, first, head_variance=0.5), reply(1, 30, second, head_variance=1.5)]
    combined = PFedVEM().combine(replies, replies[0].arrays)
    assert combined["mean/features.w"] == pytest.approx([3.0])  # 30 of 40 examples
    assert combined["mean/head.w"] == pytest.approx([1.0])  # 1/1.5 of 1/0.5 + 1/1.5


@pytest.mark.parametrize("told", [{}, {"head-variance": 0.0}, {"head-variance": -1.0}])
def test_pfedvem_refuses_a_variance_that_is_none(told: dict[str, float]) -> None:
    reason = PFedVEM().refuse_metrics(told)
    assert reason is not None
    assert "head-variance" in reason
    assert PFedVEM().refuse_metrics({"head-variance": 0.1}) is None


def test_pfedme_goes_part_of_the_way() -> None:
    replies = [reply(0, 10, {"mean/w": [0.0]}), reply(1, 30, {"mean/w": [4.0]})]
    sent: NDArrays = {"mean/w": np.array([1.0], np.float32)}
    assert PFedMe().combine(replies, sent)["mean/w"] == pytest.approx([3.0])
    assert PFedMe(MeOptions(mix=0.25)).combine(replies, sent)["mean/w"] == pytest.approx([1.5])


def test_pfedbayes_averages_mean_and_rho() -> None:
    def sigma(rho: float) -> float:
        return float(np.log1p(np.exp(rho)))

    replies = [
        reply(0, 10, {"mean/w": [0.0], "hess/w": [sigma(-3.0) ** -2]}),
        reply(1, 30, {"mean/w": [4.0], "hess/w": [sigma(1.0) ** -2]}),
    ]
    combined = PFedBayes().combine(replies, replies[0].arrays)
    assert combined["mean/w"] == pytest.approx([3.0])
    assert combined["hess/w"] == pytest.approx([sigma(0.0) ** -2], rel=1e-4)
    first = PFedBayes().model_arrays(build("mlp", (1, 8, 8), 10, seed=0))
    std = PFedBayes().posterior(first).std
    assert [float(std.min()), float(std.max())] == pytest.approx([sigma(-2.5)] * 2, rel=1e-4)


def started(method: str, tamper: Any = None, **changes: Any) -> tuple[LocalGrid, FederatedStrategy, NDArrays, NDArrays]:
    config = SMALL | {"method": method, "evaluation": "none"} | changes
    settings = strategies.complete(Settings.from_config(config))
    grid, strategy = LocalGrid(settings.to_config(), settings.clients, tamper=tamper), strategies.build(settings)
    arrays = strategy.model_arrays(build("mlp", (1, 8, 8), 10, seed=0))
    result = strategy.start(grid, to_record(arrays), num_rounds=2)
    assert result.arrays is not None
    return grid, strategy, arrays, from_record(result.arrays)


@pytest.mark.parametrize("method", METHODS)
def test_whole_rounds(method: str) -> None:
    _, _, before, after = started(method)
    assert list(before) == list(after)
    for key in before:
        stays = method == "local" or (method in ("fedper", "fedrep") and "head" in key)
        assert np.array_equal(before[key], after[key]) == stays, key


@pytest.mark.parametrize("method", ["fedper", "local"])
def test_a_client_that_sends_its_own_part_is_refused(method: str) -> None:
    """What is personal must not come in, even by mistake."""
    refused: list[int] = []

    def tamper(message: Message, partition: int) -> list[Message]:
        if not message.has_error() and partition % 2:
            (record,) = message.content.array_records.values()
            record["mean/head.bias"] = to_record({"x": np.zeros(10, np.float32)})["x"]
            refused.append(partition)
        return [message]

    _, strategy, before, after = started(method, tamper)
    assert refused
    assert "keys differ" in strategy._reason
    assert np.array_equal(before["mean/head.bias"], after["mean/head.bias"])


def test_unseen_clients_are_never_asked_to_train() -> None:
    grid, strategy, _, _ = started("fedavg", **{"unseen-clients": 3})
    assert {who for _, who in grid.clients()} == {0, 1, 2}
    assert [client for client, _ in strategy.roster.online(grid, 1.0)] == [0, 1, 2, 3, 4, 5]


def test_unseen_clients_need_numbers() -> None:
    settings = Settings.from_config(SMALL | {"method": "fedavg", "unseen-clients": 3, "node-wait": 0.1})
    grid, strategy = LocalGrid(settings.to_config(), settings.clients, partitioned=False), strategies.build(settings)
    arrays = strategy.model_arrays(build("mlp", (1, 8, 8), 10, seed=0))
    with pytest.raises(UserError, match=r"with numbers \(--number\), since unseen-clients is set"):
        strategy.start(grid, to_record(arrays), num_rounds=1)


@pytest.mark.parametrize(("method", "own"), [("fedper", "hed"), ("fedrep", "hed"), ("fedper", "f"), ("fedrep", "f")])
def test_some_parameters_must_be_personal_and_some_shared(method: str, own: str) -> None:
    strategy = strategies.build(Settings.from_config({"method": method, f"{method}.own": own}))
    with pytest.raises(UserError, match=f"begin with '{own}' are all or none.*the option own"):
        strategy.model_arrays(torch.nn.Sequential(OrderedDict(f1=torch.nn.Linear(3, 2), f2=torch.nn.Linear(2, 2))))


SCORES = {f"{at}-{key}": 0.5 for at in ("global-mean", "mean", "mc") for key in ("accuracy", "ece", "nll", "brier")}


def test_the_scores_of_a_personal_model_are_refused_unless_they_are_whole() -> None:
    told = {"train-examples": 7.0}
    assert scores_amiss(told) is None  # a node without test data
    assert scores_amiss(told | SCORES) is None
    assert scores_amiss(told | {key: 0.5 for key in SCORES if key.startswith("mean")}) is None
    assert "train-examples is None" in str(scores_amiss(SCORES))
    assert "train-examples is 0.0" in str(scores_amiss(SCORES | {"train-examples": 0.0}))
    assert "mc-ece missing" in str(scores_amiss(told | {k: v for k, v in SCORES.items() if k != "mc-ece"}))


def test_the_others_are_drawn_as_if_the_unseen_were_away() -> None:
    few = started("fedavg", **{"unseen-clients": 1, "clients-per-round": 2})[0].clients()
    many = started("fedavg", **{"clients-per-round": 2})[0].clients()
    assert all(who in few for who in many if who[1] < 5)


def test_the_learning_rate_of_personal_models() -> None:
    settings = Settings.from_config({"method": "fedavg", "fedavg.lr": 0.5, "fedavg.lr-final": 0.1})
    assert strategies.build(settings).personal_config()["lr"] == pytest.approx(0.1)
    other = strategies.build(Settings.from_config({"method": "fedavg", "fedavg.personal-lr": 0.3}))
    assert other.personal_config()["lr"] == pytest.approx(0.3)
    third = strategies.build(Settings.from_config({"method": "pfedme", "pfedme.personal-lr": 0.3, "pfedme.lr": 0.2}))
    told = third.personal_config()  # of the personal weights
    assert (told["lr-personal"], told["lr"]) == (0.3, 0.2)


def test_local_clients_train_in_turn() -> None:
    grid, _, _, _ = started("local", **{"clients-per-round": 3})
    assert sorted(who for _, who in grid.clients()) == [0, 1, 2, 3, 4, 5]
    drawn = [strategies.build(Settings.from_config({"method": "local"})).draw(range(5), 3, r, "train") for r in (1, 2)]
    assert drawn == [{0, 1, 2}, {3, 4, 0}]


def test_what_decides_the_training() -> None:
    """What matters after the last round only does not, unless personal models need the clients' memory."""

    def alike(one: dict[str, Any], other: dict[str, Any], **both: Any) -> bool:
        settings = [strategies.complete(Settings.from_config({**both, **part})) for part in (one, other)]
        return strategies.training(settings[0]) == strategies.training(settings[1])

    after = {"personal": True, "personal-epochs": 3, "fedivon.personal-lr": 0.5, "fedivon.temperature": 3.0}
    assert alike({}, after)
    assert alike({"fedivon.test-ess": 7.0}, after)
    assert not alike({"fedivon.test-ess": 7.0}, after, evaluation="clients")  # with which the last round ends
    assert not alike({"fedivon.prior": "server"}, after | {"fedivon.prior": "server"})
    assert not alike({"fedivon.personalise": "w2"}, after | {"fedivon.personalise": "w2"})
    assert not alike({}, {"fedivon.lr": 0.3})
    assert alike({}, {"pfedvem.personal-lr": 0.5}, method="pfedvem")
    assert not alike({}, {"pfedvem.personal-lr": 0.5}, method="pfedvem", personal=True)
