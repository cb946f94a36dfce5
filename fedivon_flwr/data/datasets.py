"""Datasets by name, and the user's own `.npz` files.

Raw data come from `NAME.npz` in the folder `FEDIVON_DATA` or else from torchvision, which
downloads them on first use; `digits` comes with scikit-learn. A new dataset is one more
`DatasetSpec` added to `DATASETS`.

Settings must not be chosen on test data: ``NAME@validation`` is a dataset whose test data are a tenth of NAME's
training data, and whose training data are the rest.
"""

import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from http.client import HTTPException
from pathlib import Path
from tarfile import TarError

import numpy as np
import torch

from fedivon_flwr.data.cache import NAMES, Arrays, data_folder, fingerprint, prepared
from fedivon_flwr.errors import UserError
from fedivon_flwr.registry import Registry

VALIDATION = "@validation"
HELD_OUT = 0.1  # of the training data, for validation
IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


@dataclass(frozen=True)
class Split:
    """Examples as read-only arrays, the large ones mapped from disk.

    `x` holds images as uint8 `(N, H, W, C)` and other data as float32 `(N, …)`, `y` the labels.
    `group` is a finer label where there is one (the subclass), and `y` itself where not.
    """

    x: np.ndarray
    y: np.ndarray
    group: np.ndarray

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Dataset:
    """Training and test data, and what a model must know about them.

    `shape` is what a model sees: `(C, H, W)` for images. `mean` and `std` are those of a channel
    with pixels scaled to 0…1.
    """

    name: str
    train: Split
    test: Split
    classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class DatasetSpec:
    """How to get a named dataset: `fetch` reads raw arrays, downloading into the folder it is given."""

    fetch: Callable[[Path], Arrays]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str = ""  # the dataset whose raw data these are, if it is another one
    superclass: tuple[int, ...] = ()  # the label of every raw label, which then becomes the group
    bundled: bool = False  # comes with an installed package: nothing to download, no `.npz`


DATASETS: Registry[DatasetSpec] = Registry("dataset")


@lru_cache
def load(name: str) -> Dataset:
    """Load a dataset by name, or from the path of an own `.npz` file or folder of images.

    An own file holds `x_train`, `y_train` and, if there are test data, `x_test`, `y_test`: uint8 images `(N, H, W)` or
    `(N, H, W, C)`, or float data `(N, …)`, with labels from 0. For a folder see `read_images`. With ``@validation``
    behind it, a part of the training data takes the place of the test data.

    >>> digits = load("digits")
    >>> digits.train.x.shape, digits.shape, digits.classes
    ((1437, 8, 8, 1), (1, 8, 8), 10)
    >>> len(load("digits@validation").train), len(load("digits@validation").test)
    (1295, 142)
    """
    source = name.removesuffix(VALIDATION)
    if source.endswith(".npz") or "/" in source:
        return _load_own(name, source)
    return _load_named(name, source, DATASETS[source])


def batch_to_tensor(x: np.ndarray, dataset: Dataset, device: torch.device) -> torch.Tensor:
    """A batch as a model wants it: images normalised, `(N, C, H, W)` in channels-last memory.

    >>> digits = load("digits")
    >>> batch_to_tensor(digits.train.x[:5], digits, torch.device("cpu")).shape
    torch.Size([5, 1, 8, 8])
    """
    return normalise(x, dataset.mean, dataset.std, device)


