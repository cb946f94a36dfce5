"""A run from its settings to its folder: start or resume, evaluate, keep, report. The same on every grid."""

import shutil
import time
from collections.abc import Mapping, Sequence
from logging import INFO, WARNING
from statistics import mean
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid

import strategies
from clients import pick_device, server_data
from fedivon_flwr.data import Dataset
from fedivon_flwr.errors import UserError
from fedivon_flwr.evaluation import Evaluator, Predictions
from fedivon_flwr.models import build
from fedivon_flwr.posterior import DiagGaussian
from fedivon_flwr.predict import Partial
from fedivon_flwr.process import keep_freed_memory
from fedivon_flwr.records import TRAIN_EXAMPLES, NDArrays, from_record, to_record
from fedivon_flwr.runs import STATE, Checkpoint, RunFolder, save_arrays, versions, write_json
from fedivon_flwr.settings import Settings
from simulation.report import write_report
from strategies.base import PERSONAL_SCORES, Callback, FederatedStrategy, Reply, RoundReport

EVALUATION_SECONDS = 10.0  # between savings of the final evaluation under way
TRIES = 3  # how often a client is asked for its personal model


def run(grid: Grid, settings: Settings) -> RunFolder:
    """Train, or go on where a run was interrupted, and write the run's folder."""
    keep_freed_memory()  # for the evaluations
    settings = strategies.complete(settings)
    strategy, dataset = strategies.build(settings), server_data(settings)
    model = build(settings.model, dataset.shape, dataset.classes, settings.seed)
    evaluator = Evaluator(model, dataset, pick_device(settings.device), settings.seed)
    folder = RunFolder.open(settings, strategies.complete)
    try:
        if folder.finished:
            log(INFO, "The run in %s is finished already.", folder.path)
            return folder
        checkpoint = folder.resume() or Checkpoint(0, strategy.model_arrays(model), strategy.state())
        strategy.load_state(checkpoint.state)
        log(INFO, "Run folder: %s (from round %d)", folder.path, checkpoint.round + 1)
        known: dict[str, str | int | list[int]] = {
            "run": folder.name,
            "resumed-after": folder.resumed_after,
            "batch-size": settings.batch_size,
            "checkpoint-every": settings.checkpoint_every,
        }
        result = strategy.start(
            grid,
            to_record(checkpoint.arrays),
            num_rounds=settings.rounds,
            train_config=ConfigRecord({**known, "local-epochs": settings.local_epochs}),
            evaluate_config=ConfigRecord({**known, "eval-samples": settings.eval_samples}),
            evaluate_fn=lambda r, arrays: evaluate(evaluator, strategy, settings, r, arrays),
            first_round=checkpoint.round + 1,
            callbacks=callbacks(folder, strategy, settings),
        )
        assert result.arrays is not None
        keep_posterior(folder, strategy, evaluator.dataset, settings, result.arrays)
        if settings.personal:
            epochs = settings.personal_epochs or settings.local_epochs
            told = ConfigRecord({**known, "local-epochs": epochs, "eval-samples": settings.test_samples})
            personal_models(folder, grid, strategy, settings, result.arrays, told)
        finish(folder, strategy, settings, evaluator, result.arrays)
    finally:
        folder.close()
    return folder


def evaluate(
    evaluator: Evaluator, strategy: FederatedStrategy, settings: Settings, server_round: int, arrays: ArrayRecord
) -> MetricRecord | None:
    """Score the global model on the server's test data, in the rounds that are due."""
    due = server_round % settings.evaluate_every == 0 or server_round == settings.rounds
    if settings.evaluation != "server" or not due or not strategy.has_global:
        return None
    named = from_record(arrays)
    scores = evaluator.predict(named, strategy.posterior(named), settings.eval_samples, server_round).scores()
    return MetricRecord({f"{at}-{key}": float(value) for at, values in scores.items() for key, value in values.items()})


def callbacks(folder: RunFolder, strategy: FederatedStrategy, settings: Settings) -> list[Callback]:
    """What happens after each round."""

    def metrics(report: RoundReport, _: ArrayRecord) -> None:
        folder.append_metrics(row_of(report))

    def checkpoint(report: RoundReport, arrays: ArrayRecord) -> None:
        if report.round % settings.checkpoint_every == 0 or report.round == report.rounds:
            folder.save_checkpoint(Checkpoint(report.round, from_record(arrays), strategy.state()))

    found: list[Callback] = [metrics, checkpoint, Progress()]
    return [*found, TensorBoard(folder)] if settings.tensorboard else found


def row_of(report: RoundReport) -> dict[str, Any]:
    """A line of metrics.jsonl; the scores are nested as in summary.json."""
    row: dict[str, Any] = {
        "round": report.round,
        "train_loss": report.train_loss,
        "seconds": round(report.seconds, 4),
        "bytes_up": report.bytes_up,
        "bytes_down": report.bytes_down,
        "replies": report.replies,
        "refused": report.refused,
    }
    if report.timeline:
        row["timeline"] = {key: round(value, 3) for key, value in report.timeline.items()}
    return row | nested(report.evaluation)


