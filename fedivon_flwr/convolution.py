"""Convolution in the frequency domain, which makes large kernels with many channels faster on a CPU.

A valid cross-correlation ``y[p] = Σ_q x[p + q] w[q]`` is a product in the frequencies of a discrete Fourier transform
(DFT) as long as `x`: ``ŷ = x̂ · conj(ŵ)``. What wraps around falls on places that are cut off. Both gradients are of
the same kind, ``x̂' = ŷ' · ŵ`` and ``ŵ' = x̂ · conj(ŷ')``. For small images the DFT itself is a product with a small
matrix.

Mathieu, Henaff, LeCun: Fast training of convolutional networks through FFTs, ICLR 2014.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Below these the transforms cost more than they save.
LEAST_KERNEL = 25  # weights of a kernel
LEAST_CHANNELS = 32
LEAST_BATCH = 8

Size = tuple[int, int]
Complex = tuple[Tensor, Tensor]


class Conv2d(nn.Conv2d):
    """`nn.Conv2d` that goes through the frequency domain where that is faster; equal but for rounding."""

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of a batch `(N, C, H, W)`."""
        if not self._is_faster(input):
            return super().forward(input)
        outputs = correlate(input, self.weight)
        return outputs if self.bias is None else outputs + self.bias[:, None, None]

    def _is_faster(self, input: Tensor) -> bool:
        plain = self.padding == (0, 0) and self.stride == self.dilation == (1, 1) and self.groups == 1
        large = math.prod(self.kernel_size) >= LEAST_KERNEL and min(self.weight.shape[:2]) >= LEAST_CHANNELS
        on_cpu = input.device.type == "cpu" and input.dtype == self.weight.dtype == torch.float32
        return plain and large and on_cpu and input.ndim == 4 and len(input) >= LEAST_BATCH


def correlate(inputs: Tensor, weights: Tensor) -> Tensor:
    """Valid cross-correlation of `(N, C, H, W)` with `(D, C, h, w)`, channels last in memory.

    >>> x, w = torch.randn(2, 3, 8, 9), torch.randn(4, 3, 5, 2)
    >>> torch.allclose(correlate(x, w), torch.conv2d(x, w), atol=1e-4)
    True
    """
    outputs: Tensor = _Correlate.apply(inputs, weights)[0]  # type: ignore[no-untyped-call]
    return outputs


class _Correlate(torch.autograd.Function):
    """Keeps the spectra of inputs and weights for the gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        size = _sides(inputs)
        x, w = spectrum(inputs.permute(2, 3, 0, 1), size), spectrum(weights.permute(2, 3, 1, 0), size)
        height, width = _sides(weights)
        outputs = inverse(times_conj(x, w), size, (size[0] - height + 1, size[1] - width + 1))
        return _images(outputs), *x, *w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        spectra = output[1:]
        ctx.size, ctx.kernel = (_sides(tensor) for tensor in inputs)
        ctx.mark_non_differentiable(*spectra)
        ctx.save_for_backward(*spectra)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor]:
        x_re, x_im, w_re, w_im = ctx.saved_tensors
        g = spectrum(grads[0].permute(2, 3, 0, 1), ctx.size)
        inputs = None
        if ctx.needs_input_grad[0]:
            conj_w = w_re.transpose(1, 2), -w_im.transpose(1, 2)
            inputs = _images(inverse(times_conj(g, conj_w), ctx.size, ctx.size))
        weights = inverse(times_conj((x_re.transpose(1, 2), x_im.transpose(1, 2)), g), ctx.size, ctx.kernel)
        return inputs, weights.permute(3, 2, 0, 1).contiguous()


def _sides(tensor: Tensor) -> Size:
    return tensor.shape[2], tensor.shape[3]


def _images(tensor: Tensor) -> Tensor:
    """`(H, W, N, C)` as `(N, C, H, W)`, channels last in memory."""
    return tensor.permute(2, 0, 1, 3).contiguous().permute(0, 3, 1, 2)


class Tables(NamedTuple):
    """The matrices of a DFT of signals that are shorter than it, as real numbers."""

    rows: Tensor  # (frequency, re or im) × row: real signals, so half of the frequencies
    columns: Complex  # frequency × (re or im, column)
    columns_back: Complex  # (re or im, column) × frequency
    rows_back: Tensor  # row × (frequency, re or im)


@lru_cache(maxsize=64)
def tables(size: Size, part: Size) -> Tables:
    """For a DFT of `size`, and signals that are 0 (or of no interest) outside of their first `part`."""
    count = size[0] // 2 + 1
    cos, sin = _waves(size[0], count, part[0])
    rows = torch.stack([cos, -sin], 1).flatten(0, 1)
    both = torch.full((count, 1, 1), 2.0, dtype=torch.float64)  # a frequency stands for its conjugate too,
    both[0] = 1.0  # but for these
    if size[0] % 2 == 0:
        both[-1] = 1.0
    rows_back = (both * torch.stack([cos, -sin], 1)).flatten(0, 1).T / math.prod(size)
    cos, sin = _waves(size[1], size[1], part[1])
    columns = torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)
    columns_back = torch.cat([cos.T, sin.T]), torch.cat([-sin.T, cos.T])
    single = [table.float().contiguous() for table in (rows, *columns, *columns_back, rows_back)]
    return Tables(single[0], (single[1], single[2]), (single[3], single[4]), single[5])


def _waves(length: int, frequencies: int, places: int) -> Complex:
    angle = torch.arange(frequencies, dtype=torch.float64)[:, None] * torch.arange(places, dtype=torch.float64)
    angle *= 2 * math.pi / length
    return angle.cos(), angle.sin()


def spectrum(signals: Tensor, size: Size) -> Complex:
    """Real and imaginary part, `(frequency, A, B)`, of the DFTs of real signals `(H, W, A, B)` along H and W."""
    height, width, *rest = signals.shape
    known = tables(size, (height, width))
    half = (known.rows @ signals.reshape(height, -1)).view(len(known.rows) // 2, 2 * width, -1)
    re, im = (torch.bmm(part.expand(len(half), -1, -1), half).view(-1, *rest) for part in known.columns)
    return re, im


def inverse(spectra: Complex, size: Size, part: Size) -> Tensor:
    """The first `part` of the real signals that have these DFTs: `(H, W, A, B)`."""
    known, count = tables(size, part), size[0] // 2 + 1
    re, im = (values.view(count, size[1], -1) for values in spectra)
    from_re, from_im = (table.expand(count, -1, -1) for table in known.columns_back)
    half = torch.baddbmm(torch.bmm(from_re, re), from_im, im)
    return (known.rows_back @ half.view(2 * count, -1)).view(*part, *spectra[0].shape[1:])


def times_conj(a: Complex, b: Complex) -> Complex:
    """``a · conj(b)``, a product of matrices for every frequency, with three real products instead of four."""
    both = torch.bmm(a[0] + a[1], b[0])
    re = torch.baddbmm(both, a[1], b[1] - b[0])
    im = torch.baddbmm(both, a[0], b[0] + b[1], alpha=-1)
    return re, im