def normalise(x: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """uint8 images `(N, H, W, C)` normalised per channel on the device; other data as float32."""
    # a memory map is read-only, which torch tensors cannot be
    batch = torch.from_numpy(np.ascontiguousarray(x if x.flags.writeable else x.copy())).to(device, non_blocking=True)
    if batch.dtype != torch.uint8:
        return batch.float()
    centre, spread = (torch.tensor(value, device=device).view(-1, 1, 1) for value in (mean, std))
    return channels_last(batch.permute(0, 3, 1, 2).float().mul_(1 / (255 * spread)).sub_(centre / spread))


def channels_last(images: torch.Tensor) -> torch.Tensor:
    """Images `(N, C, H, W)` in channels-last memory, in which convolution and pooling are fastest on a CPU.

    A single channel lies in memory the same way in both orders. PyTorch then takes it for channels-first unless the
    strides say otherwise, and pools everything behind it far more slowly.

    >>> channels_last(torch.zeros(2, 1, 28, 28)).stride()
    (784, 1, 28, 1)
    """
    _, channels, height, width = images.shape
    strides = (channels * height * width, 1, channels * width, channels)
    return images.contiguous(memory_format=torch.channels_last).as_strided(images.shape, strides)


def _load_named(name: str, plain: str, spec: DatasetSpec) -> Dataset:
    source = spec.source or plain
    arrays = _prepared(*_named_arrays(source, spec), name)
    channels, labels = len(spec.mean), len(spec.superclass) or spec.classes
    top = max(int(arrays[f"y_{part}"].max(initial=0)) for part in ("train", "test"))
    if arrays["x_train"].dtype != np.uint8 or arrays["x_train"].shape[-1] != channels or top >= labels:
        raise UserError(
            f"The data found for '{source}' in '{data_folder()}' are of something else: expected uint8 images "
            f"with {channels} channel(s) and labels from 0 to {labels - 1}."
        )
    train, test = (_split(arrays, part, spec.superclass) for part in ("train", "test"))
    return _dataset(name, train, test, spec.classes, spec.mean, spec.std)


def _named_arrays(source: str, spec: DatasetSpec) -> tuple[str, Callable[[], Arrays]]:
    """Under which key the arrays are kept, and how to make them."""
    if spec.bundled:
        return f"{source}-{fingerprint('bundled')}", lambda: tidy(spec.fetch(Path()), source)
    folder = data_folder()
    npz = folder / f"{source}.npz"
    if npz.is_file():
        return f"{source}-{fingerprint(npz)}", lambda: tidy(read_npz(npz), f"'{npz}'")
    return f"{source}-{fingerprint('torchvision')}", lambda: tidy(_download(source, spec.fetch, folder), source)


def _prepared(key: str, prepare: Callable[[], Arrays], name: str) -> Arrays:
    arrays = prepared(key, prepare)
    return prepared(f"{key}-validation", lambda: hold_out(arrays)) if name.endswith(VALIDATION) else arrays


def hold_out(arrays: Arrays, share: float = HELD_OUT) -> Arrays:
    """A share of the training data, of every label, in place of the test data; drawn with a fixed seed.

    >>> y = np.repeat([0, 1], [20, 40])
    >>> found = hold_out({"x_train": np.arange(60), "y_train": y})
    >>> found["y_train"].tolist().count(1), found["y_test"].tolist().count(1), found["x_test"].tolist()
    (36, 4, [4, 19, 28, 36, 40, 50])
    """
    x, y, draw = arrays["x_train"], arrays["y_train"], np.random.default_rng(0)
    rows = [draw.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]
    held = np.sort(np.concatenate([some[: round(share * len(some))] for some in rows]))
    rest = np.setdiff1d(np.arange(len(y)), held)
    return {"x_train": x[rest], "y_train": y[rest], "x_test": x[held], "y_test": y[held]}


def _load_own(name: str, source: str) -> Dataset:
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(
            f"There is no data file '{path}'; give the path of an .npz file with {', '.join(NAMES)}, or of a folder "
            "with images in train/LABEL and test/LABEL."
        )
    read = read_images if path.is_dir() else read_npz
    arrays = _prepared(f"{path.stem}-{fingerprint(path)}", lambda: tidy(read(path), f"'{path}'"), name)
    train, test = (_split(arrays, part) for part in ("train", "test"))
    classes = 1 + max(int(split.y.max(initial=0)) for split in (train, test))
    if train.x.dtype != np.uint8:
        return _dataset(name, train, test, classes, (0.0,), (1.0,))
    half = (0.5,) * train.x.shape[-1]
    return _dataset(name, train, test, classes, half, half)


def _split(arrays: Arrays, part: str, superclass: tuple[int, ...] = ()) -> Split:
    x, group = arrays[f"x_{part}"], arrays[f"y_{part}"]
    if not superclass:
        return Split(x, group, group)
    y = np.array(superclass, np.int64)[group]
    y.flags.writeable = False
    return Split(x, y, group)


def _dataset(
    name: str, train: Split, test: Split, classes: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Dataset:
    shape = train.x.shape[1:]
    if train.x.dtype == np.uint8:
        shape = (shape[2], shape[0], shape[1])
    return Dataset(name, train, test, classes, shape, mean, std)


def read_npz(path: Path) -> Arrays:
    """The arrays of an `.npz` file: all four, or those of the training data alone."""
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in NAMES if name in file}
    # TypeError: a lone `.npy` array is no context manager
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"The file '{path}' cannot be read as .npz data; write it anew with numpy.savez.") from error
    wanted = NAMES if arrays.keys() & set(NAMES[2:]) else NAMES[:2]
    if missing := [name for name in wanted if name not in arrays]:
        raise UserError(
            f"The file '{path}' lacks {', '.join(missing)}; it must hold {', '.join(NAMES)} (without test data: the "
            "first two)."
        )
    return arrays


