"""`make bench`: how fast the parts are, each beside what it is compared with, in one run.

Machines are noisy, so everything is a ratio or a pair of numbers taken in turn; results/bench.json gets them all.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from flwr.app import ConfigRecord
from rich.console import Console
from rich.table import Table

import clients
import strategies
from fedivon_flwr import convolution
from fedivon_flwr.data import load
from fedivon_flwr.flower import environment
from fedivon_flwr.models import build
from fedivon_flwr.process import keep_freed_memory
from fedivon_flwr.records import to_record
from fedivon_flwr.runs import provenance, write_json
from fedivon_flwr.settings import Settings
from simulation import noop
from simulation.engine import RayGrid, Resources, ray_grid
from simulation.launch import CLIENT_APP, federation, flwr_run, superlink, to_toml
from strategies.aggregation import RULES, Shared, Term, aggregate
from strategies.base import RoundReport, draw

NODES, PER_ROUND = 200, 10
SIZES = (0.1, 1.0, 10.0)  # megabytes
NOOP_ROUNDS = 40
CNN_CLIENTS, CNN_ROUNDS, REPEATS = 60, 4, 13  # short turns: the speed of the machine changes within seconds
OUTPUT = Path("results/bench.json")


def main() -> None:
    """Measure everything, print a table, write the file."""
    out = Console()
    out.print("Measuring; this takes about five minutes on two cores and wants them for itself.")
    keep_freed_memory()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fedivon-bench-") as folder:
        os.environ["FEDIVON_CACHE"] = folder
        data = make_data(Path(folder) / "cifar-like.npz")
        for name, measure in (
            ("transport", transport),
            ("engine against loops", lambda: engine_against_loops(data)),
            ("IVON against Adam", lambda: ivon_against_adam(data)),
            ("convolution against PyTorch's", lambda: convolution_against_pytorch(data)),
            ("aggregation against copying", aggregation_against_copy),
        ):
            began = time.perf_counter()
            found |= measure()
            out.print(f"{name}: {time.perf_counter() - began:.0f} s", highlight=False)
    OUTPUT.parent.mkdir(exist_ok=True)
    write_json(OUTPUT, {**found, **provenance()})
    show(out, found)


def show(out: Console, found: dict[str, Any]) -> None:
    """The table that is printed."""
    table = Table("what", "value", "goal")
    goals = {"engine_ms_per_round": "< 20", "engine_over_loop": "≥ 0.85", "ivon_over_adam": "≤ 1.10"}
    for key, value in found.items():
        text = f"{value:.3g}" if isinstance(value, float) else json.dumps(value)
        table.add_row(key, text, goals.get(key, ""))
    out.print(table)
    out.print(f"Written to {OUTPUT}", highlight=False)


def markdown(found: dict[str, Any]) -> str:
    """The table of the README, from results/bench.json."""
    sizes = [f"{size:g}" for size in SIZES]
    engine, flwr = (
        [f"{found[f'{name}_ms_per_round_by_mb'][str(size)]:.0f}" for size in SIZES] for name in ("engine", "flwr")
    )
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            f"| round of {PER_ROUND} idle clients, {' / '.join(sizes)} MB each: our engine | {' / '.join(engine)} ms |",
            f"| the same under `flwr run` | {' / '.join(flwr)} ms |",
            f"| clients per second of the engine, over plain loops on all cores | {found['engine_over_loop']:.2f} |",
            f"| local update with IVON, over `torch.optim.Adam` (over its fused kernel) | "
            f"{found['ivon_over_adam']:.2f} ({found['ivon_over_fused_adam']:.2f}) |",
            f"| bytes per second of the aggregation, over copying memory | {found['aggregation_over_copy']:.2f} |",
        ]
    )


def make_data(path: Path) -> str:
    """Random images of CIFAR-10's shape and labels: time does not depend on what they show."""
    random = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", CNN_CLIENTS * 100), ("test", 100)):
        arrays[f"x_{part}"] = random.integers(0, 256, (count, 32, 32, 3), np.uint8)
        arrays[f"y_{part}"] = np.arange(count, dtype=np.uint8) % 10
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return str(path)


# Transport: rounds of clients that do nothing


