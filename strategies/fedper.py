"""FedPer, the server half: the base is averaged, the head stays with the clients (Arivazhagan et al. 2019)."""

from typing import ClassVar

from pydantic import Field
from torch import nn

from fedivon_flwr.errors import UserError
from fedivon_flwr.records import MEAN, NDArrays, is_own
from fedivon_flwr.settings import MethodOptions
from strategies import fedavg
from strategies.base import RoundSettings


class Options(fedavg.Options):
    """The keys ``fedper.*`` of the run config: Adam's, and what is personal."""

    own: str = Field("head", min_length=1, description="the parameters that stay with a client begin with this")


class FedPer(fedavg.FedAvg):
    """Averages what is shared. The server's own head is where every client starts; it is never trained."""

    options_type: ClassVar[type[MethodOptions]] = Options
    options: Options
    has_global = False

    def __init__(self, options: Options | None = None, rounds: RoundSettings | None = None) -> None:
        super().__init__(options, rounds)
        self.own = self.options.own

    def model_arrays(self, model: nn.Module) -> NDArrays:
        """The model's weights, of which some must be personal and some shared."""
        arrays = super().model_arrays(model)
        keys = [key for key in arrays if key.startswith(MEAN)]
        if len({is_own(key, self.own) for key in keys}) < 2:
            names = ", ".join(key.removeprefix(MEAN) for key in keys)
            raise UserError(
                f"The parameters of the model that begin with '{self.own}' are all or none, but some must stay with "
                f"the client and some be shared (the option own); the parameters are: {names}."
            )
        return arrays
