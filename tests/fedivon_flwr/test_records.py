"""The wire contract: what goes in comes out, through memory, through pickling and through Flower's own objects."""

import pickle
from io import BytesIO
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from fedivon_flwr import records
from fedivon_flwr.posterior import Layout
from fedivon_flwr.records import (
    LazyArray,
    flat,
    from_record,
    initial_arrays,
    load_model,
    mismatch,
    model_arrays,
    nbytes,
    to_record,
    unflatten,
    view,
    wire_keys,
)


class Net(nn.Module):
    """Convolution, batch norm (with buffers), a frozen layer between trainable ones, a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.frozen = nn.Linear(2, 3).requires_grad_(requires_grad=False)
        self.head = nn.Linear(3, 4)
        self.register_buffer("scale", torch.tensor([1.5, 2.5]))


TRAINABLE = ["conv.weight", "conv.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"]
FIXED = [
    *("scale", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
    *("frozen.weight", "frozen.bias"),
]


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    model = Net()
    model.norm.running_mean = torch.randn(2)
    model.norm.num_batches_tracked = torch.tensor(seed)
    return model


ARRAYS: dict[str, NDArray[Any]] = {
    "mean/b": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3),
    "mean/a": np.array([np.nan, np.inf, -0.0], np.float32),
    "hess/double": np.array([[1.0, 2.0]]),
    "buffer/count": np.array(7),
    "buffer/bytes": np.arange(5, dtype=np.uint8),
    "buffer/fortran": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "buffer/strided": np.arange(10, dtype=np.int64)[::3],
    "buffer/empty": np.zeros((0, 3), np.float16),
    "buffer/one": np.ones(1, bool),
}


def assert_same(arrays: dict[str, NDArray[Any]], expected: dict[str, NDArray[Any]]) -> None:
    assert list(arrays) == list(expected)
    for key, array in arrays.items():
        assert array.dtype == expected[key].dtype, key
        assert array.shape == expected[key].shape, key
        np.testing.assert_array_equal(array, expected[key])


def over_the_wire(record: ArrayRecord) -> ArrayRecord:
    """Taken apart and put together as Flower does between two machines."""
    objects = get_all_nested_objects(record)
    contents = {object_id: thing.deflate() for object_id, thing in objects.items()}
    return cast("ArrayRecord", inflate_object_from_contents(record.object_id, contents))


# Round trips


def test_a_record_gives_its_arrays_back_without_a_copy() -> None:
    arrays = from_record(to_record(ARRAYS))
    assert_same(arrays, ARRAYS)
    assert all(np.shares_memory(arrays[key], ARRAYS[key]) for key in ARRAYS if ARRAYS[key].size)


def test_the_payload_is_that_of_flowers_own_array() -> None:
    for array in ARRAYS.values():
        ours, theirs = LazyArray(array), Array(array)
        assert (ours.data, ours.dtype, ours.shape, ours.stype) == (
            theirs.data,
            theirs.dtype,
            theirs.shape,
            theirs.stype,
        )
        assert ours.object_id == theirs.object_id


def test_flowers_own_record_is_read_as_views_of_its_bytes() -> None:
    record = ArrayRecord({key: Array(array) for key, array in ARRAYS.items()})
    arrays = from_record(record)
    assert_same(arrays, ARRAYS)
    for key, array in arrays.items():
        assert not array.flags.writeable
        assert not array.size or np.shares_memory(array, np.frombuffer(record[key].data, np.uint8))


def test_flower_reads_our_record() -> None:
    for key, array in to_record(ARRAYS).items():
        np.testing.assert_array_equal(np.load(BytesIO(array.data)), ARRAYS[key])
    model = nn.Linear(3, 2)
    record = to_record({key.removeprefix("mean/"): array for key, array in model_arrays(model).items()})
    model.load_state_dict(record.to_torch_state_dict())
    assert len(record.to_numpy_ndarrays()) == 2


def test_the_wire_keeps_arrays_and_their_order() -> None:
    received = over_the_wire(to_record(ARRAYS))
    assert all(type(array) is Array for array in received.values())
    assert_same(from_record(received), ARRAYS)
    assert_same(from_record(over_the_wire(received)), ARRAYS)


def test_a_whole_message_content_survives_the_wire() -> None:
    content = RecordDict({"arrays": to_record(ARRAYS), "metrics": MetricRecord({"num-examples": 3})})
    contents = {key: thing.deflate() for key, thing in get_all_nested_objects(content).items()}
    received = cast("RecordDict", inflate_object_from_contents(content.object_id, contents))
    assert_same(from_record(received.array_records["arrays"]), ARRAYS)
    assert received.metric_records["metrics"] == content.metric_records["metrics"]


def test_large_arrays_cross_the_wire_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    import flwr.app.message.array as flower

    monkeypatch.setattr(flower, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 1000)
    large = {"mean/x": np.arange(5000, dtype=np.float32)}
    record = to_record(large)
    assert len(record["mean/x"].children) > 10
    assert_same(from_record(over_the_wire(record)), large)


@pytest.mark.parametrize("protocol", [2, 5])
def test_pickling_keeps_the_lazy_array(protocol: int) -> None:
    record = to_record(ARRAYS)
    _ = record["mean/b"].data  # bytes that were asked for do not travel
    again = pickle.loads(pickle.dumps(record, protocol))
    assert all(type(array) is LazyArray for array in again.values())
    assert_same(from_record(again), ARRAYS)


def test_pickled_out_of_band_nothing_is_copied() -> None:
    array = np.arange(1000, dtype=np.float32)
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(to_record({"mean/x": array}), 5, buffer_callback=buffers.append)
    again = from_record(pickle.loads(head, buffers=buffers))
    assert len(head) < 2000
    assert np.shares_memory(again["mean/x"], array)


@given(
    dtype=st.sampled_from(["f4", "f8", "i8", "u1", ">f4"]),
    shape=st.lists(st.integers(0, 4), max_size=4),
    fortran=st.booleans(),
)
def test_any_array_can_be_viewed(dtype: str, shape: list[int], fortran: bool) -> None:
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape, order="F" if fortran else "C")
    seen = view(Array(array))
    assert seen.dtype == array.dtype
    assert seen.shape == array.shape
    np.testing.assert_array_equal(seen, array)


def test_a_number_is_an_array_too() -> None:
    """Arithmetic on an array without axes gives a number, not an array."""
    [array] = from_record(to_record({"buffer/count": np.array(7) + np.array(1)})).values()
    assert isinstance(array, np.ndarray)
    assert_same({"x": array}, {"x": np.array(8)})


# What is refused


def hostile(data: bytes) -> Array:
    return Array(dtype="float32", shape=(2,), stype="numpy.ndarray", data=data)


def saved(array: NDArray[Any]) -> bytes:
    buffer = BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def test_python_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="Python objects"):
        view(hostile(saved(np.array([print, "boom"], object))))


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_both_headers_of_numpy_are_read(version: tuple[int, int]) -> None:
    buffer = BytesIO()
    np.lib.format.write_array(buffer, np.arange(3.0), version=version)
    np.testing.assert_array_equal(view(hostile(buffer.getvalue())), np.arange(3.0))


@pytest.mark.parametrize(
    "data",
    [b"", b"nonsense", saved(np.ones(4))[:-1], saved(np.ones(4))[:-8], saved(np.ones(4)) + bytes(8)],
    ids=["nothing", "nonsense", "a byte short", "a number short", "a number too long"],
)
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_record(ArrayRecord({"mean/x": hostile(data)}))


def test_mismatch_says_what_is_wrong() -> None:
    expected = {"mean/a": np.zeros((2, 3), np.float32), "mean/b": np.zeros(4, np.float32)}
    good = {key: array + 1 for key, array in expected.items()}
    assert mismatch(good, expected) is None
    assert mismatch({}, expected) == "the arrays' keys differ: missing mean/a, mean/b"
    assert mismatch(good | {"x": good["mean/a"]}, expected) == "the arrays' keys differ: unexpected x"
    renamed = {"mean/a": good["mean/a"], "mean/c": good["mean/b"]}
    assert mismatch(renamed, expected) == "the arrays' keys differ: missing mean/b; unexpected mean/c"
    turned = good | {"mean/a": good["mean/a"].T}
    assert mismatch(turned, expected) == "mean/a has the shape (3, 2) instead of (2, 3)"
    wide = good | {"mean/b": good["mean/b"].astype(np.float64)}
    assert mismatch(wide, expected) == "mean/b is float64 instead of float32"
    swapped = good | {"mean/b": good["mean/b"].astype(">f4")}
    assert "mean/b" in (mismatch(swapped, expected) or "")
    many = {str(i): np.zeros(1) for i in range(5)}
    assert mismatch({}, many) == "the arrays' keys differ: missing 0, 1, 2 …"


# Models


def test_keys_follow_the_model_and_fixed_tensors_are_buffers() -> None:
    means, buffers = [f"mean/{name}" for name in TRAINABLE], [f"buffer/{name}" for name in FIXED]
    hessians = [f"hess/{name}" for name in TRAINABLE]
    assert wire_keys(net(0), hess=False) == list(model_arrays(net(0))) == means + buffers
    assert wire_keys(net(0), hess=True) == list(initial_arrays(net(0), 2.0)) == means + hessians + buffers


def test_model_arrays_have_types_values_and_the_hessian() -> None:
    model = net(3)
    arrays = model_arrays(model, 0.25)
    assert arrays["buffer/norm.num_batches_tracked"].dtype == np.int64
    assert arrays["buffer/norm.num_batches_tracked"].shape == ()
    assert int(arrays["buffer/norm.num_batches_tracked"]) == 3
    for name in TRAINABLE:
        np.testing.assert_array_equal(arrays[f"mean/{name}"], model.get_parameter(name).detach().numpy())
        assert arrays[f"hess/{name}"].shape == arrays[f"mean/{name}"].shape
        assert arrays[f"hess/{name}"].dtype == np.float32
        assert (arrays[f"hess/{name}"] == 0.25).all()


def test_model_arrays_are_copies() -> None:
    model = net(0)
    arrays = model_arrays(model)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            tensor.add_(1)
    again = model_arrays(model)
    assert not any(np.array_equal(arrays[key], again[key]) for key in arrays)


def test_a_model_goes_through_arrays_and_back() -> None:
    source, target = net(1), net(2)
    places = [tensor.data_ptr() for tensor in target.state_dict(keep_vars=True).values()]
    load_model(target, from_record(over_the_wire(initial_arrays(source, 1.0))))
    for (name, a), b in zip(source.state_dict().items(), target.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
        assert a.dtype == b.dtype
    assert [tensor.data_ptr() for tensor in target.state_dict(keep_vars=True).values()] == places
    assert [p.requires_grad for p in target.parameters()] == [p.requires_grad for p in source.parameters()]


def test_arrays_are_in_c_order_whatever_the_model() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    weight = model_arrays(model)["mean/weight"]
    assert weight.flags.c_contiguous
    np.testing.assert_array_equal(weight, model.weight.detach().numpy())


def test_flat_and_unflatten_are_inverses() -> None:
    model = net(0)
    arrays, layout = model_arrays(model, 2.0), Layout.of(model)
    vector = flat(arrays, records.MEAN)
    torch.testing.assert_close(vector, layout.flatten(dict(model.named_parameters())).detach(), rtol=0, atol=0)
    assert torch.equal(flat(arrays, records.HESS), torch.full((layout.numel,), 2.0))
    assert_same(unflatten(vector, layout, records.MEAN), {k: v for k, v in arrays.items() if k.startswith("mean/")})
    vector.zero_()
    assert any(array.any() for array in arrays.values())


def test_nbytes_counts_the_arrays() -> None:
    assert nbytes({"a": np.zeros((2, 3), np.float32), "b": np.array(1)}) == 24 + 8


# Other people's strategies


def test_a_stock_flower_fedavg_aggregates_our_replies() -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    models, replies = [net(1), net(2)], []
    for node, (model, examples) in enumerate(zip(models, (10, 30), strict=True)):
        asked = Message(RecordDict(), dst_node_id=100 + node, message_type=MessageType.TRAIN)
        metrics = MetricRecord({"num-examples": examples, "train-loss": float(node)})
        record = to_record(model_arrays(model, 1.0 + node))
        replies.append(Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=asked))
    arrays, metrics_out = FedAvg().aggregate_train(1, replies)
    assert arrays is not None
    assert metrics_out is not None
    assert metrics_out["train-loss"] == 0.75
    first, second = (model_arrays(model, 1.0 + i) for i, model in enumerate(models))
    averaged = from_record(arrays)
    assert list(averaged) == list(first)
    for key, array in averaged.items():
        np.testing.assert_allclose(array, 0.25 * first[key] + 0.75 * second[key], rtol=1e-6, atol=1e-7)
