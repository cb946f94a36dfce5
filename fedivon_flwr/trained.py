"""A trained posterior from its file: what `fedivon predict` and other programs use."""

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedivon_flwr.data import IMAGES, Contract, normalise, read_image
from fedivon_flwr.errors import UserError
from fedivon_flwr.models import build
from fedivon_flwr.posterior import DiagGaussian, Layout
from fedivon_flwr.predict import predict_mc, predict_mean
from fedivon_flwr.records import HESS, MEAN, flat, load_model
from fedivon_flwr.runs import load_arrays

BATCH = 256


@dataclass(frozen=True)
class Trained:
    """A network with its weights, the posterior around them if there is one, and how inputs are normalised."""

    model: nn.Module
    posterior: DiagGaussian | None
    inputs: Contract

    @classmethod
    def load(cls, path: Path, trusted: str | None = None, ess: float | None = None) -> "Trained":
        """From posterior.safetensors, or from the run's folder that holds it; `ess` gives it another width.

        A file that names a model outside of this project would run code of its choice; it must be named as `trusted`.
        """
        arrays, about = load_arrays(posterior_file(path))
        if "model" not in about:
            raise UserError(f"The file '{path}' is a checkpoint of an unfinished run; finish the run first.")
        if not about.get("whole", True):
            raise UserError(
                f"'{path}' is of the method '{about['method']}', which trains no model for all: the personal ones stay "
                "with the clients."
            )
        check_trust(path, about["model"], trusted)
        shape = tuple(int(side) for side in about["shape"])
        model = build(about["model"], shape, int(about["classes"]), seed=0)
        load_model(model, arrays)
        posterior = None
        if any(key.startswith(HESS) for key in arrays):
            vectors = flat(arrays, MEAN), flat(arrays, HESS)
            ess = ess or about.get("test_ess", about["ess"])
            posterior = DiagGaussian.from_hess(*vectors, ess, about["weight_decay"])
        inputs = Contract(shape, int(about["classes"]), tuple(about["mean"]), tuple(about["std"]))
        return cls(model, posterior, inputs)

    def predict(self, x: NDArray[np.generic], samples: int, seed: int = 0) -> Tensor:
        """Class probabilities `(N, K)`: by Monte Carlo, or at the mean for 0 samples or without a posterior."""
        if self.posterior is None or samples == 0:
            return predict_mean(self.model, self._batches(x))
        generator = torch.Generator().manual_seed(seed)
        return predict_mc(self.model, Layout.of(self.model), self.posterior, self._batches(x), samples, generator)

    def _batches(self, x: NDArray[np.generic]) -> Iterator[Tensor]:
        for start in range(0, len(x), BATCH):
            yield normalise(x[start : start + BATCH], self.inputs.mean, self.inputs.std, torch.device("cpu"))


def check_trust(path: Path, model: str, trusted: str | None) -> None:
    """Refuse to run a function for the model that a file names and the user does not."""
    if ":" in model and model != trusted:
        raise UserError(
            f"The file '{path}' wants to run the function '{model}' for its model; if you trust it, "
            f"say --model {model}."
        )


def posterior_file(path: Path) -> Path:
    """The file itself, or that of a run's folder."""
    return path / "posterior.safetensors" if path.is_dir() else path


def read_inputs(path: Path, shape: tuple[int, ...]) -> tuple[list[str], NDArray[np.generic]]:
    """Names and inputs from an ``.npz`` (array ``x``, else ``x_test``), an image, or a folder of images."""
    if not path.exists():
        raise UserError(f"There is no file or folder '{path}'.")
    if path.suffix == ".npz":
        return _read_npz(path, shape)
    files = sorted(p for p in path.iterdir() if p.suffix.lower() in IMAGES) if path.is_dir() else [path]
    if not files:
        raise UserError(f"The folder '{path}' has no images ({', '.join(sorted(IMAGES))}).")
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise UserError(f"The model takes inputs of shape {shape}, not grey or colour images; give an .npz file.")
    return [file.name for file in files], np.stack([_read_image(file, shape) for file in files])


def _read_npz(path: Path, shape: tuple[int, ...]) -> tuple[list[str], NDArray[np.generic]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            name = next((key for key in ("x", "x_test") if key in file), None)
            x = file[name] if name else None
    # TypeError: a lone `.npy` array is no context manager
    except (ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"The file '{path}' cannot be read as .npz ({error}).") from None
    if x is None:
        raise UserError(f"The file '{path}' has no array named 'x' (or 'x_test').")
    if len(shape) == 3 and x.ndim == 3:
        x = x[..., None]
    expected = (*shape[1:], shape[0]) if len(shape) == 3 else shape
    if x.shape[1:] != expected or not len(x):
        wanted = ", ".join(map(str, ("N", *expected)))
        raise UserError(f"The inputs in '{path}' have the shape {x.shape} but the model takes ({wanted}).")
    if len(shape) == 3 and x.dtype != np.uint8:
        raise UserError(f"The images in '{path}' are {x.dtype} but must be uint8 (0 … 255).")
    if len(shape) != 3 and x.dtype.kind != "f":
        raise UserError(f"The inputs in '{path}' are {x.dtype} but must be floating-point numbers.")
    return [str(i) for i in range(len(x))], x


def _read_image(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    channels, height, width = shape
    pixels = read_image(path, grey=channels == 1)
    if pixels.shape[:2] != (height, width):
        raise UserError(
            f"The image '{path}' is {pixels.shape[1]} by {pixels.shape[0]} pixels but the model takes "
            f"{width} by {height}; scale it first."
        )
    return pixels.reshape(height, width, channels)
