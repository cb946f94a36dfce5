from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedivon_flwr.models import build
from fedivon_flwr.posterior import DiagGaussian, Layout
from fedivon_flwr.predict import Partial, predict_mc, predict_mean

SHAPE = (1, 16, 16)


def around(model: nn.Module, std: float) -> tuple[Layout, DiagGaussian]:
    layout = Layout.of(model)
    mean = layout.flatten({n: p.detach() for n, p in model.named_parameters() if p.requires_grad})
    return layout, DiagGaussian(mean, torch.full_like(mean, std**-2))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors on two threads wait for each other: tens of times slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model() -> nn.Module:
    return build("lenet", SHAPE, 4, seed=0)


@pytest.fixture
def inputs() -> Tensor:
    return torch.randn(30, *SHAPE, generator=seeded(1))


def by_hand(model: nn.Module, layout: Layout, posterior: DiagGaussian, inputs: Tensor, samples: int) -> Tensor:
    """Copies the draws into the model one after the other."""
    generator, total = seeded(), torch.zeros(())
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(samples):
        model.load_state_dict(kept | layout.split(posterior.sample(1, generator)[0]))
        with torch.no_grad():
            total = total + model(inputs).double().softmax(1) / samples
    model.load_state_dict(kept)
    return total


def test_mean_is_the_softmax_of_the_model(model: nn.Module, inputs: Tensor) -> None:
    wanted = model(inputs).double().softmax(1).detach()
    for batches in ([inputs], torch.split(inputs, 7), (part for part in torch.split(inputs, 11))):
        probs = predict_mean(model, batches)
        assert probs.dtype == torch.float64
        assert not probs.is_inference()
        torch.testing.assert_close(probs, wanted, atol=1e-6, rtol=1e-5)


def test_mean_restores_the_mode_of_each_module() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    model[2].eval()
    x = torch.randn(50, 3, generator=seeded())
    first = predict_mean(model, [x])
    assert torch.equal(first, predict_mean(model, [x]))
    assert [module.training for module in model] == [True, True, False]
    with pytest.raises(RuntimeError):
        predict_mean(model, [torch.zeros(1, 99)])
    assert [module.training for module in model] == [True, True, False]


def test_mc_is_the_average_over_draws_in_order(model: nn.Module, inputs: Tensor) -> None:
    layout, posterior = around(model, 0.1)
    wanted = by_hand(model, layout, posterior, inputs, 5)
    probs = predict_mc(model, layout, posterior, [inputs], 5, seeded())
    torch.testing.assert_close(probs, wanted, atol=1e-6, rtol=1e-5)
    assert (probs - predict_mean(model, [inputs])).abs().max() > 0.01


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 9])
def test_neither_chunk_nor_batch_size_matters(model: nn.Module, inputs: Tensor, chunk: int) -> None:
    layout, posterior = around(model, 0.1)
    wanted = predict_mc(model, layout, posterior, [inputs], 5, seeded())
    for size in (30, 13, 1):
        probs = predict_mc(model, layout, posterior, torch.split(inputs, size), 5, seeded(), chunk)
        torch.testing.assert_close(probs, wanted, atol=1e-6, rtol=1e-5)


def test_batches_longer_than_the_internal_ones() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(700, 3, generator=seeded())
    torch.testing.assert_close(predict_mean(model, [x]), model(x).double().softmax(1).detach(), atol=1e-6, rtol=1e-5)
    layout, posterior = around(model, 0.5)
    probs = predict_mc(model, layout, posterior, [x], 3, seeded())
    torch.testing.assert_close(probs, by_hand(model, layout, posterior, x, 3), atol=1e-6, rtol=1e-5)


def test_the_seed_decides(model: nn.Module, inputs: Tensor) -> None:
    layout, posterior = around(model, 0.1)
    first, same, other = (predict_mc(model, layout, posterior, [inputs], 3, seeded(seed)) for seed in (4, 4, 5))
    assert torch.equal(first, same)
    assert not torch.allclose(first, other)


def test_no_variance_gives_the_mean_prediction(model: nn.Module, inputs: Tensor) -> None:
    layout, posterior = around(model, 1e-9)
    probs = predict_mc(model, layout, posterior, [inputs], 3, seeded(), chunk=2)
    torch.testing.assert_close(probs, predict_mean(model, [inputs]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 500])
