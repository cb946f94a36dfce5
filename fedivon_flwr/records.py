"""The wire contract: named arrays ⇄ Flower's `ArrayRecord`, in one place.

A message carries exactly one `ArrayRecord` with the keys ``mean/<parameter>``, ``hess/<parameter>`` (for
methods with a posterior) and ``buffer/<name>`` (buffers and frozen parameters), each in model order.
"""

import warnings
from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor, nn

from fedivon_flwr.posterior import Layout

# Arrays that come off the wire are read-only, and so is what this project does with them.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

MEAN, HESS, BUFFER = "mean/", "hess/", "buffer/"
NUM_EXAMPLES, TRAIN_EXAMPLES = "num-examples", "train-examples"

NDArrays = dict[str, NDArray[Any]]


class LazyArray(Array):
    """A Flower `Array` that keeps its ndarray and is serialised only when somebody asks for the bytes.

    Inside one machine (Ray) nobody asks, and the array travels through shared memory without a copy.
    """

    def __init__(self, ndarray: NDArray[Any]) -> None:
        self.__dict__.update(
            ndarray=ndarray, dtype=str(ndarray.dtype), shape=tuple(ndarray.shape), stype="numpy.ndarray"
        )

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The array in numpy's file format, as Flower's own `Array` holds it."""
        if "_bytes" not in self.__dict__:
            buffer = BytesIO()
            np.save(buffer, self.__dict__["ndarray"], allow_pickle=False)
            self.__dict__["_bytes"] = buffer.getvalue()
        return cast("bytes", self.__dict__["_bytes"])

    def numpy(self) -> NDArray[Any]:
        """The array itself."""
        return cast("NDArray[Any]", self.__dict__["ndarray"])

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.__dict__["ndarray"],))  # by function: the class goes by another name, see below


# Flower writes the class name into the header of what it sends, and the receiver looks it up there.
LazyArray.__qualname__ = "Array"


def _rebuild(ndarray: NDArray[Any]) -> LazyArray:
    return LazyArray(ndarray)


def to_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Named arrays as a record; nothing is copied."""
    record = ArrayRecord()
    for key, array in arrays.items():
        record[key] = LazyArray(np.asarray(array))  # arithmetic on a 0-d array gives a scalar
    return record


def from_record(record: ArrayRecord) -> NDArrays:
    """The arrays of a record; read-only views of its bytes, nothing is copied."""
    return {key: array.numpy() if isinstance(array, LazyArray) else view(array) for key, array in record.items()}


def view(array: Array) -> NDArray[Any]:
    """A numpy view of the payload of a Flower `Array`."""
    stream = BytesIO(array.data)
    version = npy.read_magic(stream)
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read_header(stream)
    if dtype.hasobject:
        raise ValueError("arrays of Python objects are not accepted")
    flat = np.frombuffer(array.data, dtype=dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if fortran else "C")


def nbytes(arrays: Mapping[str, NDArray[Any]]) -> int:
    """The size of the arrays in bytes."""
    return sum(array.nbytes for array in arrays.values())


def wire_keys(model: nn.Module, hess: bool) -> list[str]:
    """The keys of a model's arrays in the order of the wire."""
    names = Layout.of(model).names
    means, hessians = [MEAN + name for name in names], [HESS + name for name in names]
    return means + (hessians if hess else []) + [BUFFER + name for name, _ in fixed_tensors(model)]


def is_own(key: str, prefix: str | None) -> bool:
    """Whether a parameter or buffer stays with the client.

    >>> is_own("mean/head.bias", "head"), is_own("mean/features.0.bias", "head"), is_own("mean/head.bias", None)
    (True, False, False)
    """
    return prefix is not None and key.partition("/")[2].startswith(prefix)


def fixed_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers and frozen parameters: part of the model, but not of the posterior."""
    trainable = set(Layout.of(model).names)
    return [(name, tensor) for name, tensor in model.state_dict(keep_vars=True).items() if name not in trainable]


def model_arrays(model: nn.Module, hess: float | None = None) -> NDArrays:
    """A model as named arrays; with `hess`, as a posterior with this Hessian everywhere."""
    arrays = {MEAN + name: to_numpy(p) for name, p in model.named_parameters() if p.requires_grad}
    if hess is not None:
        arrays |= {HESS + name[len(MEAN) :]: np.full_like(array, hess) for name, array in arrays.items()}
    return arrays | {BUFFER + name: to_numpy(tensor) for name, tensor in fixed_tensors(model)}


def initial_arrays(model: nn.Module, hess: float | None = None) -> ArrayRecord:
    """What a Strategy starts from: `model_arrays` as a record."""
    return to_record(model_arrays(model, hess))


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """A copy on the CPU in C order (a view would change with the model)."""
    return np.array(tensor.detach().cpu().numpy(), order="C")


def load_model(model: nn.Module, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Copy means and buffers into a model."""
    state = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for key, array in arrays.items():
            if not key.startswith(HESS):
                state[key.split("/", 1)[1]].copy_(tensor(array))


def flat(arrays: Mapping[str, NDArray[Any]], prefix: str) -> Tensor:
    """All arrays of one prefix as one vector (a copy)."""
    return torch.cat([tensor(array).reshape(-1) for key, array in arrays.items() if key.startswith(prefix)])


def unflatten(vector: Tensor, layout: Layout, prefix: str) -> NDArrays:
    """A vector as named arrays of one prefix: views of one array."""
    return {prefix + name: part.numpy() for name, part in layout.split(vector.detach().cpu()).items()}


def tensor(array: NDArray[Any]) -> Tensor:
    """A tensor on the memory of an array, which must not be written to."""
    return torch.from_numpy(array)


def mismatch(arrays: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> str | None:
    """Why arrays do not have the keys, shapes and types that are expected; None when they have."""
    if arrays.keys() != expected.keys():
        return f"the arrays' keys differ: {describe(expected.keys() - arrays.keys(), arrays.keys() - expected.keys())}"
    for key, array in arrays.items():
        if array.shape != expected[key].shape:
            return f"{key} has the shape {array.shape} instead of {expected[key].shape}"
        if array.dtype != expected[key].dtype:
            return f"{key} is {array.dtype} instead of {expected[key].dtype}"
    return None


def describe(missing: Iterable[str], extra: Iterable[str]) -> str:
    """Name what is missing and what is too much, shortly."""
    parts = [
        f"{label} {', '.join(sorted(keys)[:3])}" + (" …" if len(keys) > 3 else "")
        for label, keys in (("missing", list(missing)), ("unexpected", list(extra)))
        if keys
    ]
    return "; ".join(parts)
