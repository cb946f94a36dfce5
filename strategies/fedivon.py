"""FedIvon, the server half: the clients' Gaussians become one (Pal et al. 2024, Algorithm 1 and section 3.2)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from pydantic import Field
from torch import nn

from fedivon_flwr.errors import UserError
from fedivon_flwr.posterior import DiagGaussian
from fedivon_flwr.records import HESS, MEAN, NDArrays, flat, model_arrays, tensor
from fedivon_flwr.settings import MethodOptions
from strategies.aggregation import RULES, Shared, Term, aggregate
from strategies.base import (
    FederatedStrategy,
    Reply,
    RoundSettings,
    average,
    weights,
    without_width,
)


class Options(MethodOptions):
    """The keys ``fedivon.*`` of the run config."""

    lr: float = Field(0.1, gt=0, description="learning rate of the first round")
    lr_final: float = Field(0.01, gt=0, description="learning rate of the last round; linear in between")
    ess: Annotated[float, Field(gt=0)] | Literal["local"] = Field(
        5000.0, description='effective sample size λ; "local" is the number of the client\'s examples'
    )
    test_ess: float = Field(0.0, ge=0, description="λ of the posterior that predicts in the end; 0: as in training")
    hess_init: float = Field(1.0, gt=0, description="h0, the Hessian of the first round")
    weight_decay: float = Field(2e-4, gt=0, description="δ, precision of the zero-mean prior divided by λ")
    beta1: float = Field(0.9, ge=0, lt=1, description="momentum of the gradient")
    beta2: float = Field(0.99999, ge=0, lt=1, description="momentum of the Hessian")
    mc_samples: int = Field(1, ge=1, description="weight samples for each training step")
    rule: Literal[tuple(RULES)] = Field("rkl", description=f"aggregation rule: {', '.join(RULES)}")  # type: ignore[valid-type]
    prior: Literal["zero", "server"] = Field(
        "zero", description="the clients' prior: zero (mean), or server (its posterior)"
    )
    temperature: float = Field(
        1.0, ge=0, allow_inf_nan=True, description="β, the strength of the server's posterior as prior"
    )
    personalise: Literal["prior", "rkl", "w2"] = Field(
        "prior",
        description="personal models: prior (trained under the server's posterior), or rkl, w2: the barycentre with it",
    )
    personal_weight: float = Field(0.5, ge=0, le=1, description="rkl, w2: the weight of the client's own posterior")


class FedIvon(FederatedStrategy):
    """Aggregates posteriors that arrive as ``mean/*`` and ``hess/*`` arrays.

    Start it from `initial_arrays(model, hess=h0)`; the clients are `clients.fedivon.FedIvonClient` or anything that
    keeps to the wire contract.
    """

    options_type: ClassVar[type[MethodOptions]] = Options
    options: Options

    def __init__(self, options: Options | None = None, rounds: RoundSettings | None = None) -> None:
        super().__init__(options, rounds)
        # λ of the server's posterior; with "local" it is known after the first round, and 0 until then.
        self.ess = self.options.ess if isinstance(self.options.ess, float) else 0.0

    def model_arrays(self, model: nn.Module) -> NDArrays:
        """The first posterior: the model's weights, and ``h0`` everywhere."""
        return model_arrays(model, self.options.hess_init)

    def train_config(self, server_round: int) -> dict[str, Any]:
        """The clients' IVON settings; the learning rate decays linearly over the rounds."""
        told = self.decaying(server_round, "rule", "test_ess")
        return told | {"ess": self.ess, "local-ess": True} if self._under_own_ess else told

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the clients of this round to train, from a posterior."""
        if any(HESS + key.removeprefix(MEAN) not in arrays for key in arrays if key.startswith(MEAN)):
            raise UserError("FedIvon starts from means and Hessians: use initial_arrays(model, hess=1.0).")
        return super().configure_train(server_round, arrays, config, grid)

    def evaluate_config(self, server_round: int) -> dict[str, Any]:
        """As in training, with the ``λ`` that the server's posterior has or, in the end, shall predict with."""
        ended = server_round == self.num_rounds
        return {**self.train_config(server_round), "ess": self.ess, "test-ess": self.options.test_ess if ended else 0.0}

    def personal_config(self) -> dict[str, Any]:
        """The prior is the server's posterior, with its ``λ``; a personal model predicts as wide as the global one."""
        known = {"ess": self.ess, "test-ess": self.options.test_ess, "local-ess": self.options.ess == "local"}
        return {**super().personal_config(), **known}

    @property
    def _under_own_ess(self) -> bool:
        """Whether the clients' prior is the server's posterior with a λ that is none of theirs."""
        return self.options.prior == "server" and self.options.ess == "local" and self.ess > 0

    @property
    def remembers(self) -> bool:
        """A projection needs the client's last posterior."""
        return self.options.personalise != "prior"

    def late_keys(self) -> set[str]:
        """Under a zero-mean prior, β matters to personal models only."""
        return {"temperature"} if self.options.prior == "zero" else set()

    def refuse(self, arrays: NDArrays) -> str | None:
        """A precision ``λ (h + δ)`` must be positive."""
        return without_width(arrays, -self.options.weight_decay)

    def combine(self, replies: Sequence[Reply], sent: NDArrays) -> NDArrays:
        """Apply the aggregation rule parameter by parameter; buffers are averaged."""
        share = weights(replies)
        own = self.options.ess == "local" and not self._under_own_ess
        sizes = [float(reply.examples) if own else self.ess for reply in replies]
        ess = sum(w * size for w, size in zip(share, sizes, strict=True))
        rule, means, hessians = RULES[self.options.rule], {}, {}
        for key in sent:
            if key.startswith(MEAN):
                twin = HESS + key.removeprefix(MEAN)
                terms = [
                    Term(w, tensor(reply.arrays[key]), tensor(reply.arrays[twin]), size)
                    for w, reply, size in zip(share, replies, sizes, strict=True)
                ]
                prior = Term(1.0, tensor(sent[key]), tensor(sent[twin]), self.ess or ess)
                shared = Shared(self.options.weight_decay, ess, len(terms), prior)
                mean, hess = aggregate(rule, terms, shared)
                means[key], hessians[twin] = mean.numpy(), hess.numpy()
        self.ess = ess
        return means | hessians | average(replies, [key for key in sent if not key.startswith((MEAN, HESS))])

    def posterior(self, arrays: NDArrays) -> DiagGaussian | None:
        """``N(m, 1/(λ (h + δ)))``; None while ``λ`` is not known."""
        if not self.ess:
            return None
        return self._posterior(arrays, self.ess)

    def predictive(self, arrays: NDArrays) -> DiagGaussian | None:
        """The posterior as if from ``test-ess`` examples: wider than in training where that is less."""
        return self._posterior(arrays, self.options.test_ess) if self.options.test_ess else self.posterior(arrays)

    def _posterior(self, arrays: NDArrays, ess: float) -> DiagGaussian:
        return DiagGaussian.from_hess(flat(arrays, MEAN), flat(arrays, HESS), ess, self.options.weight_decay)

    def scale(self) -> dict[str, float]:
        """``λ`` in training and in prediction, and ``δ``."""
        test_ess = self.options.test_ess or self.ess
        return {"ess": self.ess, "test_ess": test_ess, "weight_decay": self.options.weight_decay}

    def state(self) -> dict[str, float]:
        """``λ`` of the posterior."""
        return {"ess": self.ess}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Take up ``λ``."""
        self.ess = state["ess"]
