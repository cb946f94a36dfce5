"""What becomes of a run: to wait for it, and to compare two."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedivon_flwr.runs import load_arrays, read_metrics


def rounds(run_dir: Path) -> list[dict[str, Any]]:
    """The rounds, without what depends on the machine's speed."""
    rows = read_metrics(run_dir)
    return [{key: value for key, value in row.items() if key not in ("seconds", "timeline")} for row in rows]


def assert_same_posterior(one: Path, other: Path) -> None:
    first, second = (load_arrays(path / "posterior.safetensors")[0] for path in (one, other))
    assert list(first) == list(second)
    for key in first:
        np.testing.assert_array_equal(first[key], second[key])


def assert_same_outcome(one: Path, other: Path) -> None:
    assert rounds(one) == rounds(other)
    assert_same_posterior(one, other)
    scores = [json.loads((path / "summary.json").read_text())["metrics"] for path in (one, other)]
    assert scores[0] == scores[1]


def until(fact: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for something that must happen."""
    give_up = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < give_up, f"{what}: not within {seconds:g} s"
        time.sleep(0.2)
