"""The thin Flower ClientApp: which client this node is, and its answers."""

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import clients
from clients.base import TorchClient, answer_evaluate, answer_query, answer_train
from fedivon_flwr.process import keep_freed_memory, without_compiler
from fedivon_flwr.settings import Settings
from fedivon_flwr.timeline import Stopwatch

keep_freed_memory()
without_compiler()
app = ClientApp()
app.query()(answer_query)
watch = Stopwatch()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round of local training."""
    return watch.note(answer_train(client_of(context), message, context))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluation on the node's own test data."""
    return watch.note(answer_evaluate(client_of(context), message, context))


def client_of(context: Context) -> TorchClient:
    """The client that run config and node config describe."""
    watch.begin()
    settings = Settings.from_config(context.run_config)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    client = clients.build(settings, context.node_config, context.node_id)
    watch.lap("load")
    return client
