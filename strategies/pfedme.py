"""pFedMe, the server half: moves towards the mean of the clients' shared weights (Dinh et al. 2020)."""

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from fedivon_flwr.records import MEAN, NDArrays
from fedivon_flwr.settings import MethodOptions
from strategies.base import FederatedStrategy, Reply, average


class Options(MethodOptions):
    """The keys ``pfedme.*`` of the run config."""

    lr: float = Field(0.01, gt=0, description="η, the learning rate of the shared weights")
    lr_personal: float = Field(0.01, gt=0, description="η_p, the learning rate of the personal weights")
    penalty: float = Field(15.0, gt=0, description="how strongly personal weights are drawn to the shared ones")
    inner_steps: int = Field(5, ge=1, description="steps of the personal weights for each batch")
    mix: float = Field(1.0, gt=0, description="b, how far the server goes from its old weights to the mean of the new")


class PFedMe(FederatedStrategy):
    """``w ← (1 − b) w + b Σ N_k w_k / Σ N``."""

    options_type: ClassVar[type[MethodOptions]] = Options
    options: Options

    def train_config(self, server_round: int) -> dict[str, Any]:  # noqa: ARG002
        """The learning rates stay the same in all rounds."""
        return self.options.model_dump(by_alias=True, exclude={"mix", "personal_lr"})

    def personal_config(self) -> dict[str, Any]:
        """The learning rate of the personal models is that of the personal weights."""
        told = self.train_config(self.num_rounds)
        return {**told, "lr-personal": self.options.personal_lr or told["lr-personal"], "personal": True}

    def combine(self, replies: Sequence[Reply], sent: NDArrays) -> NDArrays:
        """The mixture of old and new; buffers are averaged."""
        combined, b = average(replies, list(sent)), self.options.mix
        return {
            key: (1 - b) * sent[key] + b * array if b != 1 and key.startswith(MEAN) else array
            for key, array in combined.items()
        }
