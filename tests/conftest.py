"""For all tests: one thread, a cache of their own, and no deadline for generated examples."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import Command, Ended
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
    monkeypatch.setenv("FEDIVON_STATE", str(shared_cache / "state"))


@pytest.fixture(scope="session")
def docker_compose() -> None:
    """For tests that need Docker's compose, with or without an engine."""
    command = ["docker", "compose", "version"]
    if shutil.which("docker") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("Docker's compose is not installed")


@pytest.fixture
def fedivon(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """The `fedivon` command in this process, through its entry point; runs go to a folder of the test."""
    from fedivon_flwr import cli  # not above: the path is set there

    monkeypatch.setenv("FEDIVON_RUNS", str(tmp_path / "runs"))

    def run(*words: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["fedivon", *map(str, words)])
        monkeypatch.setattr(cli.out, "_width", 200)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return Ended(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run