def read_images(folder: Path) -> Arrays:
    """The images in ``train/LABEL/*`` and, if there are any, ``test/LABEL/*``; all grey or all in colour, of one size.

    Labels are whole numbers from 0, or names that stand in ``classes.txt``, one a line: the same file on every node,
    since a node may lack some classes.
    """
    known = _class_names(folder / "classes.txt")
    arrays: Arrays = {}
    for part in ("train", "test"):
        files = sorted(path for path in folder.glob(f"{part}/*/*") if path.suffix.lower() in IMAGES)
        if files:
            arrays[f"x_{part}"] = _stacked(files)
            arrays[f"y_{part}"] = np.array([_label(path.parent, known) for path in files])
    if "x_train" not in arrays:
        raise UserError(f"The folder '{folder}' has no images ({', '.join(sorted(IMAGES))}) in train/LABEL.")
    return arrays


def _class_names(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def _label(folder: Path, known: list[str]) -> int:
    if known:
        if folder.name in known:
            return known.index(folder.name)
        raise UserError(f"The folder '{folder}' is named after no class in classes.txt; rename it or add the class.")
    if folder.name.isdecimal():
        return int(folder.name)
    raise UserError(
        f"The folder '{folder}' is named after no label; use whole numbers from 0, or list the names of all classes in "
        "classes.txt, the same on every node."
    )


def _stacked(files: list[Path]) -> np.ndarray:
    first = read_image(files[0])
    pixels = [first, *(read_image(path, grey=first.ndim == 2) for path in files[1:])]
    for path, image in zip(files, pixels, strict=True):
        if image.shape != first.shape:
            sizes = [f"{shape[1]} by {shape[0]}" for shape in (first.shape, image.shape)]
            raise UserError(
                f"The images '{files[0]}' and '{path}' are {' and '.join(sizes)} pixels; scale them to one size."
            )
    return np.stack(pixels)


def read_image(path: Path, grey: bool | None = None) -> np.ndarray:
    """The pixels of an image, `(H, W)` or `(H, W, 3)`: in grey, in colour, or as it is."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            if grey is None:
                grey = image.mode in ("1", "L", "LA", "I;16", "I", "F")
            return np.asarray(image.convert("L" if grey else "RGB"), dtype=np.uint8)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError):  # PIL calls a broken PNG a SyntaxError
        raise UserError(f"The file '{path}' cannot be read as an image.") from None


def tidy(raw: Arrays, where: str) -> Arrays:
    """Check raw arrays and bring them into one form: images with a channel axis, int64 labels, maybe no test data.

    >>> raw = {"x_train": np.zeros((3, 8, 8), np.uint8), "y_train": np.array([0, 1, 0], np.uint8)}
    >>> arrays = tidy(raw | {"x_test": raw["x_train"], "y_test": raw["y_train"]}, "the file")
    >>> arrays["x_train"].shape, arrays["y_train"].dtype
    ((3, 8, 8, 1), dtype('int64'))
    """
    arrays: Arrays = {}
    for part in ("train", "test"):
        if f"x_{part}" not in raw:
            arrays |= {"x_test": arrays["x_train"][:0], "y_test": arrays["y_train"][:0]}
            continue
        arrays[f"x_{part}"] = _tidy_x(raw[f"x_{part}"], f"x_{part} of {where}")
        arrays[f"y_{part}"] = _tidy_y(raw[f"y_{part}"], f"y_{part} of {where}")
        examples, labels = len(arrays[f"x_{part}"]), len(arrays[f"y_{part}"])
        if examples != labels:
            raise UserError(f"{where} has {examples} examples in x_{part} but {labels} labels in y_{part}.")
    train, test = arrays["x_train"], arrays["x_test"]
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise UserError(
            f"x_train and x_test of {where} must be of one kind, but they are "
            f"{train.dtype} {train.shape[1:]} and {test.dtype} {test.shape[1:]} an example."
        )
    return arrays


def _tidy_x(x: np.ndarray, where: str) -> np.ndarray:
    if x.size == 0:
        raise UserError(f"{where} is empty; it must hold at least one example.")
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        images = x[..., None] if x.ndim == 3 else x
        if images.shape[-1] > 4 and images.shape[1] in (1, 3):
            raise UserError(f"{where} seems to hold its channels first; images must be (N, H, W, C).")
        return np.ascontiguousarray(images)
    if np.issubdtype(x.dtype, np.floating) and x.ndim >= 2:
        with np.errstate(over="ignore"):  # it is told below
            data = np.ascontiguousarray(x, np.float32)
        if not np.isfinite(data).all():
            raise UserError(f"{where} holds values that are not finite numbers; replace or remove them.")
        return data
    raise UserError(
        f"{where} is {x.dtype} with {x.ndim} axes; it must be uint8 images (N, H, W) or (N, H, W, C), "
        "or float data (N, features)."
    )


def _tidy_y(y: np.ndarray, where: str) -> np.ndarray:
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise UserError(f"{where} is {y.dtype} with {y.ndim} axes; labels must be whole numbers along one axis.")
    if y.size and int(y.min()) < 0:
        raise UserError(f"{where} has the label {y.min()}; labels must count from 0.")
    return y.astype(np.int64)


def _download(name: str, fetch: Callable[[Path], Arrays], folder: Path) -> Arrays:
    try:
        root = folder / "torchvision"
        root.mkdir(parents=True, exist_ok=True)
        return fetch(root)
    except (OSError, RuntimeError, EOFError, HTTPException, TarError, zipfile.BadZipFile) as error:
        reason = getattr(error, "reason", None) or str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"The dataset '{name}' could not be downloaded into '{folder}' ({str(reason).rstrip(':')}): "
            f"put {name}.npz ({', '.join(NAMES)}) into that folder, or set FEDIVON_DATA to the folder that has it, "
            "or use 'digits', which needs no download."
        ) from error


def upright(images: np.ndarray) -> np.ndarray:
    """EMNIST as it is read: its files hold every image transposed.

    >>> upright(np.array([[[1, 2], [3, 4]]])).tolist()
    [[[1, 3], [2, 4]]]
    """
    return images.swapaxes(1, 2)


def _digits(_: Path) -> Arrays:
    # imported here and below because a node must start fast and mostly finds its data prepared
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    x = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    parts = train_test_split(x, digits.target, test_size=0.2, stratify=digits.target, random_state=0)
    return dict(zip(("x_train", "x_test", "y_train", "y_test"), parts, strict=True))


def _photos(_: Path) -> Arrays:
    from sklearn.datasets import load_sample_images
    from sklearn.model_selection import train_test_split

    patches, labels = [], []
    for number, photo in enumerate(load_sample_images().images):
        grey = photo.mean(-1)
        height, width = (side // 8 for side in grey.shape)
        cut = grey[: height * 8, : width * 8].reshape(height, 8, width, 8).swapaxes(1, 2).reshape(-1, 8, 8)
        patches.append(np.rint(cut).astype(np.uint8))
        labels.append(np.full(len(cut), number))
    parts = train_test_split(np.concatenate(patches), np.concatenate(labels), test_size=0.2, random_state=0)
    return dict(zip(("x_train", "x_test", "y_train", "y_test"), parts, strict=True))


def _torchvision(name: str, root: Path) -> Arrays:
    """Those of torchvision's datasets that are built alike."""
    from torchvision import datasets

    arrays: Arrays = {}
    for part in ("train", "test"):
        data = getattr(datasets, name)(root, train=part == "train", download=True)
        arrays |= {f"x_{part}": np.asarray(data.data), f"y_{part}": np.asarray(data.targets)}
    return arrays


def _emnist_letters(root: Path) -> Arrays:
    from torchvision.datasets import EMNIST

    arrays: Arrays = {}
    for part in ("train", "test"):
        data = EMNIST(root, split="letters", train=part == "train", download=True)
        arrays |= {f"x_{part}": upright(data.data.numpy()), f"y_{part}": data.targets.numpy() - 1}
    return arrays


def _svhn(root: Path) -> Arrays:
    from torchvision.datasets import SVHN

    arrays: Arrays = {}
    for part in ("train", "test"):
        data = SVHN(root, split=part, download=True)
        arrays |= {f"x_{part}": data.data.transpose(0, 2, 3, 1), f"y_{part}": data.labels}
    return arrays


# fmt: off
CIFAR100_SUPERCLASS = (  # of the fine labels 0…99, in the order of the original files
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1,
    10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12,
    12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0,
    17, 8, 14, 13,
)
# fmt: on

_CIFAR100 = partial(_torchvision, "CIFAR100")
_CIFAR100_MEAN, _CIFAR100_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)

