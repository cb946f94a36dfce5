"""Who gets which training examples: every partitioner is a registered function.

All of them are determined by the seed, give no example to two clients and at least one to each.
`shards` draws at most `max_examples` a client; the others deal the whole training set.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from fedivon_flwr.errors import UserError
from fedivon_flwr.registry import Registry

SHARD_SKEW = 0.5  # shards are unequal (methods of the paper); by how much is not said: up to a factor of two


@dataclass(frozen=True)
class PartitionSpec:
    """How the training set is divided; a partitioner reads only the fields it needs."""

    name: str = "shards"
    clients: int = 200
    seed: int = 0
    alpha: float = 0.5  # dirichlet: the smaller, the fewer classes a client mostly has
    shards_per_client: int = 5
    max_examples: int = 99  # shards: most examples of a client; 0 deals the whole training set
    quantity_skew: float = 0.5  # iid, shards: 0 for clients of equal size, up to 1 for very unequal ones
    classes_per_client: int = 5


Partitioner = Callable[[PartitionSpec, np.ndarray, np.ndarray, np.random.Generator], list[np.ndarray]]

PARTITIONERS: Registry[Partitioner] = Registry("partitioner")


def partition(spec: PartitionSpec, labels: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, ...]:
    """The training examples of every client, as sorted indices.

    >>> labels = np.repeat(np.arange(10), 100)
    >>> [len(part) for part in partition(PartitionSpec("iid", clients=3, quantity_skew=0), labels, labels)]
    [334, 333, 333]
    """
    partitioner = PARTITIONERS[spec.name]
    if spec.clients < 1:
        raise UserError(f"`clients` is {spec.clients}; there must be at least one client.")
    if spec.clients > len(labels):
        raise UserError(
            f"{spec.clients} clients need at least {spec.clients} training examples but the data has "
            f"{len(labels)}; lower `clients` or use more data."
        )
    if not 0 <= spec.quantity_skew <= 1:
        raise UserError(f"`quantity-skew` is {spec.quantity_skew}; it must be between 0 and 1.")
    if spec.seed < 0:
        raise UserError(f"The partition's `seed` is {spec.seed}; it must not be negative.")
    parts = partitioner(spec, np.asarray(labels), np.asarray(groups), np.random.default_rng(spec.seed))
    return tuple(np.sort(part).astype(np.int64) for part in parts)


def class_counts(parts: Sequence[np.ndarray], labels: np.ndarray, classes: int) -> np.ndarray:
    """How many examples of each class (columns) each client (rows) has.

    >>> class_counts([np.array([0, 1]), np.array([2])], np.array([0, 2, 2]), 3)
    array([[1, 0, 1],
           [0, 0, 1]])
    """
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


@PARTITIONERS.add("iid")
def iid(
    spec: PartitionSpec,
    labels: np.ndarray,
    groups: np.ndarray,  # noqa: ARG001
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Shuffle and cut; sizes are equal, or unequal by `quantity_skew`.

    >>> labels = np.repeat(np.arange(10), 100)
    >>> [len(part) for part in partition(PartitionSpec("iid", clients=4, quantity_skew=0.9), labels, labels)]
    [206, 247, 126, 421]
    """
    return _cut_at(rng.permutation(len(labels)), _skewed_sizes(spec.quantity_skew, spec.clients, len(labels), rng))


