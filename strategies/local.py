"""Local, the server half: it says when to train and nothing else; the baseline without federation."""

from strategies import fedavg


class Options(fedavg.Options):
    """The keys ``local.*`` of the run config: Adam's."""


class Local(fedavg.FedAvg):
    """Sends the common initialisation, and gets nothing back: every parameter stays with its client."""

    options_type = Options
    has_global = False
    own = ""