def nested(flat: Mapping[str, float]) -> dict[str, Any]:
    """``mean-accuracy`` as ``{mean: {accuracy: …}}``.

    >>> nested({"mean-ece": 0.1, "clients-mc-ece": 0.2, "clients-loss": 1.0})
    {'mean': {'ece': 0.1}, 'clients': {'mc': {'ece': 0.2}, 'loss': 1.0}}
    """
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = key.split("-")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[name] = value
    return tree


class Progress:
    """Logs a line every few seconds, for those who watch ``flwr run``."""

    def __init__(self, every: float = 5.0) -> None:
        self._every, self._began, self._last, self._done = every, time.monotonic(), 0.0, 0

    def __call__(self, report: RoundReport, _: ArrayRecord) -> None:
        """Count the round."""
        self._done += 1
        now = time.monotonic()
        if now - self._last < self._every and report.round != report.rounds:
            return
        self._last = now
        speed = self._done / max(now - self._began, 1e-9)
        scores = {key: value for key, value in report.evaluation.items() if key.endswith(("accuracy", "ece"))}
        log(
            INFO,
            "round %d/%d  loss %s  %s  %.1f rounds/s  %.0f s left",
            report.round,
            report.rounds,
            "-" if report.train_loss is None else f"{report.train_loss:.4f}",
            "  ".join(f"{key} {value:.4f}" for key, value in scores.items()),
            speed,
            (report.rounds - report.round) / speed,
        )


class TensorBoard:
    """Writes the metrics as TensorBoard events."""

    def __init__(self, folder: RunFolder) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "The key 'tensorboard' is true but the package is not installed: pip install tensorboard."
            ) from None
        self._writer = SummaryWriter(folder.path / "tensorboard")

    def __call__(self, report: RoundReport, _: ArrayRecord) -> None:
        """Write a round."""
        values = {**report.evaluation, "seconds": report.seconds, "replies": report.replies}
        if report.train_loss is not None:
            values["train-loss"] = report.train_loss
        for key, value in values.items():
            self._writer.add_scalar(key, value, report.round)
        self._writer.flush()


def personal_models(
    folder: RunFolder,
    grid: Grid,
    strategy: FederatedStrategy,
    settings: Settings,
    arrays: ArrayRecord,
    config: ConfigRecord,
) -> None:
    """Let every client make a personal model, some at a time, and keep what it tells.

    Who does not answer is asked again. The run does not end without a client that is there, since the mean over the
    others would flatter a method; clients that have left the federation are waited for once, for `node-wait` seconds.
    """
    done = {row["client"] for row in folder.clients()}
    for attempt in range(TRIES):
        everybody = strategy.everybody(grid, wait=attempt == 0 and len(done) < settings.clients)
        todo = [client for client in everybody if client not in done]
        for start in range(0, len(todo), settings.clients_per_round):
            began = time.monotonic()
            replies = strategy.personal(grid, arrays, config, todo[start : start + settings.clients_per_round])
            for reply in replies:
                seconds = (time.monotonic() - began) / len(replies)
                folder.append_client(client_row(reply, settings) | {"seconds": round(seconds, 4)})
                done.add(reply.client)
            log(INFO, "Personal models: %d of %d clients", len(done), len(everybody))
    if not (done or everybody):
        raise UserError(
            f"No node is connected after {settings.node_wait:g} s that could make a personal model; start the nodes "
            "and give the same command again."
        )
    if missing := [str(client) for client in everybody if client not in done]:
        raise UserError(
            f"{len(missing)} of {len(everybody)} clients gave no scores of a personal model in {TRIES} tries "
            f"({', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}); the log says why. The same command asks "
            "them again."
        )


def client_row(reply: Reply, settings: Settings) -> dict[str, Any]:
    """A line of clients.jsonl."""
    known = [key for keys in PERSONAL_SCORES.values() for key in keys if key in reply.metrics]
    scores = nested({key: reply.metrics[key] for key in known})
    seen = not settings.unseen_clients or reply.client < settings.clients - settings.unseen_clients
    test_examples = reply.examples if "mean" in scores else 0
    about = {
        "client": reply.client,
        "seen": seen,
        "examples": int(reply.metrics[TRAIN_EXAMPLES]),
        "test_examples": test_examples,
    }
    return about | {at: scores[at] for at in ("global", "mean", "mc") if at in scores}


