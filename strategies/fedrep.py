"""FedRep, the server half: like FedPer's; the clients train head and base in turn (Collins et al. 2021)."""

from typing import ClassVar

from pydantic import Field

from fedivon_flwr.settings import MethodOptions
from strategies import fedper


class Options(fedper.Options):
    """The keys ``fedrep.*`` of the run config: FedPer's, and the training of the head."""

    head_epochs: int = Field(5, ge=1, description="passes over a client's data for its head, before those for the base")


class FedRep(fedper.FedPer):
    """Averages the base."""

    options_type: ClassVar[type[MethodOptions]] = Options
    options: Options
