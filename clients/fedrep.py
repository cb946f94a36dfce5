"""FedRep, the client half: first the personal head, then the shared base (Collins et al. 2021)."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from clients.base import Work
from clients.fedavg import FedAvgClient, Plan
from fedivon_flwr.records import MEAN, NDArrays, is_own


class RepPlan(Plan):
    """What a FedRep client is told besides Adam's settings."""

    head_epochs: int = Field(ge=1)


class FedRepClient(FedAvgClient):
    """Fits the head to the base that came, then the base to this head; sends back the base."""

    def train(self, arrays: NDArrays, config: Mapping[str, Any], work: Work) -> tuple[NDArrays, float]:  # noqa: ARG002
        """Adam on the head, then on the base."""
        plan = RepPlan.model_validate(config)

        def in_head(name: str) -> bool:
            return is_own(MEAN + name, work.own)

        self.adam(plan, work.model_copy(update={"local_epochs": plan.head_epochs}), only=in_head)
        loss = self.adam(plan, work, only=lambda name: not in_head(name))
        return self.weights(), loss
