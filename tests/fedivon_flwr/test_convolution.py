"""Convolution through frequencies against PyTorch's own."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedivon_flwr.convolution import Conv2d, correlate, inverse, spectrum
from fedivon_flwr.models import build

SIDES = st.integers(1, 15)


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 5),
    channels=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    kernel=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    more=st.tuples(SIDES, SIDES),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradients_are_those_of_conv2d(
    batch: int, channels: tuple[int, int], kernel: tuple[int, int], more: tuple[int, int], seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    size = kernel[0] + more[0] - 1, kernel[1] + more[1] - 1
    x = torch.randn(batch, channels[0], *size, generator=random)
    w = torch.randn(channels[1], channels[0], *kernel, generator=random)
    grad = torch.randn(batch, channels[1], *more, generator=random)
    ours = with_gradients(correlate, x, w, grad)
    exact = with_gradients(torch.conv2d, x.double(), w.double(), grad.double())
    # The error of a sum goes with the size of its terms: the sum itself may come out near 0.
    squares = with_gradients(torch.conv2d, x.square(), w.square(), grad.square())
    for got, wanted, square in zip(ours, exact, squares, strict=True):
        scale = max(1.0, float(square.max()) ** 0.5)
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-6 * scale)


def with_gradients(
    convolve: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    """A convolution's values, and the gradients of its inputs."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    values = convolve(x, w)
    return values.detach(), *torch.autograd.grad(values, (x, w), grad)


def test_spectra_are_those_of_fft2() -> None:
    signals = torch.randn(5, 4, 3, 2)
    re, im = spectrum(signals, (9, 8))
    wanted = torch.fft.fft2(signals, s=(9, 8), dim=(0, 1))[:5].reshape(40, 3, 2)
    torch.testing.assert_close(torch.complex(re, im), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(inverse((re, im), (9, 8), (5, 4)), signals, rtol=0, atol=1e-6)


def cases() -> list[Any]:
    """Convolutions and batches, and whether the frequency domain is for them."""
    large = {"in_channels": 32, "out_channels": 64, "kernel_size": 5}
    return [
        pytest.param(large, 8, True, id="large"),
        pytest.param(large | {"bias": False}, 8, True, id="no bias"),
        pytest.param(large, 7, False, id="few images"),
        pytest.param(large | {"kernel_size": 3}, 8, False, id="small kernel"),
        pytest.param(large | {"in_channels": 3}, 8, False, id="few channels"),
        pytest.param(large | {"padding": 2}, 8, False, id="padded"),
        pytest.param(large | {"padding": "same"}, 8, False, id="padded to the same size"),
        pytest.param(large | {"stride": 2}, 8, False, id="strided"),
        pytest.param(large | {"dilation": 2}, 8, False, id="dilated"),
        pytest.param(large | {"out_channels": 64, "groups": 2}, 8, False, id="grouped"),
        pytest.param(large | {"dtype": torch.float64}, 8, False, id="double"),
    ]


@pytest.mark.parametrize(("settings_", "batch", "spectral"), cases())
def test_a_layer_equals_pytorchs(settings_: dict[str, Any], batch: int, spectral: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(**settings_)
    ours = Conv2d(**settings_)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(batch, settings_["in_channels"], 14, 12, dtype=plain.weight.dtype)
    with patch("fedivon_flwr.convolution.correlate", wraps=correlate) as called:
        torch.testing.assert_close(ours(x), plain(x), rtol=0, atol=1e-5)
    assert called.called == spectral


def test_the_network_of_the_tables_trains_through_it_and_keeps_its_weights() -> None:
    model = build("cnn", (3, 32, 32), 10, seed=0)
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert all(isinstance(layer, Conv2d) for layer in convolutions)
    x = torch.randn(16, 3, 32, 32)
    ours = torch.autograd.grad(model(x).logsumexp(1).sum(), list(model.parameters()))
    direct = torch.autograd.grad(directly(model, x).logsumexp(1).sum(), list(model.parameters()))
    for got, wanted in zip(ours, direct, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def directly(model: nn.Module, x: Tensor) -> Tensor:
    """The model's outputs by PyTorch's convolution, a few images at a time."""
    return torch.cat([model(part) for part in torch.split(x, 4)])


def test_draws_of_weights_are_vectorised_over() -> None:
    layer = Conv2d(32, 32, 5)
    x, weights = torch.randn(8, 32, 8, 8), torch.randn(3, *layer.weight.shape)
    one = [functional_call(layer, {"weight": weight}, (x,)) for weight in weights]
    together = vmap(lambda weight: functional_call(layer, {"weight": weight}, (x,)))(weights)
    torch.testing.assert_close(together, torch.stack(one))


def test_outputs_are_channels_last() -> None:
    assert correlate(torch.randn(2, 3, 8, 8), torch.randn(4, 3, 5, 5)).is_contiguous(memory_format=torch.channels_last)