def transport() -> dict[str, Any]:
    """Milliseconds a round of the engine and of ``flwr run``, for several sizes of the arrays."""
    with ray_grid("simulation.noop:client_app", {}, NODES) as grid:
        engine = {size: noop.measure(grid, size, NOOP_ROUNDS, PER_ROUND) for size in SIZES}
    flwr = {size: flwr_ms_per_round(size) for size in SIZES}
    return {
        "engine_ms_per_round": engine[SIZES[0]],
        "flwr_ms_per_round": flwr[SIZES[0]],
        "engine_ms_per_round_by_mb": {str(size): round(ms, 2) for size, ms in engine.items()},
        "flwr_ms_per_round_by_mb": {str(size): round(ms, 2) for size, ms in flwr.items()},
    }


def flwr_ms_per_round(megabytes: float) -> float:
    """The same apps under ``flwr run`` with a SuperLink of its own."""
    with tempfile.TemporaryDirectory(prefix="fedivon-noop-") as folder:
        app, output = Path(folder) / "app", Path(folder) / "ms.json"
        app.mkdir()
        (app / "LICENSE").write_text("GPL-3.0-or-later\n")
        (app / "noop_app.py").write_text(
            "from simulation import noop\n\nclient_app = noop.client_app\nserver_app = noop.server_app\n"
        )
        config = {
            "megabytes": megabytes,
            "rounds": NOOP_ROUNDS // 2,
            "clients-per-round": PER_ROUND,
            "output": str(output),
        }
        (app / "pyproject.toml").write_text(NOOP_PROJECT + to_toml(config))
        log_path = Path(folder) / "flwr.log"
        with log_path.open("w") as log, superlink(environment(folder), log, "--simulation") as address:
            flwr_run(app, config, folder, address, log, federation(NODES, Resources()))
        if not output.exists():
            raise RuntimeError(log_path.read_text())
        return float(json.loads(output.read_text()))


NOOP_PROJECT = """\
[project]
name = "noop"
version = "1.0.0"
license = { file = "LICENSE" }
dependencies = ["flwr[simulation]>=1.41,<1.42"]
[tool.flwr.app]
publisher = "fedivon"
fab-format-version = 1
flwr-version-target = "1.41.0"
[tool.flwr.app.components]
serverapp = "noop_app:server_app"
clientapp = "noop_app:client_app"
[tool.flwr.app.config]
"""


# The engine against plain loops


def cnn_settings(data: str, method: str = "fedivon") -> Settings:
    """The CIFAR-10 network, with clients like the paper's."""
    config = {"method": method, "dataset": data, "model": "cnn", "clients": CNN_CLIENTS, "local-epochs": 2}
    return Settings.from_config({**config, "batch-size": 32, "quantity-skew": 0.2, "rounds": CNN_ROUNDS})


def engine_against_loops(data: str) -> dict[str, Any]:
    """Clients per second of the engine over those of as many single-process loops as cores, together, in turn."""
    settings, cores = cnn_settings(data), os.cpu_count() or 1
    ratios = []
    with (
        ray_grid(CLIENT_APP, settings.to_config(), settings.clients, Resources()) as grid,
        Loops(settings, cores) as loops,
    ):
        engine_clients_per_second(grid, settings, rounds=2)  # warm up
        for _ in range(REPEATS):
            engine = engine_clients_per_second(grid, settings, CNN_ROUNDS)
            ratios.append(engine / loops.clients_per_second())
    return {"engine_over_loop": median(ratios), "engine_over_loop_all": [round(ratio, 3) for ratio in ratios]}


def engine_clients_per_second(grid: RayGrid, settings: Settings, rounds: int) -> float:
    """Rounds of FedIvon, aggregation and all."""
    strategy, dataset = strategies.build(settings), load(settings.dataset)
    model = build(settings.model, dataset.shape, dataset.classes, settings.seed)
    reports: list[RoundReport] = []
    config = ConfigRecord({"local-epochs": settings.local_epochs, "batch-size": settings.batch_size})
    arrays = to_record(strategy.model_arrays(model))
    began = time.perf_counter()
    strategy.start(grid, arrays, rounds, train_config=config, callbacks=[lambda report, _: reports.append(report)])
    return sum(report.replies for report in reports) / (time.perf_counter() - began)


