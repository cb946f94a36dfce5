"""Prediction: softmax at the posterior mean, or averaged over weights drawn from the posterior."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedivon_flwr.data import channels_last
from fedivon_flwr.posterior import DiagGaussian, Layout

# On a CPU the activations of larger batches leave the cache, and vmap turns convolutions into grouped ones, which
# are 2 to 4 times slower than one draw after the other. 8 draws elsewhere is a guess, not a measurement.
CPU_BATCH = 128
CHUNK = {"cpu": 1}
CHUNK_OTHERWISE = 8


@dataclass(frozen=True)
class Partial:
    """A Monte Carlo prediction under way: the probabilities `(N, K)` summed over the draws so far."""

    draws: int
    total: Tensor


def predict_mean(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    """Class probabilities `(N, K)` with the weights the model has, in float64 on the CPU."""
    device = _device(model)
    with _evaluating(model), torch.inference_mode():
        probs = [_softmax(model(part)) for part in _parts(batches, device)]
    return torch.cat(probs)  # out here, so that the result is no inference tensor


def outputs(model: nn.Module, batches: Iterable[Tensor]) -> list[Tensor]:
    """What a network, or a part of one, gives for every batch, without gradients."""
    with _evaluating(model), torch.no_grad():
        return [model(part) for part in _parts(batches, _device(model))]


def predict_mc(
    model: nn.Module,
    layout: Layout,
    posterior: DiagGaussian,
    batches: Iterable[Tensor],
    samples: int,
    generator: torch.Generator,
    chunk: int | None = None,
    begun: Partial | None = None,
    each: Callable[[Partial], None] | None = None,
) -> Tensor:
    """``1/S Σ_s softmax f(x; θ_s)`` with ``θ_s ~ q``: class probabilities `(N, K)`, in float64 on the CPU.

    The model lends its code, buffers and frozen parameters; its weights are neither used nor changed. `chunk`
    draws go through it at once; neither that nor the size of the batches changes the outcome. The inputs are
    held in memory, since each draw is used for all of them. `each` is shown the sum after every chunk; given back
    as `begun`, with the generator seeded as before, the prediction goes on from there to the same outcome.

    >>> model = nn.Linear(2, 3)
    >>> sure = DiagGaussian(torch.zeros(9), torch.full((9,), 1e12))
    >>> predict_mc(model, Layout.of(model), sure, [torch.ones(1, 2)], 2, torch.Generator())
    tensor([[0.3333, 0.3333, 0.3333]], dtype=torch.float64)
    """
    device = posterior.mean.device
    if chunk is None:
        chunk = CHUNK.get(device.type, CHUNK_OTHERWISE)
    if samples < 1 or chunk < 1:
        raise ValueError("samples and chunk must be at least 1")
    parts = list(_parts(batches, device))
    done, total = (begun.draws, begun.total.clone()) if begun else (0, None)
    with _evaluating(model), torch.inference_mode():
        for _ in range(done):
            posterior.sample(1, generator)
        for start in range(done, samples, chunk):
            # row by row: one draw of several rows gives other numbers than as many draws of one
            rows = [posterior.sample(1, generator) for _ in range(min(chunk, samples - start))]
            named = layout.split(torch.cat(rows))
            drawn = torch.cat([_softmax(_logits(model, named, part)).sum(0) for part in parts])
            total = drawn if total is None else total.add_(drawn)
            if each is not None:
                each(Partial(start + len(rows), total))
    assert total is not None
    return total / samples  # out here, so that the result is no inference tensor


def _logits(model: nn.Module, named: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Logits `(draws, N, K)` for weights stacked along their first dimension."""
    if len(next(iter(named.values()))) == 1:
        only = {name: weights[0] for name, weights in named.items()}
        return functional_call(model, only, (inputs,))[None]  # type: ignore[no-any-return]
    return vmap(lambda one: functional_call(model, one, (inputs,)))(named)  # type: ignore[no-any-return]


def _softmax(logits: Tensor) -> Tensor:
    return logits.cpu().softmax(-1, dtype=torch.float64)


def _parts(batches: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """The inputs on the device, in the size and memory order in which it is fastest."""
    for batch in batches:
        for part in torch.split(batch, CPU_BATCH) if device.type == "cpu" else [batch]:
            moved = part.to(device)
            yield channels_last(moved) if moved.ndim == 4 else moved


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module is back in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