def test_logistic_regression_against_numerical_integration(chunk: int) -> None:
    # a = w x + b with independent Gaussian w, b is Gaussian: p₂ = ∫ sigmoid(a) N(a; μ, s²) da
    class Logistic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            logit = self.line(x)
            return torch.cat([torch.zeros_like(logit), logit], 1)

    model = Logistic()
    posterior = DiagGaussian(torch.tensor([1.5, -0.5]), torch.tensor([1 / 4, 1 / 0.25]))
    x = torch.tensor([[-1.0], [0.3], [2.0]])
    samples = 40_000 if chunk > 1 else 2_000
    probs = predict_mc(model, Layout.of(model), posterior, [x], samples, seeded(), chunk)
    for row, point in zip(probs, x.flatten().tolist(), strict=True):
        mu, s = 1.5 * point - 0.5, np.sqrt(4 * point**2 + 0.25)
        a = np.linspace(mu - 10 * s, mu + 10 * s, 20_001)
        density = np.exp(-0.5 * ((a - mu) / s) ** 2) / (s * np.sqrt(2 * np.pi))
        wanted = np.trapezoid(density / (1 + np.exp(-a)), a)
        assert row[1].item() == pytest.approx(wanted, abs=4 * 0.4 / np.sqrt(samples))
        assert row.sum().item() == pytest.approx(1)


class Scaled(nn.Module):
    """Has a buffer and, when asked, a frozen layer; fails on inputs of another width."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(3, 5)
        self.head = nn.Linear(5, 2)
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != 3:
            raise RuntimeError("broken input")
        return self.head(self.features(x)) * self.scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("chunk", [1, 4])
def test_buffers_and_frozen_parameters_are_the_models(chunk: int) -> None:
    model = Scaled()
    model.features.requires_grad_(requires_grad=False)
    layout, posterior = around(model, 0.3)
    assert layout.names == ("head.weight", "head.bias")
    x = torch.randn(6, 3, generator=seeded())
    first = predict_mc(model, layout, posterior, [x], 4, seeded(), chunk)
    torch.testing.assert_close(first, by_hand(model, layout, posterior, x, 4), atol=1e-6, rtol=1e-5)
    model.scale.zero_()
    torch.testing.assert_close(
        predict_mc(model, layout, posterior, [x], 4, seeded(), chunk), torch.full_like(first, 0.5)
    )


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("broken", [False, True])
def test_model_and_inputs_are_untouched(chunk: int, broken: bool) -> None:
    model = Scaled()
    layout, posterior = around(model, 0.3)
    before = {name: (value, value.clone()) for name, value in (*model.named_parameters(), *model.named_buffers())}
    x = torch.randn(6, 3, generator=seeded())
    kept = x.clone()
    batches: Sequence[Tensor] = [x, torch.zeros(2, 99)] if broken else [x]
    if broken:
        with pytest.raises(RuntimeError, match="broken input"):
            predict_mc(model, layout, posterior, batches, 4, seeded(), chunk)
    else:
        predict_mc(model, layout, posterior, batches, 4, seeded(), chunk)
    assert torch.equal(x, kept)
    assert model.training
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        assert value is before[name][0]
        assert torch.equal(value, before[name][1])
        assert value.requires_grad == (name != "scale")


def test_more_samples_come_closer_to_the_limit() -> None:
    model = nn.Linear(2, 3)
    layout, posterior = around(model, 1.0)
    x = torch.randn(5, 2, generator=seeded())
    limit = predict_mc(model, layout, posterior, [x], 20_000, seeded(9), chunk=1000)
    errors = [
        np.mean([(predict_mc(model, layout, posterior, [x], n, seeded(s), n) - limit).abs().max() for s in range(10)])
        for n in (5, 80, 1280)
    ]
    assert all(later < 0.5 * earlier for earlier, later in pairwise(errors))


@pytest.mark.parametrize(("samples", "chunk"), [(0, None), (3, 0)])
def test_counts_are_checked(samples: int, chunk: int | None) -> None:
    model = nn.Linear(2, 3)
    with pytest.raises(ValueError, match="at least 1"):
        predict_mc(model, *around(model, 1.0), [torch.zeros(1, 2)], samples, seeded(), chunk)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("after", [1, 2])
def test_an_interrupted_prediction_goes_on_to_the_same_end(
    model: nn.Module, inputs: Tensor, chunk: int, after: int
) -> None:
    layout, posterior = around(model, 0.2)
    seen: list[Partial] = []

    def each(partial: Partial) -> None:
        seen.append(Partial(partial.draws, partial.total.clone()))

    whole = predict_mc(model, layout, posterior, [inputs], 9, seeded(), chunk, each=each)
    assert [partial.draws for partial in seen] == list(range(chunk, 10, chunk))
    begun = seen[after - 1]
    kept = begun.total.clone()
    rest = predict_mc(model, layout, posterior, [inputs], 9, seeded(), chunk, begun=begun)
    assert torch.equal(rest, whole)
    assert torch.equal(begun.total, kept)