DATASETS.add("digits")(DatasetSpec(_digits, 10, (0.3053,), (0.3759,), bundled=True))
# 8×8 patches of two photographs (scikit-learn's samples), labelled by photograph: what the digits are not
DATASETS.add("photos")(DatasetSpec(_photos, 2, (0.4043,), (0.3165,), bundled=True))
DATASETS.add("mnist")(DatasetSpec(partial(_torchvision, "MNIST"), 10, (0.1307,), (0.3081,)))
DATASETS.add("fashion-mnist")(DatasetSpec(partial(_torchvision, "FashionMNIST"), 10, (0.2860,), (0.3530,)))
DATASETS.add("emnist-letters")(DatasetSpec(_emnist_letters, 26, (0.1722,), (0.3309,)))
DATASETS.add("svhn")(DatasetSpec(_svhn, 10, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)))
DATASETS.add("cifar10")(
    DatasetSpec(partial(_torchvision, "CIFAR10"), 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
)
DATASETS.add("cifar100")(DatasetSpec(_CIFAR100, 100, _CIFAR100_MEAN, _CIFAR100_STD))
DATASETS.add("cifar100-superclass")(
    DatasetSpec(_CIFAR100, 20, _CIFAR100_MEAN, _CIFAR100_STD, source="cifar100", superclass=CIFAR100_SUPERCLASS)
)
