"""Apps whose clients do nothing but send back what they got: what is left is the cost of the transport."""

import json
import time
from pathlib import Path
from statistics import median

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from clients.base import answer_query
from fedivon_flwr.records import NUM_EXAMPLES, to_record
from strategies.base import RoundReport, RoundSettings
from strategies.fedavg import FedAvg

ARRAYS = 8
WARM_UP = 3

client_app = ClientApp()
client_app.query()(answer_query)
server_app = ServerApp()


@client_app.train()
def train(message: Message, _: Context) -> Message:
    """Send back what came."""
    arrays = next(iter(message.content.array_records.values()))
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({NUM_EXAMPLES: 1})}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Measure the rounds that the run config asks for."""
    config = context.run_config
    found = measure(grid, float(config["megabytes"]), int(config["rounds"]), int(config["clients-per-round"]))
    Path(str(config["output"])).write_text(json.dumps(found))


def measure(grid: Grid, megabytes: float, rounds: int, clients_per_round: int) -> float:
    """Median milliseconds of a round, the first few left out."""
    size = int(megabytes * 1e6 / 4 / ARRAYS)
    arrays = to_record({f"mean/{i}": np.full(size, 0.5, np.float32) for i in range(ARRAYS)})
    ends: list[float] = []

    def clock(_: RoundReport, __: ArrayRecord) -> None:
        ends.append(time.perf_counter())

    strategy = FedAvg(rounds=RoundSettings(clients_per_round=clients_per_round))
    strategy.start(grid, arrays, num_rounds=rounds + WARM_UP, callbacks=[clock])
    return float(median(np.diff(ends[WARM_UP - 1 :]) * 1e3))
