"""One typed, validated `Settings` per run, from Flower's flat run config (kebab-case keys).

A method's own keys are a table named like the method (``fedivon.lr``); its strategy declares them as a subclass
of `MethodOptions`. To add a setting is to add a field here (or there) and, so that ``flwr run`` accepts it,
a commented line in ``[tool.flwr.app.config]``.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedivon_flwr.errors import UserError

Scalar = str | int | float | bool


def kebab(name: str) -> str:
    """The name of a field as Flower's config spells it."""
    return name.replace("_", "-")


class FlatModel(BaseModel):
    """Frozen, knows its keys, and refuses others."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=kebab, populate_by_name=True, allow_inf_nan=False
    )


class MethodOptions(FlatModel):
    """A method's own settings: the keys ``<method>.<name>``."""

    personal_lr: float = Field(
        0.0, ge=0, description="learning rate of the personal models after the last round; 0: that of the last round"
    )


M = TypeVar("M", bound=FlatModel)


class Settings(FlatModel):
    """Everything that decides the outcome of a run, and where it goes."""

    method: str = Field("fedivon", description="fedivon, fedavg, …: a file in strategies and in clients")
    seed: int = Field(
        0, ge=0, lt=2**63, description="draws the initial weights, the clients of a round, batches and noise"
    )
    rounds: int = Field(100, ge=1, description="communication rounds")

    dataset: str = Field(
        "digits",
        description="a name of `fedivon data list`, a path to own data (both: maybe with @validation), or nodes: every "
        "node has its own",
    )
    input_shape: str = Field("", description="nodes: the shape of an input, e.g. 3x32x32 for images, 30 for features")
    classes: int = Field(0, ge=0, description="nodes: the number of classes")
    pixel_mean: str = Field("", description="nodes: mean of a channel's pixels from 0 to 1, e.g. 0.49,0.48,0.45")
    pixel_std: str = Field("", description="nodes: their standard deviation; without both, pixels go from -1 to 1")
    model: str = Field("mlp", description="mlp, cnn, lenet, pfl-cifar10, pfl-cifar100, or package.module:function")

    clients: int = Field(200, ge=1, description="number of partitions, i.e. of (virtual) nodes")
    partitioner: str = Field("shards", description="iid, dirichlet, shards, classes or subclasses")
    partition_seed: int = Field(
        0, ge=0, lt=2**63, description="the split; the same for all methods and seeds of a table"
    )
    alpha: float = Field(0.5, gt=0, description="dirichlet: concentration, small is non-iid")
    shards_per_client: int = Field(5, ge=1, description="shards: how many each client is dealt")
    max_examples: int = Field(99, ge=0, description="shards: most examples of a client; 0 for no bound")
    quantity_skew: float = Field(
        0.5, ge=0, le=1, description="iid, shards: 0 for clients of equal size, 1 very unequal"
    )
    classes_per_client: int = Field(5, ge=1, description="classes: how many each client has")

    clients_per_round: int = Field(10, ge=1, description="clients asked in a round")
    local_epochs: int = Field(2, ge=1, description="passes over a client's data in a round")
    batch_size: int = Field(32, ge=1, description="examples in a step")

    min_replies: int = Field(1, ge=1, description="with fewer accepted replies a round is void")
    round_deadline: float = Field(3600.0, gt=0, description="seconds until a round closes with what is there")
    node_wait: float = Field(300.0, gt=0, description="seconds to wait for enough nodes to connect")

    evaluation: Literal["server", "clients", "none"] = Field(
        "server", description="server (its test data), clients (their own test data) or none"
    )
    evaluate_every: int = Field(10, ge=1, description="rounds between evaluations")
    eval_samples: int = Field(8, ge=1, description="weight samples in the evaluations on the way")
    test_samples: int = Field(500, ge=1, description="weight samples in the final evaluation")

    personal: bool = Field(
        False, description="true: in the end every client makes a personal model and scores it on its own test data"
    )
    personal_epochs: int = Field(
        0,
        ge=0,
        description="passes over its data for a personal model (pfedvem, fedrep: for its base); 0: local-epochs",
    )
    unseen_clients: int = Field(0, ge=0, description="the last so many clients only get personal models in the end")

    checkpoint_every: int = Field(10, ge=1, description="rounds between checkpoints")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:<number>")
    threads: int = Field(1, ge=0, description="CPU threads of a client (0: all); the last bits depend on it")
    run_dir: str = Field("", description="the run's folder; empty for a new one under runs/")
    state_dir: str = Field("", description="where nodes keep what they remember; empty for their user's cache folder")
    keep_memory: bool = Field(
        False, description="true: what virtual clients remember outlasts the run, to try other personal-* keys with it"
    )
    tensorboard: bool = Field(False, description="true: also write TensorBoard event files")

    options: dict[str, dict[str, str | int | Annotated[float, Field(allow_inf_nan=True)] | bool]] = Field(
        default_factory=dict, description="tables of the methods"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.clients_per_round > self.clients - self.unseen_clients:
            unseen = f" less unseen-clients ({self.unseen_clients})" if self.unseen_clients else ""
            asked = f"clients-per-round ({self.clients_per_round})"
            raise ValueError(f"{asked} must not exceed clients ({self.clients}){unseen}")
        if self.min_replies > self.clients_per_round:
            raise ValueError(
                f"min-replies ({self.min_replies}) must not exceed clients-per-round ({self.clients_per_round})"
            )
        return self

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Settings":
        """From a flat config; ``method.key`` goes to the method's table."""
        common: dict[str, Any] = {}
        options: dict[str, dict[str, Scalar]] = {}
        for key, value in config.items():
            table, dot, name = key.partition(".")
            if dot:
                options.setdefault(table, {})[name] = math.inf if value == "inf" else value
            else:
                common[key] = value
        if "options" in common:
            raise UserError("Unknown key 'options'; a method's own keys are written as '<method>.<key>'.")
        return validated(cls, {**common, "options": options})

    def to_config(self) -> dict[str, Scalar]:
        """The flat config again, with all defaults filled in."""
        flat = self.model_dump(by_alias=True, exclude={"options"})
        return flat | {f"{table}.{key}": v for table, keys in self.options.items() for key, v in keys.items()}

    def record(self) -> dict[str, Scalar]:
        """What is written down about a run: all but where it is, so that a folder can be moved."""
        told = {key: value for key, value in self.to_config().items() if key not in ("run-dir", "state-dir")}
        return {key: "inf" if value == math.inf else value for key, value in told.items()}  # JSON has no infinity

    def identity(self) -> dict[str, Scalar]:
        """What must be equal for a run to be continued: all that decides its outcome, for this method."""
        aside = {"device", "tensorboard", "checkpoint-every", "keep-memory", "round-deadline", "node-wait"}
        return {
            key: value
            for key, value in self.record().items()
            if key not in aside and ("." not in key or key.startswith(f"{self.method}."))
        }


def validated(cls: type[M], data: Mapping[str, Any], prefix: str = "") -> M:
    """Build a model; of what is wrong with the data, say the first thing in one sentence."""
    try:
        return cls.model_validate(dict(data))
    except ValidationError as error:
        first = error.errors()[0]
    key = prefix + kebab(str(first["loc"][0])) if first["loc"] else ""
    dotted = prefix + ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        raise UserError(f"The key '{dotted}' is missing.")
    if first["type"] == "extra_forbidden" and dotted != key:
        raise UserError(f"Unknown key '{dotted}'.")
    if first["type"] == "extra_forbidden":
        known = [prefix + kebab(name) for name in cls.model_fields if name != "options"]
        raise UserError(f"Unknown key '{key}'; the keys are: {', '.join(sorted(known))}.")
    if first["type"] == "value_error" and not first["loc"]:
        raise UserError(str(first["ctx"]["error"]) + ".")
    if key == "options":
        key = ".".join(str(part) for part in first["loc"][1:3])
        raise UserError(f"The key '{key}' is {first['input']!r} but must be a string, a number or true or false.")
    field = next(f for name, f in cls.model_fields.items() if kebab(name) == key.removeprefix(prefix))
    rule = first["msg"].removeprefix("Input should be ")
    allowed = f"{rule} ({field.description})" if first["type"] != "string_pattern_mismatch" else field.description
    raise UserError(f"The key '{key}' is {first['input']!r} but must be {allowed}.")


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested TOML tables as flat keys with dots, like Flower's."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def read_toml(path: Path) -> dict[str, Any]:
    """A settings file as a flat config."""
    return dict(flatten(read_tables(path)))


def read_tables(path: Path) -> dict[str, Any]:
    """A TOML file as it is written."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"There is no settings file '{path}'.") from None
    except OSError as error:
        raise UserError(f"The settings file '{path}' cannot be read ({error.strerror}).") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"The settings file '{path}' is not valid TOML: {error}.") from None
