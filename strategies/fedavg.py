"""FedAvg, the server half: the mean of the clients' weights by their examples (McMahan et al. 2017)."""

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from fedivon_flwr.records import NDArrays
from fedivon_flwr.settings import MethodOptions
from strategies.base import FederatedStrategy, Reply, average


class Options(MethodOptions):
    """The keys ``fedavg.*`` of the run config."""

    lr: float = Field(1e-3, gt=0, description="Adam's learning rate in the first round")
    lr_final: float = Field(1e-5, ge=0, description="Adam's learning rate in the last round; linear in between")
    weight_decay: float = Field(2e-4, ge=0, description="Adam's weight decay")
    fused: bool = Field(
        False, description="true: PyTorch's fused kernel of Adam, faster and different in the last bits"
    )


class FedAvg(FederatedStrategy):
    """Averages ``mean/*`` and ``buffer/*``."""

    options_type: ClassVar[type[MethodOptions]] = Options
    options: Options

    def train_config(self, server_round: int) -> dict[str, Any]:
        """Adam's settings; the learning rate decays linearly over the rounds."""
        return self.decaying(server_round)

    def combine(self, replies: Sequence[Reply], sent: NDArrays) -> NDArrays:
        """``Σ N_k θ_k / Σ N``."""
        return average(replies, list(sent))
