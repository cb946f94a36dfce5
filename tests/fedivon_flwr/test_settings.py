"""Settings: what is read is what was written, and whatever is wrong is said in one sentence."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import strategies
from fedivon_flwr.errors import UserError
from fedivon_flwr.settings import Settings, read_toml
from strategies.fedivon import FedIvon

PRESETS = sorted((Path(__file__).parents[2] / "simulation" / "presets").glob("*.toml"))

configs = st.fixed_dictionaries(
    {},
    optional={
        "method": st.sampled_from(["fedivon", "fedavg"]),
        "seed": st.integers(0, 2**63 - 1),
        "rounds": st.integers(1, 10**6),
        "clients": st.integers(10, 10**4),
        "alpha": st.floats(1e-6, 1e6),
        "quantity-skew": st.floats(0, 1),
        "round-deadline": st.floats(0.1, 1e9),
        "evaluation": st.sampled_from(["server", "clients", "none"]),
        "device": st.sampled_from(["auto", "cpu", "cuda", "cuda:3"]),
        "run-dir": st.text(max_size=20),
        "tensorboard": st.booleans(),
        "fedivon.lr": st.floats(1e-9, 10),
        "fedivon.rule": st.sampled_from(["rkl", "lp"]),
        "fedivon.temperature": st.floats(0, float("inf")),
        "fedavg.lr": st.floats(1e-9, 10),
    },
)


@given(configs)
def test_config_round_trip(config: dict[str, Any]) -> None:
    settings = Settings.from_config(config)
    flat = settings.to_config()
    assert flat.items() >= config.items()
    assert all(isinstance(value, str | int | float | bool) for value in flat.values())
    assert Settings.from_config(flat) == settings
    assert Settings.from_config(flat).to_config() == flat


@given(configs)
def test_every_generated_config_builds_its_strategy(config: dict[str, Any]) -> None:
    strategy = strategies.build(Settings.from_config(config))
    assert type(strategy).__name__.lower() == config.get("method", "fedivon")


# What is wrong, and what of it the sentence must name: the key, the value, and what is allowed.
WRONG: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"roundz": 3}, ("Unknown key 'roundz'", "rounds", "round-deadline")),
    ({"options": {}}, ("Unknown key 'options'", "<method>.<key>")),
    ({"rounds": "many"}, ("'rounds'", "'many'", "integer")),
    ({"rounds": 2.0}, ("'rounds'", "2.0", "integer")),
    ({"rounds": True}, ("'rounds'", "True", "integer")),
    ({"rounds": 0}, ("'rounds'", " 0 ", "greater than or equal to 1")),
    ({"seed": -1}, ("'seed'", "-1", "greater than or equal to 0")),
    ({"seed": 2**63}, ("'seed'", str(2**63), "less than")),
    ({"alpha": float("nan")}, ("'alpha'", "nan", "finite")),
    ({"alpha": "x"}, ("'alpha'", "'x'", "number")),
    ({"quantity-skew": 1.5}, ("'quantity-skew'", "1.5", "less than or equal to 1")),
    ({"tensorboard": 1}, ("'tensorboard'", " 1 ", "boolean")),
    ({"evaluation": "yes"}, ("'evaluation'", "'yes'", "'server'", "'clients'", "'none'")),
    ({"device": "tpu"}, ("'device'", "'tpu'", "auto", "cpu", "cuda:<number>")),
    ({"device": "cuda:x"}, ("'device'", "'cuda:x'", "auto", "cpu", "cuda:<number>")),
    ({"dataset": 3}, ("'dataset'", " 3 ", "string")),
    ({"clients": 5}, ("clients-per-round (10)", "must not exceed", "clients (5)")),
    ({"min-replies": 11}, ("min-replies (11)", "must not exceed", "clients-per-round (10)")),
    ({"method": "fedsgd"}, ("Unknown method 'fedsgd'", "fedavg", "fedivon")),
    ({"fedsgd.lr": 0.1}, ("'fedsgd'", "fedavg", "fedivon")),
    ({"fedivon.nope": 1}, ("Unknown key 'fedivon.nope'", "fedivon.lr", "fedivon.rule")),
    ({"fedivon.lr": -1.0}, ("'fedivon.lr'", "-1.0", "greater than 0")),
    ({"fedivon.lr": "fast"}, ("'fedivon.lr'", "'fast'", "number")),
    ({"fedivon.lr": [0.1]}, ("'fedivon.lr'", "[0.1]", "number")),
    ({"fedivon.lr": float("inf")}, ("'fedivon.lr'", "inf", "finite")),
    ({"fedivon.rule": "median"}, ("'fedivon.rule'", "'median'", "'rkl'", "'lp'")),
    ({"method": "fedavg", "fedavg.lr": 0}, ("'fedavg.lr'", " 0 ", "greater than 0")),
]


@pytest.mark.parametrize(("config", "named"), WRONG, ids=[str(config) for config, _ in WRONG])
def test_what_is_wrong_is_one_sentence(config: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        strategies.build(Settings.from_config(config))
    message = str(caught.value)
    assert all(part in message for part in named), message
    assert_one_sentence(message)


def assert_one_sentence(message: str) -> None:
    assert "\n" not in message
    assert message.endswith(".")
    assert ". " not in message
    assert len(message) < 600


def test_bounds_themselves_are_allowed() -> None:
    config = {"clients": 10, "clients-per-round": 10, "min-replies": 10, "rounds": 1, "quantity-skew": 1.0, "seed": 0}
    assert Settings.from_config(config).to_config().items() >= config.items()


def test_a_whole_number_will_do_for_a_fraction() -> None:
    strategy = strategies.build(Settings.from_config({"fedivon.ess": 1000, "fedivon.lr": 1}))
    assert isinstance(strategy, FedIvon)
    assert strategy.ess == 1000.0
    assert strategy.train_config(1)["lr"] == 1.0


def test_the_strategy_gets_the_settings() -> None:
    config = {"clients-per-round": 7, "min-replies": 3, "round-deadline": 12.5, "node-wait": 2.5, "seed": 9}
    rounds = strategies.build(Settings.from_config(config)).rounds
    assert (rounds.clients_per_round, rounds.min_replies, rounds.deadline) == (7, 3, 12.5)
    assert (rounds.node_wait, rounds.seed, rounds.evaluate_every) == (2.5, 9, 0)
    on_clients = Settings.from_config({"evaluation": "clients", "evaluate-every": 4})
    assert strategies.build(on_clients).rounds.evaluate_every == 4


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().rounds = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "aside",
    [
        {"run-dir": "elsewhere"},
        {"device": "cpu"},
        {"tensorboard": True},
        {"checkpoint-every": 3},
        {"round-deadline": 1.0},
        {"node-wait": 1.0},
        {"fedavg.lr": 0.5},
    ],
    ids=str,
)
def test_identity_leaves_out_what_does_not_change_the_outcome(aside: dict[str, Any]) -> None:
    assert Settings.from_config(aside).to_config() != Settings().to_config()
    assert Settings.from_config(aside).identity() == Settings().identity()


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"rounds": 5}, {"model": "cnn"}, {"method": "fedavg"}, {"fedivon.lr": 0.5}, {"threads": 2}],
    ids=str,
)
def test_identity_holds_what_changes_the_outcome(other: dict[str, Any]) -> None:
    assert Settings.from_config(other).identity() != Settings().identity()


def test_read_toml_flattens_tables(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('rounds = 3 # three\ndataset = "digits"\n[fedivon]\nlr = 1e-2\nrule = "lp"\n')
    assert read_toml(path) == {"rounds": 3, "dataset": "digits", "fedivon.lr": 0.01, "fedivon.rule": "lp"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "There is no settings file"), (b"rounds = [\n", "not valid TOML"), (b"\xff\xfe", "not valid TOML")],
)
def test_read_toml_says_what_is_wrong(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "own.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=reason) as caught:
        read_toml(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_read_toml_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_toml(tmp_path)


def test_there_are_presets() -> None:
    assert {path.stem for path in PRESETS} >= {"digits", "cifar10", "svhn", "emnist"}


@pytest.mark.parametrize("method", ["fedivon", "fedavg"])
@pytest.mark.parametrize("path", PRESETS, ids=[path.stem for path in PRESETS])
def test_presets_are_valid_for_each_method(path: Path, method: str) -> None:
    config = read_toml(path)
    settings = Settings.from_config(config | {"method": method})
    strategy = strategies.build(settings)
    assert settings.to_config().items() >= config.items() - {("method", config.get("method"))}
    if (lr := config.get(f"{method}.lr")) is not None:
        assert strategy.train_config(1)["lr"] == lr
