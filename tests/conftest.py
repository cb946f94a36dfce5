"""For all tests: one thread, a cache of their own, and no deadline for generated examples."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# pytest puts this folder on the path, where `strategies` and `clients` are folders of tests: the packages come first.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

torch.set_num_threads(1)
settings.register_profile("fedivon", deadline=None)
settings.load_profile("fedivon")


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache is not touched; data are prepared once for the whole session."""
    monkeypatch.setenv("FEDIVON_CACHE", str(shared_cache))
