"""Local, the client half: every client alone, from the common initialisation; the baseline without federation."""

from clients.fedavg import FedAvgClient


class LocalClient(FedAvgClient):
    """Trains like FedAvg and keeps everything: the server's prefix `own` is empty, with which every name begins."""