@PARTITIONERS.add("dirichlet")
def dirichlet(
    spec: PartitionSpec,
    labels: np.ndarray,
    groups: np.ndarray,  # noqa: ARG001
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Divide every class by proportions drawn from a Dirichlet distribution with concentration `alpha`.

    >>> labels = np.repeat(np.arange(10), 100)
    >>> parts = partition(PartitionSpec("dirichlet", clients=4, alpha=0.1), labels, labels)
    >>> [len(part) for part in parts]
    [197, 403, 217, 183]
    """
    if not 1e-9 <= spec.alpha <= 1e9:  # beyond, nothing changes any more
        raise UserError(f"`alpha` is {spec.alpha}; it must be a positive number.")
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        pool = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(spec.clients, spec.alpha)).cumsum()
        owner[pool] = np.minimum(np.searchsorted(shares, (np.arange(len(pool)) + 0.5) / len(pool)), spec.clients - 1)
    sizes = np.bincount(owner, minlength=spec.clients)
    for empty in np.flatnonzero(sizes == 0):
        donor = sizes.argmax()
        owner[rng.choice(np.flatnonzero(owner == donor))] = empty
        sizes[donor] -= 1
        sizes[empty] = 1
    return _by_owner(np.arange(len(labels)), owner, spec.clients)


@PARTITIONERS.add("shards")
def shards(
    spec: PartitionSpec,
    labels: np.ndarray,
    groups: np.ndarray,  # noqa: ARG001
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Draw few examples a client, sort them by label, cut them into unequal shards and deal these at random.

    A client's size is uniform between `(1 − quantity_skew) · max_examples` and `max_examples`; its shards
    differ in size by up to a factor of two.

    >>> labels = np.repeat(np.arange(10), 100)
    >>> parts = partition(PartitionSpec("shards", clients=4, shards_per_client=2), labels, labels)
    >>> [len(part) for part in parts]
    [92, 81, 75, 63]
    >>> (class_counts(parts, labels, 10) > 0).sum(axis=1).tolist()
    [5, 4, 4, 4]
    """
    clients, count, total = spec.clients, spec.shards_per_client, len(labels)
    if count < 1 or spec.max_examples < 0:
        raise UserError("`shards-per-client` must be at least 1, and `max-examples` at least 0.")
    if clients * count > total:
        raise UserError(
            f"{clients} clients with {count} shards each need at least {clients * count} training examples but the "
            f"data has {total}; lower `clients` or `shards-per-client`."
        )
    if spec.max_examples:
        most = min(spec.max_examples, total // clients)
        least = max(1, ceil((1 - spec.quantity_skew) * most - 1e-9))  # 0.3 · 100 is a little more than 30
        sizes = rng.integers(least, most, clients, endpoint=True)
    else:
        sizes = _skewed_sizes(spec.quantity_skew, clients, total, rng)
    drawn = rng.permutation(total)[: sizes.sum()]
    drawn = drawn[np.argsort(labels[drawn], kind="stable")]
    shard_sizes = np.concatenate([_skewed_sizes(SHARD_SKEW, count, int(size), rng) for size in sizes])
    order = rng.permutation(clients * count)
    return _by_owner(drawn, np.repeat(order // count, shard_sizes[order]), clients)


@PARTITIONERS.add("classes")
def classes(
    spec: PartitionSpec,
    labels: np.ndarray,
    groups: np.ndarray,  # noqa: ARG001
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Give every client `classes_per_client` classes: shuffled classes are dealt to groups of clients.

    With 5 of 10 classes a group is a pair. Uniformly drawn cuts, the same for all classes, divide a class among its
    clients: so clients differ in size, and a client's classes are as balanced as the data's.

    >>> labels = np.repeat(np.arange(10), 100)
    >>> parts = partition(PartitionSpec("classes", clients=4), labels, labels)
    >>> [len(part) for part in parts]
    [20, 20, 480, 480]
    >>> (class_counts(parts, labels, 10) > 0).sum(axis=1).tolist()
    [5, 5, 5, 5]
    """
    names, each = np.unique(labels), spec.classes_per_client
    if each < 1 or len(names) % each:
        raise UserError(
            f"`classes-per-client` is {each}; it must divide the number of classes of the data, which is {len(names)}."
        )
    members = len(names) // each
    if spec.clients < members:
        raise UserError(
            f"{spec.clients} clients with {each} classes each cannot hold all {len(names)} classes; "
            f"use at least {members} clients."
        )
    holders: dict[int, list[int]] = {int(name): [] for name in names}
    for first in range(0, spec.clients, members):
        dealt = rng.permutation(names).reshape(members, each)
        for client, own in zip(range(first, spec.clients), dealt, strict=False):
            for name in own:
                holders[int(name)].append(client)
    return _deal(((np.flatnonzero(labels == name), who) for name, who in holders.items()), spec.clients, rng)


@PARTITIONERS.add("subclasses")
def subclasses(
    spec: PartitionSpec, labels: np.ndarray, groups: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Give every client one subclass of every class: same labels everywhere, but of different things.

    The shuffled subclasses of a class are dealt to groups of as many clients, five for CIFAR-100.
    Uniformly drawn cuts, the same for all subclasses, divide a subclass among its clients.

    >>> groups = np.repeat(np.arange(10), 100)
    >>> parts = partition(PartitionSpec("subclasses", clients=10), groups // 5, groups)
    >>> [len(part) for part in parts]
    [170, 170, 170, 170, 170, 30, 30, 30, 30, 30]
    >>> (class_counts(parts, groups, 10) > 0).sum(axis=1).tolist()
    [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    """
    if np.array_equal(labels, groups):
        raise UserError(
            "The partitioner 'subclasses' needs data whose classes have subclasses; use the dataset "
            "'cifar100-superclass' or another partitioner."
        )
    pools: list[tuple[np.ndarray, list[int]]] = []
    for label in np.unique(labels):
        names = np.unique(groups[labels == label])
        if spec.clients < len(names):
            raise UserError(
                f"{spec.clients} clients with one subclass of each class cannot hold all {len(names)} subclasses; "
                f"use at least {len(names)} clients."
            )
        rounds = -(-spec.clients // len(names))
        held = np.concatenate([rng.permutation(names) for _ in range(rounds)])[: spec.clients]
        pools += [
            (np.flatnonzero((labels == label) & (groups == name)), np.flatnonzero(held == name).tolist())
            for name in names
        ]
    return _deal(pools, spec.clients, rng)


def _deal(pools: Iterable[tuple[np.ndarray, list[int]]], clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Divide every pool of examples among its holders, by cuts that are drawn uniformly, once for all pools.

    As in the public code of pFedVEM (Zhu et al. 2023): with cuts of its own for every class, all clients would be of
    similar size, and a client's classes far from balanced.
    """
    pools, parts = list(pools), [list[np.ndarray]() for _ in range(clients)]
    cuts = np.sort(rng.uniform(size=max(len(holders) for _, holders in pools) - 1))
    widths = np.diff(cuts, prepend=0, append=1)
    for pool, holders in pools:
        pieces = _cut_at(rng.permutation(pool), _in_proportion(widths[: len(holders)], len(pool), rng))
        for client, piece in zip(holders, pieces, strict=True):
            parts[client].append(piece)
    dealt = [np.concatenate(pieces) for pieces in parts]
    if not all(len(part) for part in dealt):
        raise UserError(
            f"{clients} clients are too many: a class has fewer examples than clients that share it; lower `clients`."
        )
    return dealt


def _skewed_sizes(skew: float, pieces: int, total: int, rng: np.random.Generator) -> np.ndarray:
    """Sizes that add up to the total, in proportion to weights in `[1 − skew, 1]`; none is 0 if that is possible."""
    return _in_proportion(rng.uniform(1 - skew, 1, pieces), total, rng)


def _in_proportion(weights: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Sizes that add up to the total, in proportion to weights; none is 0 if that is possible."""
    pieces = len(weights)
    if total < pieces:
        return rng.permutation(np.arange(pieces) < total).astype(np.int64)
    ideal = weights / weights.sum() * (total - pieces)  # one for everybody comes first
    sizes: np.ndarray = np.floor(ideal).astype(np.int64)
    largest_rests = np.argsort(sizes - ideal, kind="stable")[: total - pieces - sizes.sum()]
    sizes[largest_rests] += 1
    sizes += 1
    return sizes


def _cut_at(examples: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Consecutive pieces of the given sizes."""
    return np.split(examples, np.cumsum(sizes)[:-1])


def _by_owner(examples: np.ndarray, owner: np.ndarray, clients: int) -> list[np.ndarray]:
    """The examples of each client, given the client of each example."""
    return _cut_at(examples[np.argsort(owner, kind="stable")], np.bincount(owner, minlength=clients))