def mean_scores(rows: Sequence[Mapping[str, Any]], samples: int) -> dict[str, Any]:
    """The unweighted mean of clients' scores: of their personal models, and of the server's on the same data."""

    def over(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {key: mean(score[key] for score in scores) for key in scores[0]}

    found: dict[str, Any] = {"clients": len(rows)}
    found |= {at: over([row[at] for row in rows]) for at in ("mean", "mc") if all(at in row for row in rows)}
    if all("global" in row for row in rows):
        found["global"] = over([row["global"]["mean"] for row in rows])
    if "mc" in found:
        found["mc"]["samples"] = samples
    return found


def keep_posterior(
    folder: RunFolder, strategy: FederatedStrategy, dataset: Dataset, settings: Settings, arrays: ArrayRecord
) -> None:
    """The outcome of the training, as `fedivon predict` takes it."""
    described = {
        "method": settings.method,
        "model": settings.model,
        "shape": list(dataset.shape),
        "classes": dataset.classes,
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        "seed": settings.seed,
        "settings": settings.record(),
        "whole": strategy.has_global,
        **strategy.scale(),
    }
    save_arrays(folder.path / "posterior.safetensors", from_record(arrays), described)


def finish(
    folder: RunFolder, strategy: FederatedStrategy, settings: Settings, evaluator: Evaluator, arrays: ArrayRecord
) -> None:
    """The final evaluation, the report and, last, the summary that says that all is there."""
    began, named = time.perf_counter(), from_record(arrays)
    posterior, predictions, earlier = strategy.predictive(named), None, 0.0
    if settings.evaluation == "server" and strategy.has_global:
        log(INFO, "Final evaluation with %d weight samples", settings.test_samples if posterior else 0)
        predictions, earlier = final_predictions(folder, evaluator, named, posterior, settings.test_samples)
    rows, everybody = folder.metrics(), folder.clients()
    people = [row for row in everybody if "mean" in row]  # who has test data
    trained = sum(row.get("seconds", 0.0) for row in [*rows, *everybody])  # earlier versions did not time the clients
    seconds = trained + earlier + time.perf_counter() - began
    summary = {
        "method": settings.method,
        "dataset": settings.dataset,
        "seed": settings.seed,
        "rounds": settings.rounds,
        "clients": settings.clients,
        "settings": settings.record(),
        "versions": versions(),
        "seconds": round(seconds, 2),
        "metrics": predictions.scores() if predictions else clients_scores(rows, settings),
    }
    for name, seen in (("personal", True), ("unseen", False)):
        if some := [row for row in people if row["seen"] == seen]:
            summary["metrics"][name] = mean_scores(some, settings.test_samples)
    write_report(folder.path, summary, rows, predictions, people)
    write_json(folder.path / "summary.json", summary)
    folder.drop_evaluation()
    if not settings.keep_memory:
        shutil.rmtree(folder.path / STATE, ignore_errors=True)


def final_predictions(
    folder: RunFolder, evaluator: Evaluator, arrays: NDArrays, posterior: DiagGaussian | None, samples: int
) -> tuple[Predictions, float]:
    """Predict the test set, going on where an earlier attempt was interrupted, and keep the probabilities.

    Also gives the seconds that earlier attempts took.
    """
    found = folder.load_evaluation()
    begun = Partial(found[0], torch.from_numpy(found[1])) if found else None
    earlier = found[2] if found else 0.0
    began = saved = time.monotonic()

    def each(partial: Partial) -> None:
        nonlocal saved
        if time.monotonic() - saved > EVALUATION_SECONDS:
            folder.save_evaluation(partial.draws, partial.total.numpy(), earlier + time.monotonic() - began)
            saved = time.monotonic()
            log(INFO, "Final evaluation: %d of %d weight samples", partial.draws, samples)

    predictions = evaluator.predict(arrays, posterior, samples, begun=begun, each=each)
    kept = {"labels": predictions.labels, "mean": predictions.mean}
    if predictions.mc is not None:
        kept["mc"] = predictions.mc
    numpied = {key: tensor.numpy() for key, tensor in kept.items()}
    save_arrays(folder.path / "predictions.safetensors", numpied, {"samples": predictions.samples})
    return predictions, earlier


def clients_scores(rows: Sequence[Mapping[str, Any]], settings: Settings) -> dict[str, Any]:
    """The scores of the last evaluation on the nodes, in the form of the server's own."""
    last: Mapping[str, Any] = next((row for row in reversed(rows) if "clients" in row), {"round": 0, "clients": {}})
    found = {at: dict(last["clients"][at]) for at in ("mean", "mc") if at in last["clients"]}
    ended = last["round"] == settings.rounds
    if settings.evaluation == "clients" and not ended:
        log(
            WARNING,
            "No node has answered the last evaluation; the scores are of round %d. It has test-samples = %d draws: "
            "are they too many for round-deadline = %g?",
            *(last["round"], settings.test_samples, settings.round_deadline),
        )
    if "mc" in found:
        found["mc"]["samples"] = settings.test_samples if ended else settings.eval_samples
    return found
