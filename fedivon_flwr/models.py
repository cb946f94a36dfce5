"""The networks of the experiments, by name, and a user's own by ``package.module:function``.

None has batch norm or dropout: the posterior covers every weight, and averaging running statistics over clients
is no Gaussian product. Each is ``features`` followed by a linear ``head``; methods that share only the
base go by these prefixes of the parameter names.
"""

from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise

import torch
from torch import nn

from fedivon_flwr.convolution import Conv2d
from fedivon_flwr.errors import UserError
from fedivon_flwr.registry import Registry

Shape = tuple[int, ...]
ModelFn = Callable[[Shape, int], nn.Module]
MODELS: Registry[ModelFn] = Registry("model")


def build(name: str, shape: Shape, classes: int, seed: int) -> nn.Module:
    """A freshly initialised network for inputs of a shape; equal seeds give equal weights.

    `name` is a registered name or ``package.module:function``; the function takes the shape, `(C, H, W)` or
    `(features,)`, and the number of classes.

    >>> model = build("mlp", (1, 8, 8), 10, seed=0)
    >>> model(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    >>> build("cnn", (1, 8, 8), 10, seed=0)
    Traceback (most recent call last):
    fedivon_flwr.errors.UserError: Model 'cnn' needs images of at least 16 by 16, not inputs of shape (1, 8, 8); \
use larger images or the model 'mlp', which takes any shape.
    """
    make = _imported(name) if ":" in name else MODELS[name]
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would reseed the GPUs too, whose state is not restored here
        torch.default_generator.manual_seed(seed)
        model = make(shape, classes)
    if not isinstance(model, nn.Module):
        raise UserError(f"Model '{name}' must return a torch.nn.Module, not {type(model).__name__}.")
    _probe(name, model, shape, classes)
    return model


def _imported(name: str) -> ModelFn:
    """The user's function behind ``package.module:function``."""
    path, _, attribute = name.partition(":")
    try:
        make = getattr(import_module(path), attribute)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"Model '{name}' cannot be imported ({error}); write it as 'package.module:function'."
        ) from error
    except AttributeError as error:
        raise UserError(f"Model '{name}' cannot be found: module '{path}' has no '{attribute}'.") from error
    if not callable(make):
        raise UserError(f"Model '{name}' must be a function of the input shape and the number of classes.")
    return make  # type: ignore[no-any-return]


def _probe(name: str, model: nn.Module, shape: Shape, classes: int) -> None:
    """Refuse now what would fail at the first batch; the model keeps its mode and weights."""
    modes = {module: module.training for module in model.modules()}
    first = next(model.parameters(), torch.empty(0))
    inputs = torch.zeros(2, *shape, dtype=first.dtype, device=first.device)
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode():
            given = tuple(model.eval()(inputs).shape)
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UserError(f"Model '{name}' does not take inputs of shape {shape} ({reason}).") from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    if given != (2, classes):
        raise UserError(f"Model '{name}' must give {(2, classes)} logits for 2 inputs of shape {shape}, not {given}.")


def _net(features: list[nn.Module], width: int, classes: int) -> nn.Module:
    return nn.Sequential(OrderedDict(features=nn.Sequential(*features), head=nn.Linear(width, classes)))


def _dense(*widths: int) -> list[nn.Module]:
    """Fully connected layers with ReLU, from the first width to the last."""
    return [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]


def _pooled(inputs: int, outputs: int, kernel: int, padding: int = 0) -> list[nn.Module]:
    """Convolution, 2×2 max pooling, ReLU; both of the former padded by as much.

    Pooling comes first because ReLU is monotone: the outcome is the same on a quarter of the activations.
    """
    return [Conv2d(inputs, outputs, kernel, padding=padding), nn.MaxPool2d(2, padding=padding), nn.ReLU()]


def _images(name: str, shape: Shape, least: int) -> tuple[int, int, int]:
    """The shape as (channels, height, width), if the sides are long enough for the network."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise UserError(
            f"Model '{name}' needs images of at least {least} by {least}, not inputs of shape {shape}; "
            "use larger images or the model 'mlp', which takes any shape."
        )
    channels, height, width = shape
    return channels, height, width


def _two_convs(name: str, shape: Shape, classes: int, convs: tuple[int, int], dense: tuple[int, ...]) -> nn.Module:
    """Two unpadded 5×5 convolutions, each pooled, then fully connected layers: a side of n ends as (n − 12) / 4."""
    channels, height, width = _images(name, shape, least=16)
    area = ((height - 12) // 4) * ((width - 12) // 4)
    layers = [*_pooled(channels, convs[0], 5), *_pooled(*convs, 5), nn.Flatten()]
    return _net([*layers, *_dense(convs[1] * area, *dense)], dense[-1], classes)


@MODELS.add("mlp")
def mlp(shape: Shape, classes: int) -> nn.Module:
    """Two hidden layers of 64 on inputs of any shape: the digits and tabular data."""
    return _net([nn.Flatten(), *_dense(torch.Size(shape).numel(), 64, 64)], 64, classes)


@MODELS.add("cnn")
def cnn(shape: Shape, classes: int) -> nn.Module:
    """Convolutions 32/64, fully connected 128: EMNIST, SVHN and CIFAR-10 in standard FL."""
    return _two_convs("cnn", shape, classes, (32, 64), (128,))


@MODELS.add("lenet")
def lenet(shape: Shape, classes: int) -> nn.Module:
    """Convolutions 6/16, fully connected 120/84: the small variant (LeCun et al. 1998, with ReLU and max pooling)."""
    return _two_convs("lenet", shape, classes, (6, 16), (120, 84))


@MODELS.add("pfl-cifar10")
def pfl_cifar10(shape: Shape, classes: int) -> nn.Module:
    """Convolutions 16/32, fully connected 120/84: personalised FL on CIFAR-10."""
    return _two_convs("pfl-cifar10", shape, classes, (16, 32), (120, 84))


@MODELS.add("pfl-cifar100")
def pfl_cifar100(shape: Shape, classes: int) -> nn.Module:
    """Padded 3×3 convolutions 32/64/128/256/100, global average pooling: personalised FL on CIFAR-100.

    The first four are pooled, with padding as in the public code of pFedVEM: 32 → 17 → 9 → 5 → 3 on CIFAR.
    """
    channels, _, _ = _images("pfl-cifar100", shape, least=16)
    widths = (channels, 32, 64, 128, 256)
    layers = [layer for pair in pairwise(widths) for layer in _pooled(*pair, 3, padding=1)]
    layers += [nn.Conv2d(256, 100, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return _net(layers, 100, classes)
