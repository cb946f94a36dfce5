"""The thin Flower ClientApp: messages in, `NumPyClient` calls, messages out."""

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import clients
from clients.base import TorchClient
from fedivon_flwr.errors import UserError
from fedivon_flwr.memory import keep_freed_memory
from fedivon_flwr.records import NUM_EXAMPLES, from_record, to_record
from fedivon_flwr.settings import Settings

keep_freed_memory()
app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Tell which partition this node holds, if it holds one."""
    number = int(context.node_config.get("partition-id", -1))
    return Message(RecordDict({"metrics": MetricRecord({"partition-id": number})}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round of local training."""
    client, parameters, config = _receive(message, context)
    arrays, examples, metrics = client.fit(parameters, config)
    content = RecordDict(
        {
            "arrays": to_record(dict(zip(client.keys, arrays, strict=True))),
            "metrics": MetricRecord({NUM_EXAMPLES: examples, **metrics}),
        }
    )
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluation on the node's own test data."""
    client, parameters, config = _receive(message, context)
    loss, examples, metrics = client.evaluate(parameters, config)
    content = RecordDict({"metrics": MetricRecord({NUM_EXAMPLES: examples, "loss": loss, **metrics})})
    return Message(content, reply_to=message)


def _receive(message: Message, context: Context) -> tuple[TorchClient, list, dict]:  # type: ignore[type-arg]
    settings = Settings.from_config(context.run_config)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    client = clients.build(settings, context.node_config)
    arrays = from_record(message.content.array_records["arrays"])
    if list(arrays) != client.keys:
        raise UserError(
            "The arrays that the server sent do not fit this node's model: server and node must use the same "
            f"method ({settings.method}) and model ({settings.model})."
        )
    return client, list(arrays.values()), dict(message.content.config_records["config"])
