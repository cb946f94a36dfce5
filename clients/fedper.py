"""FedPer, the client half: a shared base and a personal head (Arivazhagan et al. 2019).

Which parameters are the head is a matter of their names: the server tells a prefix (`own`), and parameters that begin
with it stay with the client. So the training is FedAvg's.
"""

from clients.fedavg import FedAvgClient


class FedPerClient(FedAvgClient):
    """Trains base and head together, sends back the base, and remembers the head."""
