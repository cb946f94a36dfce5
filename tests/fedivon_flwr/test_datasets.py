"""Datasets: from `.npz`, from torchvision's files, from scikit-learn; the cache; the sentences for what is wrong."""

import os
import pickle
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image

from fedivon_flwr.data import Contract, cache, datasets
from fedivon_flwr.data.datasets import (
    DATASETS,
    Dataset,
    Split,
    batch_to_tensor,
    channels_last,
    load,
    normalise,
    upright,
)
from fedivon_flwr.errors import UserError

REAL = Path(os.environ.get("FEDIVON_DATA", "")) if os.environ.get("FEDIVON_DATA") else None
FETCHED = {name for name in DATASETS if not DATASETS[name].bundled}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("FEDIVON_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FEDIVON_CACHE", str(tmp_path / "cache"))
    load.cache_clear()
    yield tmp_path
    load.cache_clear()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def raw(shape: tuple[int, ...] = (8, 8), classes: int = 3, train: int = 12, test: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (train, *shape), np.uint8),
        "y_train": (np.arange(train) % classes).astype(np.uint8),
        "x_test": rng.integers(0, 256, (test, *shape), np.uint8),
        "y_test": (np.arange(test) % classes).astype(np.uint8),
    }


def save(path: Path, arrays: dict[str, np.ndarray]) -> str:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return str(path)


# ---------------------------------------------------------------- what load gives


