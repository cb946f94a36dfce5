"""What every client half shares: data of a node, seeding, batches, evaluation, arrays in and out.

A method's client is a subclass that says how to train (`train`). Everything it needs to know arrives with the
message, so that the server alone decides. What a client keeps between rounds is its `memory`: parameters that stay with
it (those whose name begins with the prefix `own` that the server tells), and whatever a method adds to that.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from fedivon_flwr.data import Dataset, Split, batch_to_tensor
from fedivon_flwr.errors import UserError
from fedivon_flwr.metrics import score
from fedivon_flwr.posterior import DiagGaussian, Layout
from fedivon_flwr.predict import predict_mc, predict_mean
from fedivon_flwr.records import (
    BUFFER,
    MEAN,
    NUM_EXAMPLES,
    TRAIN_EXAMPLES,
    NDArrays,
    fixed_tensors,
    from_record,
    is_own,
    load_model,
    model_arrays,
    to_numpy,
    to_record,
    wire_keys,
)
from fedivon_flwr.settings import kebab
from fedivon_flwr.state import NodeState

EVALUATION_BATCH = 250


class Told(BaseModel):
    """The part of a message's config that a client reads; what others read is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=kebab, populate_by_name=True)


class Work(Told):
    """What every method's client is told."""

    server_round: int = 1
    seed: int = 0
    local_epochs: int = Field(1, ge=1)
    batch_size: int = Field(32, ge=1)
    eval_samples: int = Field(8, ge=1)
    own: str | None = None  # prefix of the parameters that stay with the client; None: all are shared
    personal: bool = False  # evaluate the client's own model instead of the server's
    run: str = ""  # a name for the run, under which the node keeps its memory
    checkpoint_every: int = Field(1, ge=1)  # rounds between the server's checkpoints
    resumed_after: list[int] = []  # rounds after which the run went on, each time that it was resumed


@dataclass(frozen=True)
class LocalData:
    """A node's examples: rows of a dataset."""

    dataset: Dataset
    train: NDArray[np.int64]
    test: NDArray[np.int64]

    @classmethod
    def whole(cls, dataset: Dataset) -> "LocalData":
        """All there is: a node with data of its own."""
        return cls(dataset, np.arange(len(dataset.train.y)), np.arange(len(dataset.test.y)))

    @classmethod
    def of(cls, x: NDArray[Any], y: NDArray[Any], x_test: NDArray[Any], y_test: NDArray[Any]) -> "LocalData":
        """A node's own arrays: uint8 images `(N, H, W, C)` or float data `(N, …)`, labels from 0."""
        if x.dtype == np.uint8 and x.ndim != 4:
            raise UserError(f"Images must be uint8 of shape (N, H, W, C), not {x.shape}.")
        train, test = Split(x, y, y), Split(x_test, y_test, y_test)
        channels = x.shape[-1] if x.dtype == np.uint8 else 1
        shape = (channels, *x.shape[1:3]) if x.dtype == np.uint8 else x.shape[1:]
        half = (0.5,) * channels
        return cls.whole(Dataset("own", train, test, int(max(y.max(), y_test.max())) + 1, shape, half, half))

    @classmethod
    def part(cls, dataset: Dataset, rows: NDArray[np.int64]) -> "LocalData":
        """Some training rows, and the test images of the classes (subclasses) that are among them."""
        here = np.isin(dataset.test.group, np.unique(dataset.train.group[rows]))
        return cls(dataset, rows, np.flatnonzero(here))


