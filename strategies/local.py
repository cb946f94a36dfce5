"""Local, the server half: it says when to train and nothing else; the baseline without federation."""

from collections.abc import Sequence

from strategies import fedavg


class Options(fedavg.Options):
    """The keys ``local.*`` of the run config: Adam's."""


class Local(fedavg.FedAvg):
    """Sends the common initialisation, and gets nothing back: every parameter stays with its client."""

    options_type = Options
    has_global = False
    own = ""

    def draw(self, clients: Sequence[int], count: int, server_round: int, purpose: str) -> set[int]:  # noqa: ARG002
        """All in turn, so that every client trains equally often."""
        first = (server_round - 1) * count
        return {clients[number % len(clients)] for number in range(first, first + count)}