def test_digits_need_neither_network_nor_data_folder(offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDIVON_DATA", "no such folder")
    digits = load("digits")
    assert digits.train.x.shape == (1437, 8, 8, 1)
    assert digits.test.x.shape == (360, 8, 8, 1)
    assert (digits.classes, digits.shape) == (10, (1, 8, 8))
    assert digits.train.x.max() == 255
    assert np.bincount(digits.test.y).tolist() == [36, 36, 35, 37, 36, 37, 36, 36, 35, 36]
    pixels = np.concatenate([digits.train.x, digits.test.x]) / 255
    np.testing.assert_allclose((*digits.mean, *digits.std), (pixels.mean(), pixels.std()), atol=1e-4)


def test_photos_are_patches_of_two_photographs(offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDIVON_DATA", raising=False)
    photos = load("photos")
    assert (photos.classes, photos.shape) == (2, load("digits").shape)
    assert len(photos.train) + len(photos.test) == 2 * (427 // 8) * (640 // 8)
    pixels = np.concatenate([photos.train.x, photos.test.x]) / 255
    np.testing.assert_allclose((*photos.mean, *photos.std), (pixels.mean(), pixels.std()), atol=1e-3)
    from sklearn.datasets import load_sample_image

    corner = np.rint(load_sample_image("china.jpg").mean(-1)[8:16, 16:24]).astype(np.uint8)
    mine = np.concatenate([photos.train.x, photos.test.x])[..., 0]
    labels = np.concatenate([photos.train.y, photos.test.y])
    assert 0 in labels[(mine == corner).all((1, 2))]


def test_arrays_are_read_only_memory_maps(folders: Path) -> None:
    own = load(save(folders / "own.npz", raw()))
    assert isinstance(own.train.x, np.memmap)
    assert isinstance(own.test.y, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        own.train.x[0] = 0


@pytest.mark.parametrize(("shape", "seen"), [((8, 6), (1, 8, 6)), ((8, 6, 1), (1, 8, 6)), ((8, 6, 3), (3, 8, 6))])
def test_own_images(folders: Path, shape: tuple[int, ...], seen: tuple[int, ...]) -> None:
    arrays = raw(shape)
    own = load(save(folders / "own.npz", arrays))
    assert own.train.x.shape == (12, 8, 6, seen[0])
    assert np.array_equal(own.train.x.reshape(12, *shape), arrays["x_train"])
    assert (own.shape, own.classes, own.mean, own.std) == (seen, 3, (0.5,) * seen[0], (0.5,) * seen[0])
    assert own.train.y.tolist() == arrays["y_train"].tolist()
    assert own.train.group is own.train.y
    assert len(own.test) == 6


def test_own_float_data(folders: Path) -> None:
    arrays = raw((5,))
    arrays |= {name: arrays[name].astype(np.float64) / 7 for name in ("x_train", "x_test")}
    own = load(save(folders / "own.npz", arrays))
    assert (own.shape, own.mean, own.std) == ((5,), (0.0,), (1.0,))
    assert own.train.x.dtype == np.float32
    batch = batch_to_tensor(own.train.x[2:4], own, CPU)
    assert batch.dtype == torch.float32
    np.testing.assert_allclose(batch.numpy(), arrays["x_train"][2:4], rtol=1e-6)


def test_classes_of_own_data_count_the_test_labels(folders: Path) -> None:
    arrays = raw()
    arrays["y_test"][0] = 7
    assert load(save(folders / "own.npz", arrays)).classes == 8


def test_own_data_without_test_data(folders: Path) -> None:
    arrays = {name: array for name, array in raw().items() if "train" in name}
    data = load(save(folders / "own.npz", arrays))
    assert (len(data.train), len(data.test), data.classes) == (12, 0, 3)
    assert data.test.x.shape == (0, 8, 8, 1)


def image(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.mark.parametrize(("names", "listed"), [(("0", "2"), ""), (("cat", "owl"), "cat\ndog\nowl\n")])
@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3)])
def test_a_folder_of_images(folders: Path, shape: tuple[int, ...], names: tuple[str, str], listed: str) -> None:
    arrays = raw(shape, classes=2, train=6, test=2)
    own = folders / "own"
    for part in ("train", "test"):
        for i, (x, y) in enumerate(zip(arrays[f"x_{part}"], arrays[f"y_{part}"], strict=True)):
            image(own / part / names[y] / f"{i}.png", x)
    (own / "train" / "notes.txt").write_text("not an image")
    if listed:
        (own / "classes.txt").write_text(listed)
    data = load(str(own))
    order = [0, 2, 4, 1, 3, 5]  # by class, then by name
    np.testing.assert_array_equal(data.train.x, arrays["x_train"][order].reshape(6, 5, 4, -1))
    assert data.train.y.tolist() == [0, 0, 0, 2, 2, 2]
    assert data.test.y.tolist() == [0, 2]
    assert (data.classes, data.shape[1:]) == (3, (5, 4))
    image(own / "train" / names[0] / "9.png", arrays["x_train"][0])
    load.cache_clear()
    assert len(load(str(own)).train) == 7


def test_named_dataset_from_npz(folders: Path, offline: None) -> None:
    arrays = raw((32, 32, 3), classes=10)
    save(folders / "data/cifar10.npz", arrays)
    data = load("cifar10")
    assert np.array_equal(data.test.x, arrays["x_test"])
    assert (data.name, data.classes, data.shape) == ("cifar10", 10, (3, 32, 32))


def test_superclasses_share_the_arrays_of_cifar100(folders: Path, offline: None) -> None:
    arrays = raw((32, 32, 3), classes=100, train=100, test=100)
    save(folders / "data/cifar100.npz", arrays)
    fine, coarse = load("cifar100"), load("cifar100-superclass")
    assert (fine.classes, coarse.classes) == (100, 20)
    assert coarse.train.group.tolist() == fine.train.y.tolist() == list(range(100))
    # aquatic mammals are beaver, dolphin, otter, seal, whale: the alphabetical labels 4, 30, 55, 72, 95
    assert np.flatnonzero(coarse.train.y == 0).tolist() == [4, 30, 55, 72, 95]
    assert np.bincount(coarse.test.y).tolist() == [5] * 20
    with pytest.raises(ValueError, match="read-only"):
        coarse.train.y[0] = 0
    assert len([path for path in (folders / "cache/prepared").iterdir() if path.is_dir()]) == 1


@pytest.mark.skipif(REAL is None or not (REAL / "cifar100.npz").is_file(), reason="FEDIVON_DATA has no cifar100.npz")
def test_superclasses_of_the_real_cifar100() -> None:
    assert REAL is not None
    table = np.array(datasets.CIFAR100_SUPERCLASS)
    with np.load(REAL / "cifar100.npz") as file:
        for part in ("train", "test"):
            assert np.array_equal(table[file[f"y_{part}"]], file[f"yc_{part}"])


@pytest.mark.parametrize("name", sorted(FETCHED - {"cifar100-superclass"}))
def test_normalisation_is_that_of_the_real_data(name: str) -> None:
    spec = DATASETS[name]
    if REAL is None or not (REAL / f"{name}.npz").is_file():
        pytest.skip(f"FEDIVON_DATA has no {name}.npz")
    with np.load(REAL / f"{name}.npz") as file:
        x = file["x_train"][::10]
    x = x.reshape(-1, len(spec.mean)) / 255
    np.testing.assert_allclose(spec.mean, x.mean(axis=0), atol=0.005)
    np.testing.assert_allclose(spec.std, x.std(axis=0), atol=0.005)


# ---------------------------------------------------------------- tensors


def test_batch_is_normalised_and_channels_last() -> None:
    x = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), np.uint8)
    split = Split(x, np.zeros(5, np.int64), np.zeros(5, np.int64))
    data = Dataset("d", split, split, 1, (3, 4, 6), (0.1, 0.2, 0.3), (0.5, 0.4, 0.2))
    batch = batch_to_tensor(x, data, CPU)
    assert batch.shape == (5, 3, 4, 6)
    assert batch.dtype == torch.float32
    assert batch.is_contiguous(memory_format=torch.channels_last)
    expected = ((x / 255 - np.array(data.mean)) / np.array(data.std)).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(batch.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_what_follows_a_batch_is_channels_last(channels: int) -> None:
    """Also behind images of one channel, whose memory alone does not tell the order."""
    x = np.zeros((5, 8, 6, channels), np.uint8)
    batch = normalise(x, (0.5,) * channels, (0.5,) * channels, CPU)
    for images in (batch, channels_last(torch.zeros(5, channels, 8, 6))):
        behind = torch.nn.functional.conv2d(images, torch.zeros(4, channels, 3, 3))
        assert behind.stride() == (4 * 6 * 4, 1, 4 * 4, 4)


@pytest.mark.filterwarnings("error")
def test_batch_of_a_memory_map_leaves_it_alone(folders: Path) -> None:
    own = load(save(folders / "own.npz", raw()))
    before = own.train.x[:3].copy()
    one, other = batch_to_tensor(own.train.x[:3], own, CPU), batch_to_tensor(own.train.x[[0, 1, 2]], own, CPU)
    assert torch.equal(one, other)
    assert np.array_equal(own.train.x[:3], before)


def test_float_batch_is_no_view_of_the_data(folders: Path) -> None:
    arrays = raw((5,))
    arrays |= {name: arrays[name].astype(np.float32) for name in ("x_train", "x_test")}
    own = load(save(folders / "own.npz", arrays))
    batch_to_tensor(own.train.x[:2], own, CPU).zero_()
    assert np.array_equal(own.train.x[:2], arrays["x_train"][:2])


# ---------------------------------------------------------------- torchvision's files


def idx(path: Path, array: np.ndarray) -> None:
    """The file format of MNIST: a magic number, the shape, the bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def test_upright_swaps_rows_and_columns() -> None:
    image = np.zeros((1, 2, 3), np.uint8)
    image[0, 0, 2] = 9
    assert upright(image).tolist() == [[[0, 0], [0, 0], [9, 0]]]


def test_emnist_of_torchvision_equals_the_npz(folders: Path, offline: None) -> None:
    arrays = raw((28, 28), classes=26, train=30, test=27)
    for part in ("train", "test"):
        stem = folders / f"data/torchvision/EMNIST/raw/emnist-letters-{part}"
        idx(Path(f"{stem}-images-idx3-ubyte"), arrays[f"x_{part}"].transpose(0, 2, 1))
        idx(Path(f"{stem}-labels-idx1-ubyte"), arrays[f"y_{part}"] + 1)
    ours = load("emnist-letters")
    assert ours.classes == 26
    for part, split in (("train", ours.train), ("test", ours.test)):
        assert np.array_equal(split.x[..., 0], arrays[f"x_{part}"])
        assert np.array_equal(split.y, arrays[f"y_{part}"])


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_mnist_of_torchvision(folders: Path, offline: None, name: str, folder: str) -> None:
    arrays = raw((28, 28), classes=10)
    for part, stem in (("train", "train"), ("test", "t10k")):
        idx(folders / f"data/torchvision/{folder}/raw/{stem}-images-idx3-ubyte", arrays[f"x_{part}"])
        idx(folders / f"data/torchvision/{folder}/raw/{stem}-labels-idx1-ubyte", arrays[f"y_{part}"])
    ours = load(name)
    assert np.array_equal(ours.train.x[..., 0], arrays["x_train"])
    assert np.array_equal(ours.test.y, arrays["y_test"])


def test_cifar_of_torchvision(folders: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR100

    root = folders / "data/torchvision" / CIFAR100.base_folder
    root.mkdir(parents=True)
    arrays = raw((32, 32, 3), classes=100, train=20)
    for part in ("train", "test"):
        rows = arrays[f"x_{part}"].transpose(0, 3, 1, 2).reshape(-1, 3072)
        (root / part).write_bytes(pickle.dumps({"data": rows, "fine_labels": arrays[f"y_{part}"].tolist()}))
        monkeypatch.setattr(CIFAR100, f"{part}_list", [[part, None]])
    (root / "meta").write_bytes(pickle.dumps({"fine_label_names": []}))
    monkeypatch.setattr(CIFAR100, "meta", {"filename": "meta", "key": "fine_label_names", "md5": None})
    ours = load("cifar100-superclass")
    assert np.array_equal(ours.train.x, arrays["x_train"])
    assert np.array_equal(ours.train.group, arrays["y_train"])
    assert ours.train.y[:6].tolist() == [4, 1, 14, 8, 0, 6]


def test_svhn_of_torchvision(folders: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.io import savemat  # type: ignore[import-untyped]
    from torchvision.datasets import SVHN

    arrays = raw((32, 32, 3), classes=10)
    (folders / "data/torchvision").mkdir()
    files: dict[str, Any] = {}
    for part in ("train", "test"):
        labels = np.where(arrays[f"y_{part}"] == 0, 10, arrays[f"y_{part}"])  # the files call the digit 0 a 10
        mat = {"X": arrays[f"x_{part}"].transpose(1, 2, 3, 0), "y": labels[:, None]}
        savemat(folders / f"data/torchvision/{part}.mat", mat)
        files[part] = ["no address", f"{part}.mat", None]
    monkeypatch.setattr(SVHN, "split_list", files)
    ours = load("svhn")
    assert np.array_equal(ours.train.x, arrays["x_train"])
    assert np.array_equal(ours.train.y, arrays["y_train"])


# ---------------------------------------------------------------- the cache


def test_prepared_once(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(folders / "own.npz", raw())
    first = load(path)
    load.cache_clear()
    monkeypatch.setattr(datasets, "read_npz", lambda _: pytest.fail("prepared again"))
    assert np.array_equal(load(path).train.x, first.train.x)


def test_a_changed_file_is_prepared_anew(folders: Path) -> None:
    path = save(folders / "own.npz", raw())
    assert load(path).classes == 3
    load.cache_clear()
    save(folders / "own.npz", raw(classes=4))
    os.utime(path, (1, 1))
    assert load(path).classes == 4


def test_two_files_of_one_name_are_kept_apart(folders: Path) -> None:
    for folder, classes in (("a", 2), ("b", 3)):
        (folders / folder).mkdir()
        save(folders / folder / "own.npz", raw(classes=classes))
        os.utime(folders / folder / "own.npz", (1, 1))
    assert [load(str(folders / folder / "own.npz")).classes for folder in "ab"] == [2, 3]


def test_a_killed_preparation_is_not_used(folders: Path) -> None:
    path = save(folders / "own.npz", raw())
    stale = cache.cache_folder() / f"own-{cache.fingerprint(Path(path))}.tmp"
    stale.mkdir(parents=True)
    (stale / "x_train.npy").write_bytes(b"half an arr")
    assert len(load(path).train) == 12
    assert not stale.exists()


def test_a_failed_write_leaves_nothing(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(folders / "own.npz", raw())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(UserError, match=r"No space left on device\); set FEDIVON_CACHE"):
            load(path)
    assert [entry.suffix for entry in cache.cache_folder().iterdir() if entry.suffix != ".lock"] == []
    assert len(load(path).train) == 12


def test_a_damaged_cache_says_what_to_delete(folders: Path) -> None:
    path = save(folders / "own.npz", raw())
    load(path)
    load.cache_clear()
    next(cache.cache_folder().glob("*/x_train.npy")).write_bytes(b"")
    with pytest.raises(UserError, match="delete that folder"):
        load(path)


SLOW_LOAD = """
import sys, time
from fedivon_flwr.data import datasets

def slow(path, read=datasets.read_npz):
    with open(sys.argv[2], "a") as log:
        log.write("prepared ")
    time.sleep(0.5)
    return read(path)

datasets.read_npz = slow
print(datasets.load(sys.argv[1]).train.x.sum())
"""


def test_of_two_processes_at_once_one_prepares_and_both_load(folders: Path) -> None:
    arrays = raw((32, 32, 3), train=4000)
    path, log = save(folders / "own.npz", arrays), folders / "log"
    command = [sys.executable, "-c", SLOW_LOAD, path, str(log)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [run.communicate(timeout=60)[0] for run in runs] == [f"{arrays['x_train'].sum()}\n"] * 2
    assert log.read_text() == "prepared "
    kept = [entry.name for entry in cache.cache_folder().iterdir() if entry.suffix != ".lock"]
    assert kept == [f"own-{cache.fingerprint(Path(path))}"]


def test_default_folders(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDIVON_DATA")
    monkeypatch.delenv("FEDIVON_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folders / "xdg"))
    assert cache.data_folder() == folders / "xdg/fedivon"
    assert cache.cache_folder() == folders / "xdg/fedivon/prepared"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(folders))
    assert cache.data_folder() == folders / ".cache/fedivon"


def test_prepared_data_load_without_heavy_imports(folders: Path) -> None:
    load("digits")
    script = (
        "import sys; from fedivon_flwr.data import load; load('digits'); "
        "print(sorted({'torchvision', 'sklearn', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---------------------------------------------------------------- what is wrong, in one sentence


def sentence(name: str) -> str:
    with pytest.raises(UserError) as caught:
        load(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_unknown_name() -> None:
    assert sentence("imagenet").startswith("Unknown dataset 'imagenet'; choose one of: cifar10, cifar100,")


@pytest.mark.parametrize("name", sorted(FETCHED))
def test_without_network(folders: Path, offline: None, name: str) -> None:
    text, source = sentence(name), DATASETS[name].source or name
    for part in (
        f"'{source}' could not be downloaded",
        f"put {source}.npz (x_train",
        str(folders / "data"),
        "'digits'",
    ):
        assert part in text


def test_data_folder_that_is_none(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDIVON_DATA", str(folders / "typo"))
    assert "FEDIVON_DATA names" in sentence("cifar10")


def test_data_folder_that_cannot_be_written(folders: Path) -> None:
    (folders / "data/torchvision").write_text("a file in the way")
    text = sentence("cifar10")
    assert f"could not be downloaded into '{folders / 'data'}'" in text
    assert "set FEDIVON_DATA" in text


def test_cache_that_cannot_be_written(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folders / "file").touch()
    monkeypatch.setenv("FEDIVON_CACHE", str(folders / "file"))
    assert "set FEDIVON_CACHE to a folder" in sentence("digits")


def test_missing_file(folders: Path) -> None:
    assert "There is no data file" in sentence(str(folders / "none.npz"))


@pytest.mark.parametrize("content", [b"", b"no zip file", b"PK\x03\x04 and no more"])
def test_unreadable_file(folders: Path, content: bytes) -> None:
    (folders / "own.npz").write_bytes(content)
    assert "cannot be read as .npz data" in sentence(str(folders / "own.npz"))


def test_a_single_array_or_objects_are_no_data(folders: Path) -> None:
    np.save(folders / "one.npy", np.zeros(3))
    (folders / "one.npy").rename(folders / "own.npz")
    assert "cannot be read as .npz data" in sentence(str(folders / "own.npz"))
    path = save(folders / "objects.npz", raw() | {"y_train": np.array([{}] * 12, object)})
    assert "cannot be read as .npz data" in sentence(path)


FLOAT = np.zeros((12, 5), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": np.zeros((11, 8, 8), np.uint8)}, "11 examples in x_train but 12 labels in y_train"),
        ({"y_test": np.zeros(5, np.int64)}, "6 examples in x_test but 5 labels in y_test"),
        ({"y_train": np.arange(12) - 1}, "has the label -1; labels must count from 0"),
        ({"y_train": np.arange(12) / 2}, "labels must be whole numbers"),
        ({"y_train": np.zeros((12, 1), int)}, "labels must be whole numbers along one axis"),
        ({"x_train": FLOAT}, "must be of one kind"),
        ({"x_test": np.zeros((6, 8, 9), np.uint8)}, "must be of one kind"),
        ({"x_train": np.full((12, 5), np.nan)}, "not finite numbers"),
        ({"x_train": np.full((12, 5), 1e300)}, "not finite numbers"),
        ({"x_train": np.zeros((12, 5), np.uint8)}, "it must be uint8 images"),
        ({"x_train": np.zeros((12, 8, 8), np.int32)}, "it must be uint8 images"),
        ({"x_train": np.zeros((12, 3, 8, 8), np.uint8)}, "channels first"),
        ({"x_test": np.zeros((0, 8, 8), np.uint8), "y_test": np.zeros(0, int)}, "is empty"),
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_own_data_that_are_wrong(folders: Path, change: dict[str, np.ndarray], message: str) -> None:
    assert message in sentence(save(folders / "own.npz", raw() | change))


@pytest.mark.parametrize(
    ("there", "missing"),
    [(("x_train",), "y_train"), (("x_train", "y_train", "x_test"), "y_test"), ((), "x_train, y_train")],
)
def test_missing_arrays(folders: Path, there: tuple[str, ...], missing: str) -> None:
    arrays = {name: array for name, array in raw().items() if name in there}
    assert f"lacks {missing}; it must hold" in sentence(save(folders / "own.npz", arrays))


def test_folders_that_are_wrong(folders: Path) -> None:
    own, pixels = folders / "own", raw()["x_train"]
    own.mkdir()
    assert "has no images (" in sentence(str(own))
    image(own / "train" / "cat" / "1.png", pixels[0])
    assert "is named after no label; use whole numbers from 0, or list" in sentence(str(own))
    (own / "classes.txt").write_text("dog\n")
    assert "is named after no class in classes.txt" in sentence(str(own))
    (own / "classes.txt").write_text("cat\n")
    image(own / "train" / "cat" / "2.png", pixels[1][:5])
    assert "are 8 by 8 and 8 by 5 pixels; scale them to one size" in sentence(str(own))
    (own / "train" / "cat" / "2.png").write_text("no image")
    assert "2.png' cannot be read as an image" in sentence(str(own))


# ---------------------------------------------------------------- what nodes have in common


def test_data_of_a_node_fit_the_contract_or_are_refused(folders: Path) -> None:
    own = load(save(folders / "own.npz", raw((8, 8), classes=3)))
    agreed = Contract.parse("1x8x8", 5, "0.3", "0.2")
    fitted = agreed.fit(own)
    assert (fitted.classes, fitted.mean, fitted.std) == (5, (0.3,), (0.2,))
    assert fitted.train is own.train
    with pytest.raises(UserError, match=r"have the shape \(1, 8, 8\) but the model takes \(3, 8, 8\)"):
        Contract.parse("3x8x8", 3).fit(own)
    with pytest.raises(UserError, match=r"go up to 2 but the model knows the classes 0 to 1"):
        Contract.parse("1x8x8", 2).fit(own)


def test_a_server_without_data_knows_what_the_model_takes() -> None:
    data = Contract.parse("3x8x8", 4).without_data()
    assert (len(data.train), len(data.test), data.shape, data.classes) == (0, 0, (3, 8, 8), 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("", 2), "'input-shape' is '' but must be CHANNELSxHEIGHTxWIDTH"),
        (("3xx", 2), "'input-shape' is '3xx'"),
        (("3x0x2", 2), "'input-shape' is '3x0x2'"),
        (("30", 1), "'classes' is 1 but must be at least 2"),
        (("3x8x8", 2, "0.5"), "'pixel-mean' is '0.5' but must have 3 numbers"),
        (("1x8x8", 2, "0.5", "0"), "'pixel-std' is '0' but must have 1 positive numbers"),
        (("1x8x8", 2, "none"), "'pixel-mean' is 'none'"),
        (("1x8x8", 2, "nan"), "'pixel-mean' is 'nan'"),
    ],
)
def test_contracts_that_are_wrong(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Contract.parse(*given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "arrays", [raw((32, 32), 10), raw((32, 32, 3), 11), {**raw(), "x_train": FLOAT, "x_test": FLOAT[:6]}]
)
def test_a_named_file_that_holds_something_else(folders: Path, arrays: dict[str, np.ndarray]) -> None:
    save(folders / "data/cifar10.npz", arrays)
    assert "are of something else: expected uint8 images with 3 channel(s) and labels from 0 to 9" in sentence(
        "cifar10"
    )


# Held out for validation


def test_validation_takes_nothing_from_the_test_data(tmp_path: Path) -> None:
    x, y = np.arange(2 * 40, dtype=np.float32).reshape(40, 2), np.arange(40) % 4
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=-1 - x[:8], y_test=y[:8])
    whole, held = load(str(tmp_path / "own.npz")), load(str(tmp_path / "own.npz") + "@validation")
    assert (len(held.train), len(held.test)) == (36, 4)
    assert sorted(held.test.y) == [0, 1, 2, 3]  # some of every class
    together = np.concatenate([held.train.x, held.test.x])
    assert sorted(map(tuple, together)) == sorted(map(tuple, whole.train.x))
    assert (held.shape, held.classes, held.mean) == (whole.shape, whole.classes, whole.mean)
    with pytest.raises(UserError, match="Unknown dataset 'nope'"):
        load("nope@validation")


def test_validation_keeps_subclasses(tmp_path: Path) -> None:
    """A dataset with superclasses is divided by subclass."""
    labels = np.repeat(np.arange(100), 10)
    x = np.zeros((1000, 4, 4, 3), np.uint8)
    np.savez(tmp_path / "data" / "cifar100.npz", x_train=x, y_train=labels, x_test=x, y_test=labels)
    held = load("cifar100-superclass@validation")
    assert held.classes == 20
    assert np.array_equal(np.sort(held.test.group), np.arange(100))
