"""Scores of predicted probabilities: accuracy, calibration, likelihood, and telling unknown data apart.

All take probabilities `(N, K)`, not logits. torchmetrics is imported inside the functions that need it: it loads
scipy, matplotlib and torchvision, which takes longer than torch itself and would slow the start of every node.
"""

from dataclasses import asdict, dataclass
from math import log, nan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BINS = 15


@dataclass(frozen=True)
class Scores:
    """Fraction of right answers, expected calibration error, negative log-likelihood, Brier score (0 … 2)."""

    accuracy: float
    ece: float
    nll: float
    brier: float

    def as_dict(self) -> dict[str, float]:
        """By name, for records and logs."""
        return asdict(self)


@dataclass(frozen=True)
class Reliability:
    """Per confidence bin: mean confidence, accuracy (both nan where the bin is empty) and number of examples."""

    edges: NDArray[np.float64]
    confidence: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    count: NDArray[np.int64]

    @property
    def ece(self) -> float:
        """``Σ_b n_b/N |accuracy_b − confidence_b|``."""
        total = int(self.count.sum())
        return float(np.nansum(self.count * np.abs(self.accuracy - self.confidence)) / total) if total else nan


def score(probs: Tensor, labels: Tensor) -> Scores:
    """All scores of `probs` (N, K) against `labels` (N,); all nan when the model has diverged to nan.

    >>> scores = score(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 0]))
    >>> {name: round(value, 4) for name, value in scores.as_dict().items()}
    {'accuracy': 0.5, 'ece': 0.4, 'nll': 0.6547, 'brier': 0.5}
    """
    from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

    from fedivon_flwr._torchmetrics import Brier, NegativeLogLikelihood

    _check(probs, labels)
    if not probs.isfinite().all():
        return Scores(nan, nan, nan, nan)
    probs, labels = probs.cpu(), labels.cpu()
    classes = probs.shape[1]
    return Scores(
        accuracy=float(multiclass_accuracy(probs, labels, num_classes=classes, average="micro")),
        ece=float(multiclass_calibration_error(_binnable(probs), labels, num_classes=classes, n_bins=BINS, norm="l1")),
        nll=float(NegativeLogLikelihood()(probs, labels)),
        brier=float(Brier()(probs, labels)),
    )


def reliability(probs: Tensor, labels: Tensor, bins: int = BINS) -> Reliability:
    """Accuracy against confidence in equal-width bins ``[a, b)`` of the top probability, the last one closed.

    Guo et al. (2017), On Calibration of Modern Neural Networks.

    >>> table = reliability(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 0]), bins=2)
    >>> table.count, table.accuracy, round(table.ece, 4)
    (array([0, 2]), array([nan, 0.5]), 0.3)
    """
    _check(probs, labels)
    finite = probs.isfinite().all(1)  # a model that has diverged predicts nothing
    probs, labels = probs[finite], labels[finite]
    confidence, guess = _binnable(probs).max(1)
    edges = torch.linspace(0, 1, bins + 1)
    index = (torch.bucketize(confidence, edges, right=True) - 1).numpy()
    count = np.bincount(index, minlength=bins)

    def mean(values: Tensor) -> NDArray[np.float64]:
        total = np.bincount(index, weights=values.double().numpy(), minlength=bins)
        means = np.full(bins, nan)
        np.divide(total, count, out=means, where=count > 0)
        return means

    return Reliability(edges.double().numpy(), mean(confidence), mean(guess == labels.cpu()), count)


def entropy(probs: Tensor) -> Tensor:
    """``−Σ_k p_k log p_k`` in nats, over the last dimension.

    >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    terms: Tensor = torch.special.entr(probs)
    return terms.sum(-1)


def ood_auroc(inside: Tensor, outside: Tensor) -> float:
    """How well predictive entropy tells unknown data from known: the chance that it ranks a pair rightly.

    Takes the probabilities (N, K) predicted for data like the training set, and (M, K) for data unlike it, the
    positive class. Hendrycks & Gimpel (2017), A Baseline for Detecting Misclassified and Out-of-Distribution
    Examples in Neural Networks.

    >>> ood_auroc(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([[0.5, 0.5], [0.7, 0.3]]))
    0.75
    """
    from torchmetrics.functional.classification import binary_auroc

    probs = torch.cat([inside, outside]).double()
    # torchmetrics takes scores beyond 1 for logits and squashes them, which can tie close ones
    scores = (entropy(probs) / log(probs.shape[1])).clamp(0, 1)
    unknown = torch.cat([torch.zeros(len(inside), dtype=torch.int64), torch.ones(len(outside), dtype=torch.int64)])
    return float(binary_auroc(scores.cpu(), unknown))


def _check(probs: Tensor, labels: Tensor) -> None:
    if probs.ndim != 2 or labels.shape != probs.shape[:1] or len(labels) == 0:
        raise ValueError(
            f"expected probabilities (N, K) and labels (N,), not {tuple(probs.shape)} and {tuple(labels.shape)}"
        )


def _binnable(probs: Tensor) -> Tensor:
    """Probabilities kept just below 1, in the float32 torchmetrics bins them in.

    torchmetrics counts a confidence of exactly 1 in a bin of its own beyond the last, and takes anything above 1
    (a sum of rounded numbers) for logits.
    """
    return probs.cpu().float().clamp(0, 1 - torch.finfo(torch.float32).eps / 2)
