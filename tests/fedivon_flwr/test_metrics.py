import subprocess
import sys
from math import isnan, log

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from torch import Tensor

from fedivon_flwr._torchmetrics import Brier, NegativeLogLikelihood
from fedivon_flwr.metrics import entropy, ood_auroc, reliability, score


def guesses(n: int = 500, classes: int = 6, seed: int = 0, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    probs = (scale * torch.randn(n, classes, generator=gen, dtype=torch.float64)).softmax(1)
    return probs, torch.randint(classes, (n,), generator=gen)


def ece_by_hand(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Bins [a, b) by counting, the last one closed; nothing shared with the code under test."""
    top, guess = probs.numpy().max(1), probs.numpy().argmax(1)
    total = 0.0
    for b in range(bins):
        last = b == bins - 1
        inside = [i for i, c in enumerate(top) if b / bins <= c and (last or c < (b + 1) / bins)]
        if inside:
            right = np.mean([guess[i] == labels[i].item() for i in inside])
            total += len(inside) / len(top) * abs(right - np.mean(top[inside]))
    return total


# up to 4: beyond, scikit-learn clips the probabilities
# derandomized: a confidence within float32 rounding of an edge may fall on either side
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 200), classes=st.integers(2, 12), scale=st.floats(0.1, 4))
def test_scores_against_references(seed: int, n: int, classes: int, scale: float) -> None:
    probs, labels = guesses(n, classes, seed, scale)
    scores = score(probs, labels)
    assert scores.accuracy == pytest.approx(accuracy_score(labels, probs.argmax(1)))
    assert scores.nll == pytest.approx(log_loss(labels, probs, labels=range(classes)))
    wanted = np.mean([((p - np.eye(classes)[y]) ** 2).sum() for p, y in zip(probs.numpy(), labels, strict=True)])
    assert scores.brier == pytest.approx(wanted)
    assert scores.ece == pytest.approx(ece_by_hand(probs, labels), abs=1e-5)
    assert reliability(probs, labels).ece == pytest.approx(scores.ece, abs=1e-5)


def test_single_precision_gives_the_same() -> None:
    probs, labels = guesses()
    assert score(probs.float(), labels).as_dict() == pytest.approx(score(probs, labels).as_dict(), abs=1e-5)


def test_certainty_belongs_to_the_last_bin() -> None:
    # under-confident at 0.95 and over-confident at 1: in one bin they offset each other, in two they add up
    probs = torch.tensor([[0.95, 0.05]] * 10 + [[1.0, 0.0]] * 10)
    labels = torch.tensor([0] * 19 + [1])
    assert score(probs, labels).ece == pytest.approx(abs(0.95 - 0.975), abs=1e-6)
    assert reliability(probs, labels).count.tolist() == [0] * 14 + [20]


def test_rounding_above_one_is_not_taken_for_logits() -> None:
    probs = torch.tensor([[1.0000001, 0.0], [0.8, 0.2]])
    scores = score(probs, torch.tensor([0, 0]))
    assert scores.ece == pytest.approx(0.1, abs=1e-6)
    assert scores.accuracy == 1


def test_confidence_on_an_edge_counts_upwards() -> None:
    table = reliability(torch.tensor([[0.5, 0.5], [0.75, 0.25]]), torch.tensor([0, 0]), bins=4)
    assert table.count.tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(table.edges, [0, 0.25, 0.5, 0.75, 1])


def test_reliability_table() -> None:
    probs = torch.tensor([[0.6, 0.4], [0.7, 0.3], [0.2, 0.8], [0.1, 0.9]], dtype=torch.float64)
    table = reliability(probs, torch.tensor([0, 1, 1, 1]), bins=4)
    np.testing.assert_array_equal(table.count, [0, 0, 2, 2])
    np.testing.assert_allclose(table.confidence, [np.nan, np.nan, 0.65, 0.85], rtol=1e-6)
    np.testing.assert_allclose(table.accuracy, [np.nan, np.nan, 0.5, 1.0])
    assert table.ece == pytest.approx(0.5 * 0.15 + 0.5 * 0.15, abs=1e-6)


def test_zero_probability_is_bad_but_finite() -> None:
    scores = score(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    assert scores.nll == pytest.approx(126 * log(2))
    assert (scores.accuracy, scores.brier) == (0, 2)
    assert scores.ece == pytest.approx(1)


def test_diverged_model_has_no_scores() -> None:
    scores = score(torch.tensor([[0.5, 0.5], [float("nan"), 0.0]]), torch.tensor([0, 0]))
    assert all(isnan(value) for value in scores.as_dict().values())


@pytest.mark.parametrize("metric", [Brier, NegativeLogLikelihood])
def test_metric_over_batches_is_the_metric_of_all(metric: type[Brier] | type[NegativeLogLikelihood]) -> None:
    probs, labels = guesses()
    whole, parts = metric(), metric()
    whole.update(probs, labels)
    for part in ((probs[:90], labels[:90]), (probs[90:], labels[90:])):
        parts.update(*part)
    torch.testing.assert_close(parts.compute(), whole.compute())
    with pytest.raises(ValueError, match=r"\(N, K\)"):
        whole.update(probs, labels[:3])


@pytest.mark.parametrize("shapes", [((0, 3), (0,)), ((4, 3), (5,)), ((4,), (4,)), ((4, 3), (4, 1))])
def test_shapes_are_checked(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    probs, labels = torch.ones(shapes[0]), torch.zeros(shapes[1], dtype=torch.int64)
    for function in (score, reliability):
        with pytest.raises(ValueError, match=r"\(N, K\)"):
            function(probs, labels)


def test_entropy() -> None:
    torch.testing.assert_close(entropy(torch.tensor([[0.25] * 4, [0, 0, 1.0, 0]])), torch.tensor([log(4), 0.0]))
    probs, _ = guesses(20)
    torch.testing.assert_close(entropy(probs), -(probs * probs.log()).sum(1))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), classes=st.integers(2, 30), decimals=st.sampled_from([1, 12]))
def test_ood_auroc_against_sklearn(seed: int, classes: int, decimals: int) -> None:
    inside, outside = guesses(80, classes, seed, 3)[0], guesses(60, classes, seed + 1, 1)[0]
    # rounded probabilities have many ties
    inside, outside = inside.round(decimals=decimals), outside.round(decimals=decimals)
    scores = entropy(torch.cat([inside, outside])).round(decimals=9)
    wanted = roc_auc_score([0] * 80 + [1] * 60, scores)
    assert ood_auroc(inside, outside) == pytest.approx(wanted, abs=2e-3)
    if decimals == 12:
        assert ood_auroc(inside, outside) == pytest.approx(wanted, abs=1e-6)


def test_ood_auroc_tells_confident_predictions_apart() -> None:
    # entropies of 1e-5 and below: squashed by a float32 sigmoid they would all be ties
    inside = torch.tensor([[1 - 10.0**-k, 10.0**-k] for k in range(9, 12)], dtype=torch.float64)
    outside = torch.tensor([[1 - 10.0**-k, 10.0**-k] for k in range(6, 9)], dtype=torch.float64)
    assert ood_auroc(inside, outside) == 1
    assert ood_auroc(outside, inside) == 0
    assert ood_auroc(inside, inside) == 0.5


def test_import_is_light() -> None:
    code = "import sys, fedivon_flwr.metrics; sys.exit('torchmetrics' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_that_diverged_has_empty_bins() -> None:
    table = reliability(torch.tensor([[float("nan")] * 2, [0.9, 0.1]]), torch.tensor([0, 0]))
    assert table.count.sum() == 1
    nothing = reliability(torch.full((2, 2), float("nan")), torch.tensor([0, 1]))
    assert nothing.count.sum() == 0
    assert np.isnan(nothing.ece)
