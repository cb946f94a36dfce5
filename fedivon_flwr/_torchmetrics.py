"""Proper scores of predicted probabilities that torchmetrics lacks.

In a module of their own because importing torchmetrics takes seconds; `metrics` imports it when first needed.
"""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

FLOOR = torch.finfo(torch.float32).tiny


class _MeanScore(Metric):
    """The mean over examples of a score of `probs` (N, K) and `labels` (N,), summed in float64."""

    is_differentiable = True
    higher_is_better = False
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add a batch."""
        if probs.ndim != 2 or labels.shape != probs.shape[:1]:
            raise ValueError(
                f"probs must be (N, K) and labels (N,), not {tuple(probs.shape)} and {tuple(labels.shape)}"
            )
        self.total += self.each(probs.double(), labels).sum()
        self.count += labels.numel()

    def compute(self) -> Tensor:
        """The mean over all batches."""
        return self.total / self.count

    def each(self, probs: Tensor, labels: Tensor) -> Tensor:
        """The score of each example (N,)."""
        raise NotImplementedError


class NegativeLogLikelihood(_MeanScore):
    """``−log p_y``, with ``p_y`` floored at float32's smallest normal number: at worst 87.3, never infinite.

    Good (1952), Rational Decisions.

    >>> NegativeLogLikelihood()(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1]))
    tensor(0.4904, dtype=torch.float64)
    """

    def each(self, probs: Tensor, labels: Tensor) -> Tensor:
        """``−log p_y``."""
        return -probs.gather(1, labels.long()[:, None]).squeeze(1).clamp(min=FLOOR).log()


class Brier(_MeanScore):
    """``Σ_k (p_k − [k = y])²``, summed over the classes: from 0 to 2.

    Brier (1950), Verification of forecasts expressed in terms of probability.

    >>> Brier()(torch.tensor([[0.5, 0.5], [0.0, 1.0]]), torch.tensor([0, 0]))
    tensor(1.2500, dtype=torch.float64)
    """

    def each(self, probs: Tensor, labels: Tensor) -> Tensor:
        """``Σ_k (p_k − [k = y])²``."""
        return (probs - torch.nn.functional.one_hot(labels.long(), probs.shape[1])).square().sum(1)
