"""How wide a posterior should be, judged on training images that no client holds: the test set stays out of it.

The precision of a posterior is ``λ h + prior`` (FedIvon: ``prior = λ δ``; FedLaplace: ``h = Ω``). Training needs λ for
FedIvon only, and may then use another one than prediction (`test-ess`); FedLaplace needs neither λ nor the prior before
it predicts. Both can be tried here on a finished run or on a checkpoint.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import clients
import strategies
from fedivon_flwr.data import Contract, load
from fedivon_flwr.errors import UserError
from fedivon_flwr.metrics import score
from fedivon_flwr.models import build
from fedivon_flwr.posterior import DiagGaussian
from fedivon_flwr.records import HESS, MEAN, flat, load_model
from fedivon_flwr.runs import load_arrays, read_json
from fedivon_flwr.settings import Settings
from fedivon_flwr.trained import Trained, check_trust


def held_out(settings: Settings, examples: int) -> np.ndarray:
    """Rows of the training set that no client of a run has, drawn with a fixed seed."""
    rows = np.concatenate(clients.split(settings.dataset, clients.partition_spec(settings)))
    free = np.setdiff1d(np.arange(len(load(settings.dataset).train)), rows)
    if len(free) < examples:
        raise UserError(
            f"Only {len(free)} training examples of '{settings.dataset}' are held by no client, fewer than the "
            f"{examples} asked for; lower --examples, or give the clients fewer (max-examples)."
        )
    return np.sort(np.random.default_rng(0).choice(free, examples, replace=False))


def calibrate(
    folder: Path,
    ess: Sequence[float],
    priors: Sequence[float],
    examples: int,
    samples: int,
    seed: int = 0,
    trusted: str | None = None,
) -> dict[str, Any]:
    """Scores of a run on held-out training images: at the mean, and for every λ and every prior precision.

    Without prior precisions the prior is the one of the run, ``λ δ``.
    """
    if (saved := read_json(folder / "settings.json")) is None:
        raise UserError(f"The folder '{folder}' holds no run.")
    settings = Settings.from_config(saved)
    check_trust(folder, settings.model, trusted)
    checkpoints = sorted((folder / "checkpoints").glob("round-*.safetensors"))
    arrays, about = load_arrays(checkpoints[-1] if checkpoints else folder / "posterior.safetensors")
    if not any(key.startswith(HESS) for key in arrays):
        raise UserError(f"The run in '{folder}' has no posterior; its method is {settings.method}.")
    dataset, rows = load(settings.dataset), held_out(settings, examples)
    model = build(settings.model, dataset.shape, dataset.classes, settings.seed)
    load_model(model, arrays)
    at_mean = Trained(model, None, Contract(dataset.shape, dataset.classes, dataset.mean, dataset.std))
    x, labels = dataset.train.x[rows], torch.from_numpy(np.asarray(dataset.train.y[rows], dtype=np.int64))
    decay, found = strategies.build(settings).scale()["weight_decay"], []
    for size in ess:
        for prior in priors or [size * decay]:
            posterior = DiagGaussian(flat(arrays, MEAN), size * flat(arrays, HESS) + prior)
            probs = replace(at_mean, posterior=posterior).predict(x, samples, seed)
            found.append({"ess": size, "prior_precision": prior, **score(probs, labels).as_dict()})
    return {
        "method": settings.method,
        "dataset": settings.dataset,
        "round": about.get("round", settings.rounds),
        "examples": examples,
        "samples": samples,
        "mean": score(at_mean.predict(x, 0), labels).as_dict(),
        "grid": found,
    }
