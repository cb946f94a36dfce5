"""pFedVEM, the server half: the base by examples, the head by the clients' confidence (Zhu et al. 2023)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from fedivon_flwr.records import MEAN, NDArrays, is_own, tensor
from fedivon_flwr.settings import MethodOptions
from strategies.aggregation import weighted_mean
from strategies.base import FederatedStrategy, Reply, average

HEAD, VARIANCE = "head", "head-variance"


class Options(MethodOptions):
    """The keys ``pfedvem.*`` of the run config."""

    lr: float = Field(0.01, gt=0, description="learning rate of the base (SGD) in the first round")
    lr_final: float = Field(0.01, gt=0, description="learning rate of the base in the last round; linear in between")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD")
    head_lr: float = Field(1e-2, gt=0, description="Adam's learning rate of the head")
    head_steps: int = Field(10, ge=1, description="full-batch steps of the head in a round")
    mc_samples: int = Field(5, ge=1, description="samples of the head for each step")
    head_std: float = Field(0.1, gt=0, description="standard deviation of a client's first head")
    head_variance: float = Field(0.1, gt=0, description="the first ρ², how far a head may be from the server's")


class PFedVEM(FederatedStrategy):
    """Averages; a head counts by ``1/ρ_k²``."""

    options_type: ClassVar[type[MethodOptions]] = Options
    options: Options
    remembers = True

    def train_config(self, server_round: int) -> dict[str, Any]:
        """The learning rate of the base decays linearly over the rounds."""
        return self.decaying(server_round)

    def refuse_metrics(self, metrics: Mapping[str, float]) -> str | None:
        """The variance must be there, and positive."""
        given = metrics.get(VARIANCE)
        return None if given is not None and given > 0 else f"{VARIANCE} is {given}, which is not positive"

    def combine(self, replies: Sequence[Reply], sent: NDArrays) -> NDArrays:
        """``Σ N_k θ_k / Σ N`` for the base, ``Σ μ_k/ρ_k² / Σ 1/ρ_k²`` for the head; buffers are averaged."""
        combined = average(replies, list(sent))
        trust = [1 / reply.metrics[VARIANCE] for reply in replies]
        share = [each / sum(trust) for each in trust]
        for key in sent:
            if key.startswith(MEAN) and is_own(key, HEAD):
                combined[key] = weighted_mean(share, [tensor(reply.arrays[key]) for reply in replies]).numpy()
        return combined
