"""Every partitioner keeps its promises for any data, and says so in one sentence when it cannot."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedivon_flwr.data.partition import PARTITIONERS, PartitionSpec, class_counts, partition
from fedivon_flwr.errors import UserError

COMPLETE = ("iid", "dirichlet", "classes", "subclasses")
quick = settings(max_examples=25, deadline=None)


def balanced(classes: int, each: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), each))


@st.composite
def problems(draw: st.DrawFn) -> tuple[PartitionSpec, np.ndarray, np.ndarray]:
    """A setting every partitioner can fulfil: five subclasses in each of ten classes."""
    groups = balanced(50, draw(st.integers(20, 40)), draw(st.integers(0, 99)))
    spec = PartitionSpec(
        clients=draw(st.integers(10, 60)),
        seed=draw(st.integers(0, 999)),
        alpha=draw(st.sampled_from([0.01, 0.5, 100.0])),
        shards_per_client=draw(st.integers(1, 6)),
        max_examples=draw(st.integers(0, 99)),
        quantity_skew=draw(st.floats(0, 1)),
        classes_per_client=draw(st.sampled_from([1, 2, 5, 10])),
    )
    return spec, groups // 5, groups


@pytest.mark.parametrize("name", sorted(PARTITIONERS))
@given(problem=problems())
@quick
def test_parts_are_disjoint_sorted_nonempty_and_fixed_by_the_seed(
    name: str, problem: tuple[PartitionSpec, np.ndarray, np.ndarray]
) -> None:
    spec, labels, groups = problem
    spec = replace(spec, name=name)
    parts = partition(spec, labels, groups)
    dealt = np.concatenate(parts)
    assert len(parts) == spec.clients
    assert all(len(part) and part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert len(np.unique(dealt)) == len(dealt)
    assert dealt.min() >= 0
    assert dealt.max() < len(labels)
    if name in COMPLETE:
        assert len(dealt) == len(labels)
    again = partition(spec, labels, groups)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


@pytest.mark.parametrize("name", sorted(PARTITIONERS))
def test_another_seed_gives_another_partition(name: str) -> None:
    groups = balanced(50, 40)
    one, other = (partition(PartitionSpec(name, clients=20, seed=seed), groups // 5, groups) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@given(st.integers(1, 50), st.integers(50, 400))
@quick
def test_iid_sizes_are_equal_without_skew(clients: int, examples: int) -> None:
    labels = np.zeros(examples, np.int64)
    sizes = [len(part) for part in partition(PartitionSpec("iid", clients=clients, quantity_skew=0), labels, labels)]
    assert max(sizes) - min(sizes) <= 1


def test_iid_sizes_are_unequal_with_skew() -> None:
    labels = balanced(10, 500)
    sizes = [len(part) for part in partition(PartitionSpec("iid", clients=50, quantity_skew=1), labels, labels)]
    assert max(sizes) > 5 * min(sizes)


def test_a_smaller_alpha_concentrates_the_classes() -> None:
    labels = balanced(10, 500)

    def largest_share(alpha: float) -> float:
        counts = class_counts(
            partition(PartitionSpec("dirichlet", clients=20, alpha=alpha), labels, labels), labels, 10
        )
        return float((counts.max(axis=1) / counts.sum(axis=1)).mean())

    assert largest_share(1e9) == pytest.approx(0.1, abs=0.01)
    assert largest_share(0.1) > 0.4


def test_dirichlet_leaves_nobody_without_examples() -> None:
    labels = balanced(2, 30)
    parts = partition(PartitionSpec("dirichlet", clients=50, alpha=1e-9), labels, labels)
    assert min(map(len, parts)) == 1
    assert sum(map(len, parts)) == 60


@given(problem=problems())
@quick
def test_shards_keep_the_bounds_of_the_sizes(problem: tuple[PartitionSpec, np.ndarray, np.ndarray]) -> None:
    spec, labels, groups = problem
    sizes = [len(part) for part in partition(replace(spec, name="shards"), labels, groups)]
    if spec.max_examples:
        most = min(spec.max_examples, len(labels) // spec.clients)
        assert max(sizes) <= most
        assert min(sizes) >= (1 - spec.quantity_skew) * most - 1e-6
    else:
        assert sum(sizes) == len(labels)


def test_shards_as_in_the_paper() -> None:
    labels = balanced(10, 5000)
    parts = partition(PartitionSpec(), labels, labels)
    sizes = np.array([len(part) for part in parts])
    assert (sizes.min(), sizes.max()) == (50, 99)
    held = (class_counts(parts, labels, 10) > 0).sum(axis=1)
    # five shards a client, few of which reach over a border between two classes
    assert 3.5 < held.mean() < 5
    assert held.max() <= 7


def test_one_shard_a_client_is_a_run_of_the_sorted_labels() -> None:
    labels = balanced(10, 200)
    parts = partition(PartitionSpec(clients=100, shards_per_client=1, max_examples=0, quantity_skew=0), labels, labels)
    assert (class_counts(parts, labels, 10) == 20).sum() == 100


@given(problem=problems())
@quick
def test_classes_per_client(problem: tuple[PartitionSpec, np.ndarray, np.ndarray]) -> None:
    spec, labels, groups = problem
    counts = class_counts(partition(replace(spec, name="classes"), labels, groups), labels, 10)
    assert ((counts > 0).sum(axis=1) == spec.classes_per_client).all()
    members = 10 // spec.classes_per_client
    for first in range(0, spec.clients - members + 1, members):  # each full group of clients holds each class once
        assert ((counts[first : first + members] > 0).sum(axis=0) == 1).all()


@given(problem=problems())
@quick
def test_one_subclass_of_every_class(problem: tuple[PartitionSpec, np.ndarray, np.ndarray]) -> None:
    spec, labels, groups = problem
    counts = class_counts(partition(replace(spec, name="subclasses"), labels, groups), groups, 50)
    per_class = (counts > 0).reshape(spec.clients, 10, 5)
    assert (per_class.sum(axis=2) == 1).all()
    for first in range(0, spec.clients - 4, 5):  # five clients in a row hold all five subclasses
        assert (per_class[first : first + 5].sum(axis=0) == 1).all()


def test_personal_clients_are_of_very_unequal_size() -> None:
    labels = balanced(10, 5000)
    for clients, least, most in ((50, 100, 2000), (100, 50, 1500), (200, 25, 750)):  # the paper: from 5 to over 1000
        for seed in range(5):
            parts = partition(PartitionSpec("classes", clients=clients, seed=seed), labels, labels)
            sizes = [len(part) for part in parts]
            assert 5 <= min(sizes) <= least
            assert max(sizes) > most


@pytest.mark.parametrize(("name", "held"), [("classes", 5), ("subclasses", 20)])
def test_a_personal_clients_classes_are_balanced(name: str, held: int) -> None:
    """The cuts are the same for all classes (subclasses)."""
    groups = balanced(100, 500)
    labels = groups // 5 if name == "subclasses" else groups // 10
    counts = class_counts(partition(PartitionSpec(name, clients=100), labels, groups), labels, labels.max() + 1)
    for row in counts:
        assert len(row[row > 0]) == held
        assert len(set(row[row > 0])) == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (PartitionSpec("nobody"), "Unknown partitioner 'nobody'; choose one of: classes, dirichlet, iid, sh"),
        (PartitionSpec("iid", clients=200), "200 clients need at least 200 training examples but the data has 150"),
        (PartitionSpec("iid", clients=0), "at least one client"),
        (PartitionSpec("iid", clients=5, seed=-1), "`seed` is -1"),
        (PartitionSpec("iid", clients=5, quantity_skew=1.5), "`quantity-skew` is 1.5"),
        (PartitionSpec("dirichlet", clients=5, alpha=0), "`alpha` is 0"),
        (PartitionSpec("dirichlet", clients=5, alpha=float("nan")), "`alpha` is nan"),
        (PartitionSpec("shards", clients=50, shards_per_client=4), "need at least 200 training examples"),
        (PartitionSpec("shards", clients=5, shards_per_client=0), "`shards-per-client` must be at least 1"),
        (PartitionSpec("shards", clients=5, max_examples=-1), "`max-examples` at least 0"),
        (PartitionSpec("classes", clients=10, classes_per_client=3), "must divide the number of classes"),
        (PartitionSpec("classes", clients=10, classes_per_client=0), "must divide the number of classes"),
        (PartitionSpec("classes", clients=4, classes_per_client=1), "use at least 10 clients"),
        (PartitionSpec("subclasses", clients=10), "classes have subclasses"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(spec: PartitionSpec, message: str) -> None:
    labels = balanced(10, 15)
    with pytest.raises(UserError) as caught:
        partition(spec, labels, labels)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_few_clients_for_the_subclasses() -> None:
    groups = balanced(10, 15)
    with pytest.raises(UserError, match="use at least 5 clients"):
        partition(PartitionSpec("subclasses", clients=4), groups // 5, groups)


def test_a_class_rarer_than_its_holders() -> None:
    labels = np.array([0] * 97 + [1] * 3)
    with pytest.raises(UserError, match="lower `clients`"):
        partition(PartitionSpec("classes", clients=20, classes_per_client=1), labels, labels)


def test_class_counts_add_up() -> None:
    labels = balanced(4, 25)
    parts = partition(PartitionSpec("iid", clients=7), labels, labels)
    counts = class_counts(parts, labels, 5)
    assert counts.shape == (7, 5)
    assert counts.sum(axis=0).tolist() == [25, 25, 25, 25, 0]
    assert counts.sum(axis=1).tolist() == [len(part) for part in parts]
