from pathlib import Path

import pytest
import torch
from torch import nn

from fedivon_flwr.errors import UserError
from fedivon_flwr.models import MODELS, build
from fedivon_flwr.posterior import Layout

CIFAR = (3, 32, 32)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("mlp", (1, 8, 8), 10, 64 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10),
        ("cnn", CIFAR, 10, 259_914),
        ("cnn", (1, 28, 28), 26, 1 * 32 * 25 + 32 + 32 * 64 * 25 + 64 + 64 * 16 * 128 + 128 + 128 * 26 + 26),
        ("lenet", CIFAR, 10, 62_006),
        ("pfl-cifar10", CIFAR, 10, 121_182),
        ("pfl-cifar100", CIFAR, 20, 620_936),
    ],
)
def test_number_of_parameters(name: str, shape: tuple[int, ...], classes: int, parameters: int) -> None:
    assert Layout.of(build(name, shape, classes, seed=0)).numel == parameters


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("shape", [CIFAR, (1, 28, 28), (2, 16, 21)])
def test_logits_and_head(name: str, shape: tuple[int, ...]) -> None:
    model = build(name, shape, 7, seed=0)
    assert model(torch.randn(3, *shape)).shape == (3, 7)
    head = {n: tuple(p.shape) for n, p in model.named_parameters() if n.startswith("head")}
    assert set(head) == {"head.weight", "head.bias"}
    assert head["head.bias"] == (7,)
    assert {n.partition(".")[0] for n, _ in model.named_parameters()} == {"features", "head"}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_no_batch_norm_or_dropout(name: str) -> None:
    model = build(name, CIFAR, 10, seed=0)
    assert not list(model.buffers())
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())


def test_mlp_takes_tabular_data() -> None:
    assert build("mlp", (13,), 3, seed=0)(torch.zeros(4, 13)).shape == (4, 3)


def test_pooling_before_relu_is_the_same_function() -> None:
    model = build("cnn", CIFAR, 10, seed=0)
    x = torch.randn(4, *CIFAR)
    conv1, conv2, dense = (m for m in model.features.children() if isinstance(m, nn.Conv2d | nn.Linear))  # type: ignore[union-attr]
    pool = torch.nn.functional.max_pool2d
    usual = pool(conv2(pool(conv1(x).relu(), 2)).relu(), 2).flatten(1)
    torch.testing.assert_close(model(x), model.head(dense(usual).relu()))  # type: ignore[operator]


def test_the_sides_of_pfl_cifar100_are_those_of_the_public_code() -> None:
    model = build("pfl-cifar100", CIFAR, 20, seed=0)
    sides: list[int] = []
    for module in model.modules():
        if isinstance(module, nn.MaxPool2d):
            module.register_forward_hook(lambda _, inputs, outputs: sides.append(outputs.shape[-1]))
    model(torch.zeros(2, *CIFAR))
    assert sides == [17, 9, 5, 3]


def test_seed_decides_the_weights_and_the_global_generator_is_untouched() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build("lenet", CIFAR, 10, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    same, other = build("lenet", CIFAR, 10, seed=1), build("lenet", CIFAR, 10, seed=2)
    for (name, a), b, c in zip(first.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name
    assert first.training


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"mlp"}))
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 15), (64,)])
def test_too_small_images_fail_at_build(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=f"'{name}'.*16 by 16.*{str(shape)[1:-1]}.*mlp"):
        build(name, shape, 10, seed=0)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(UserError, match="cnn, lenet, mlp, pfl-cifar10, pfl-cifar100"):
        build("resnet", CIFAR, 10, seed=0)


OWN = """
import torch
from torch import nn

def linear(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), classes))

def fixed(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(5, classes))

def two(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), 2))

def text(shape, classes):
    return "net"

number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own")
def test_own_function() -> None:
    first, same = (build("own_model_module:linear", (1, 4, 4), 3, seed=9) for _ in range(2))
    assert first(torch.zeros(2, 1, 4, 4)).shape == (2, 3)
    assert torch.equal(first[1].weight, same[1].weight)  # type: ignore[index]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own_missing_module:linear", "cannot be imported.*own_missing_module"),
        (":linear", "cannot be imported.*package.module:function"),
        ("own_model_module:missing", "'own_model_module' has no 'missing'"),
        ("own_model_module:number", "must be a function"),
        ("own_model_module:text", "must return a torch.nn.Module, not str"),
        ("own_model_module:fixed", r"does not take inputs of shape \(1, 4, 4\)"),
        ("own_model_module:two", r"must give \(2, 3\) logits .*, not \(2, 2\)"),
    ],
)
def test_own_function_refused_in_one_sentence(name: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        build(name, (1, 4, 4), 3, seed=0)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert name in message