class Loops:
    """Processes that train the same clients one after the other, without any framework."""

    def __init__(self, settings: Settings, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for number in range(count):
            here, there = context.Pipe()
            process = context.Process(target=loop, args=(there, settings.to_config(), number, count), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()  # ready

    def clients_per_second(self) -> float:
        """Let all run at once until the last one is done."""
        began = time.perf_counter()
        for pipe in self._pipes:
            pipe.send("go")
        done = sum(pipe.recv() for pipe in self._pipes)
        return float(done / (time.perf_counter() - began))

    def __enter__(self) -> "Loops":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()


def loop(pipe: Any, config: dict[str, Any], number: int, count: int) -> None:
    """One process: its share of the clients that the engine's rounds ask, in turn."""
    keep_freed_memory()
    torch.set_num_threads(1)
    settings = Settings.from_config(config)
    fit = trainer(settings)
    asked = [
        (server_round, int(client))
        for server_round in range(1, settings.rounds + 1)
        for client in sorted(draw(range(settings.clients), PER_ROUND, settings.seed, server_round))
    ]
    fit(1, 0)
    pipe.send("ready")
    while pipe.recv() == "go":
        mine = asked[number::count]
        for server_round, client in mine:
            fit(server_round, client)
        pipe.send(len(mine))


def trainer(settings: Settings) -> Callable[[int, int], None]:
    """A function that runs a client's local update from the initial weights."""
    strategy, dataset = strategies.build(settings), load(settings.dataset)
    model = build(settings.model, dataset.shape, dataset.classes, settings.seed)
    arrays = list(strategy.model_arrays(model).values())
    strategy.num_rounds = settings.rounds
    common = {"seed": settings.seed, "local-epochs": settings.local_epochs, "batch-size": settings.batch_size}

    def fit(server_round: int, client: int) -> None:
        node = {"partition-id": client, "num-partitions": settings.clients}
        told = {**common, **strategy.train_config(server_round), "server-round": server_round}
        clients.build(settings, node).fit(arrays, told)

    return fit


# The optimiser and the aggregation


def ivon_against_adam(data: str) -> dict[str, Any]:
    """Time of a client's local update with IVON over that with Adam, on the same batches, in turn.

    Adam is `torch.optim.Adam` as it comes, and beside it PyTorch's fused kernel, which IVON has no counterpart of.
    """
    torch.set_num_threads(1)
    plain = cnn_settings(data, "fedavg")
    fused = plain.model_copy(update={"options": {"fedavg": {"fused": True}}})
    fits = [trainer(settings) for settings in (cnn_settings(data), plain, fused)]
    times = np.array([[seconds(partial(fit, 1, client)) for fit in fits] for client in range(CNN_CLIENTS)])[1:]
    return {
        "ivon_over_adam": float(np.median(times[:, 0] / times[:, 1])),
        "ivon_over_fused_adam": float(np.median(times[:, 0] / times[:, 2])),
    }


def convolution_against_pytorch(data: str) -> dict[str, Any]:
    """Time of a client's local update with our convolution over that with PyTorch's, in turn."""
    torch.set_num_threads(1)
    fit = trainer(cnn_settings(data, "fedavg"))
    ratios = []
    for client in range(CNN_CLIENTS):
        ours = seconds(partial(fit, 1, client))
        with patch.object(convolution, "LEAST_BATCH", sys.maxsize):
            ratios.append(ours / seconds(partial(fit, 1, client)))
    return {"convolution_over_pytorch": median(ratios[1:])}


def aggregation_against_copy(clients_: int = 10, numel: int = 2_000_000) -> dict[str, Any]:
    """Bytes a second that `rkl` takes in over those of copying the same arrays."""
    torch.set_num_threads(os.cpu_count() or 1)
    terms = [Term(1 / clients_, torch.randn(numel), torch.rand(numel) + 0.5, 5000.0) for _ in range(clients_)]
    shared, target = Shared(2e-4, 5000.0, clients_), [torch.empty(numel) for _ in range(2 * clients_)]

    def copy() -> None:
        for place, source in zip(target, arrays_of(terms), strict=True):
            place.copy_(source)

    ratios = [seconds(copy) / seconds(lambda: aggregate(RULES["rkl"], terms, shared)) for _ in range(15)]
    return {"aggregation_over_copy": median(ratios[1:])}


def arrays_of(terms: Sequence[Term]) -> list[torch.Tensor]:
    """All arrays of the terms."""
    return [array for term in terms for array in (term.mean, term.hess)]


def seconds(work: Callable[[], object]) -> float:
    """How long some work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