class TorchClient(NumPyClient):
    """A node's work on a PyTorch model, as a Flower `NumPyClient`.

    The lists of arrays have the order of `keys`. `client` is the number that, with seed and round, decides
    batches and noise.
    """

    first_hess: ClassVar[float | None] = None  # None: the method has no Hessian

    def __init__(self, model: nn.Module, data: LocalData, device: torch.device | str = "cpu", client: int = 0) -> None:
        self.model, self.data, self.device, self.client = model, data, torch.device(device), client
        self.keys = wire_keys(model, self.first_hess is not None)
        self.memory: NDArrays = {}
        self.told: dict[str, float] = {}  # what the server is told of a training besides its arrays

    @abstractmethod
    def train(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> tuple[NDArrays, float]:
        """Train the model, which has the weights in `arrays`; the node's arrays without buffers, and the mean loss.

        `arrays` are the server's, but for the parameters that the client remembers as its own.
        """

    def posterior(self, arrays: NDArrays, config: Mapping[str, Any]) -> DiagGaussian | None:  # noqa: ARG002
        """The Gaussian that arrays stand for, if the method has one."""
        return None

    def predict(
        self, posterior: DiagGaussian, batches: list[Tensor], samples: int, generator: torch.Generator
    ) -> Tensor:
        """Class probabilities by Monte Carlo over a Gaussian that `posterior` or `personalise` gave."""
        return predict_mc(self.model, Layout.of(self.model), posterior, batches, samples, generator)

    def personalise(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> DiagGaussian | None:
        """Turn the model, which has the weights in `arrays`, into the client's own; the Gaussian around it, if any.

        Here: one more local update.
        """
        trained, _ = self.train(arrays, config, work)
        return self.posterior(trained, config)

    def get_parameters(self, config: dict[str, Any]) -> list[NDArray[Any]]:  # noqa: ARG002
        """The model as it is, with the first Hessian where the method has one."""
        return list(model_arrays(self.model, self.first_hess).values())

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        """Train from the server's arrays, and from what this client remembers."""
        work = Work.model_validate(config)
        arrays = self._receive(parameters, work)
        with self._seeded(work):
            trained, loss = self.train(arrays, config, work)
        trained |= {BUFFER + name: to_numpy(tensor) for name, tensor in fixed_tensors(self.model)}
        self.memory |= {key: trained[key] for key in self.keys if is_own(key, work.own)}
        metrics = {"train-loss": loss, **self.told}
        return [trained[key] for key in self.shared_keys(work)], len(self.data.train), metrics

    def weights(self) -> NDArrays:
        """The trained weights, for the wire."""
        return {MEAN + name: to_numpy(p) for name, p in self.model.named_parameters() if p.requires_grad}

    def shared_keys(self, work: Work) -> list[str]:
        """The keys of the arrays that go to the server."""
        return [key for key in self.keys if not is_own(key, work.own)]

    def evaluate(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Score a model on the node's test data, at the mean and, with a posterior, by Monte Carlo.

        It is the server's or, if the server asks for that, the client's own; then the server's, if it has a whole one,
        stands beside it as `global-mean-*`. A node without test data then only tells the number of its examples.
        """
        work = Work.model_validate(config)
        arrays = self._receive(parameters, work)
        if not len(self.data.test):
            if work.personal:  # nobody must wait for it
                return 0.0, len(self.data.train), {TRAIN_EXAMPLES: len(self.data.train)}
            raise UserError("This node has no test data to evaluate on.")
        test, metrics = self.data.dataset.test, dict[str, float]()
        batches = list(self._batches(test, self.data.test, EVALUATION_BATCH))
        labels = torch.from_numpy(np.asarray(test.y[self.data.test], dtype=np.int64))
        if work.personal:
            if work.own is None:
                metrics = named("global-mean", predict_mean(self.model, batches), labels)
            metrics[TRAIN_EXAMPLES] = len(self.data.train)
            with self._seeded(work):
                posterior = self.personalise(arrays, config, work)
        else:
            posterior = self.posterior(arrays, config)
        metrics |= named("mean", predict_mean(self.model, batches), labels)
        if posterior is not None:
            generator = torch.Generator(self.device).manual_seed(int(self._seed(work, "predict").integers(2**63)))
            metrics |= named("mc", self.predict(posterior, batches, work.eval_samples, generator), labels)
        return metrics["mean-nll"], len(self.data.test), metrics

    def epochs(self, work: Work) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of all local epochs, shuffled anew in each."""
        train, rows, order = self.data.dataset.train, self.data.train, self._seed(work)
        for _ in range(work.local_epochs):
            shuffled = rows[order.permutation(len(rows))]
            yield from zip(
                self._batches(train, shuffled, work.batch_size),
                self._labels(train, shuffled, work.batch_size),
                strict=True,
            )

    def _batches(self, split: Split, rows: NDArray[np.int64], size: int) -> Iterator[Tensor]:
        for start in range(0, len(rows), size):
            yield batch_to_tensor(split.x[rows[start : start + size]], self.data.dataset, self.device)

    def _labels(self, split: Split, rows: NDArray[np.int64], size: int) -> Iterator[Tensor]:
        labels = torch.from_numpy(np.asarray(split.y[rows], dtype=np.int64)).to(self.device)
        return iter(torch.split(labels, size))

    def _seed(self, work: Work, purpose: Literal["train", "predict"] = "train") -> np.random.Generator:
        more = [1] if purpose == "predict" else []  # the noise of the training must not come again
        return np.random.default_rng([work.seed, work.server_round, self.client, *more])

    @contextmanager
    def _seeded(self, work: Work) -> Iterator[None]:
        """Train with randomness that seed, round and client decide."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self._seed(work).integers(2**63))
            self.model.train()
            yield

    def _receive(self, parameters: list[NDArray[Any]], work: Work) -> NDArrays:
        if len(parameters) != len(self.keys):
            raise UserError(
                f"The server sent {len(parameters)} arrays but this node's model has {len(self.keys)}: "
                "server and node must use the same model and method."
            )
        arrays = dict(zip(self.keys, parameters, strict=True))
        state = self.model.state_dict(keep_vars=True)
        for key, array in arrays.items():
            if array.shape != (own := tuple(state[key.split("/", 1)[1]].shape)):  # copying would broadcast
                raise UserError(
                    f"The server sent {key} with the shape {array.shape} but this node's model has {own}: "
                    "server and node must use the same model."
                )
        arrays |= {key: array for key, array in self.memory.items() if is_own(key, work.own)}
        load_model(self.model.to(self.device), arrays)
        return arrays


def named(at: str, probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Scores as metrics: ``<at>-accuracy`` and so on.

    A model that diverged knows nothing: what is no number becomes the same probability for all classes, so that a
    method is not judged by its better clients only.
    """
    known = probabilities.isfinite().all(-1, keepdim=True)
    probabilities = torch.where(known, probabilities, 1 / probabilities.shape[-1])
    return {f"{at}-{key}": value for key, value in score(probabilities, labels).as_dict().items()}


def mean_loss(losses: list[tuple[Tensor, int]]) -> float:
    """The mean over examples of the batches' mean losses, read from the device at the end only."""
    total = sum(size for _, size in losses)
    return float(sum(loss.double() * size for loss, size in losses) / total)


# Messages in, `NumPyClient` calls, messages out: for any ClientApp


def answer_query(message: Message, context: Context) -> Message:
    """Tell which partition this node holds, if it holds one."""
    number = int(context.node_config.get("partition-id", -1))
    return Message(RecordDict({"metrics": MetricRecord({"partition-id": number})}), reply_to=message)


def answer_train(client: TorchClient, message: Message, context: Context | None = None) -> Message:
    """One round of local training; with a context, a client that remembers something finds it in the next round."""
    parameters, config, work = _read(client, message)
    state = _state(client, context, work)
    client.memory = state.before(work.server_round, work.resumed_after)
    arrays, examples, metrics = client.fit(parameters, config)
    if client.memory:
        state.keep(work.server_round, client.memory, work.checkpoint_every, len(work.resumed_after))
    record = to_record(dict(zip(client.shared_keys(work), arrays, strict=True)))
    content = RecordDict({"arrays": record, "metrics": MetricRecord({NUM_EXAMPLES: examples, **metrics})})
    return Message(content, reply_to=message)


def answer_evaluate(client: TorchClient, message: Message, context: Context | None = None) -> Message:
    """Evaluation on the node's own test data; it leaves what the client remembers as it is."""
    parameters, config, work = _read(client, message)
    client.memory = _state(client, context, work).before(work.server_round + 1, work.resumed_after)
    loss, examples, metrics = client.evaluate(parameters, config)
    content = RecordDict({"metrics": MetricRecord({NUM_EXAMPLES: examples, "loss": loss, **metrics})})
    return Message(content, reply_to=message)


def _state(client: TorchClient, context: Context | None, work: Work) -> NodeState:
    """The memory of a node; one without a partition goes by its node id, which a key keeps the same."""
    if context is None:
        return NodeState(RecordDict())
    told = context.node_config.get("state-dir") or context.run_config.get("state-dir") or ""
    name = f"client-{client.client}" if "partition-id" in context.node_config else f"node-{context.node_id}"
    return NodeState.of(context.state, str(told), work.run, name)


def _read(client: TorchClient, message: Message) -> tuple[list[NDArray[Any]], dict[str, Any], Work]:
    arrays = from_record(message.content.array_records["arrays"])
    if list(arrays) != client.keys:
        raise UserError(
            "The arrays that the server sent do not fit this node's model: server and node must use the same "
            "method and model."
        )
    config = dict(message.content.config_records["config"])
    return list(arrays.values()), config, Work.model_validate(config)
