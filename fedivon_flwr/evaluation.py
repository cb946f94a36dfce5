"""Scores of a global model on a test set: at the mean, and by Monte Carlo where there is a posterior."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedivon_flwr.data import Dataset, batch_to_tensor
from fedivon_flwr.metrics import score
from fedivon_flwr.posterior import DiagGaussian, Layout
from fedivon_flwr.predict import Partial, predict_mc, predict_mean
from fedivon_flwr.records import NDArrays, load_model

BATCH = 256


@dataclass(frozen=True)
class Predictions:
    """Class probabilities of the test images, at the mean and (maybe) by Monte Carlo."""

    labels: Tensor
    mean: Tensor
    mc: Tensor | None = None
    samples: int = 0

    def scores(self) -> dict[str, dict[str, float]]:
        """``{mean: {accuracy, ece, nll, brier}, mc: {…, samples}}``."""
        found = {"mean": score(self.mean, self.labels).as_dict()}
        if self.mc is not None:
            found["mc"] = {**score(self.mc, self.labels).as_dict(), "samples": self.samples}
        return found


@dataclass(frozen=True)
class Evaluator:
    """A test set and a network, ready to be filled with the server's weights again and again."""

    model: nn.Module
    dataset: Dataset
    device: torch.device
    seed: int

    def predict(
        self,
        arrays: NDArrays,
        posterior: DiagGaussian | None,
        samples: int,
        server_round: int = 0,
        begun: Partial | None = None,
        each: Callable[[Partial], None] | None = None,
    ) -> Predictions:
        """Predict all test images; the same seed and round draw the same weights.

        `begun` and `each` are for a long Monte Carlo prediction that may be interrupted (see `predict_mc`).
        """
        load_model(self.model.to(self.device), arrays)
        labels = torch.tensor(np.asarray(self.dataset.test.y), dtype=torch.int64)
        mean = predict_mean(self.model, self._batches())
        if posterior is None:
            return Predictions(labels, mean)
        generator = torch.Generator(self.device).manual_seed(draw_seed(self.seed, server_round))
        here = DiagGaussian(posterior.mean.to(self.device), posterior.precision.to(self.device))
        mc = predict_mc(
            self.model, Layout.of(self.model), here, self._batches(), samples, generator, begun=begun, each=each
        )
        return Predictions(labels, mean, mc, samples)

    def _batches(self) -> Iterator[Tensor]:
        x = self.dataset.test.x
        for start in range(0, len(x), BATCH):
            yield batch_to_tensor(x[start : start + BATCH], self.dataset, self.device)


def draw_seed(seed: int, server_round: int = 0) -> int:
    """The seed of an evaluation's weight samples; round 0 is the final one."""
    return int(np.random.default_rng([seed, server_round]).integers(2**63))
