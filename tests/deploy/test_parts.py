"""A public dataset in parts for real nodes: the files hold what virtual clients have."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
from command import Command

import clients
from deploy.parts import common, export_parts
from fedivon_flwr.errors import UserError
from fedivon_flwr.settings import Settings

CONFIG = {"dataset": "digits", "model": "mlp", "clients": 3, "clients-per-round": 3, "partitioner": "dirichlet"}


def test_a_node_with_a_part_has_what_the_virtual_client_has(tmp_path: Path) -> None:
    settings = Settings.from_config(CONFIG)
    files = export_parts(settings, tmp_path / "parts")
    assert sorted((tmp_path / "parts").iterdir()) == files
    on_nodes = Settings.from_config({**CONFIG, **common(settings)})
    for number, file in enumerate(files):
        virtual = clients.local_data(settings, {"partition-id": number})
        real = clients.local_data(on_nodes, {"data": str(file), "partition-id": number})
        assert (real.dataset.shape, real.dataset.classes) == (virtual.dataset.shape, virtual.dataset.classes)
        assert (real.dataset.mean, real.dataset.std) == (virtual.dataset.mean, virtual.dataset.std)
        for split, rows in (("train", virtual.train), ("test", virtual.test)):
            ours, theirs = getattr(real.dataset, split), getattr(virtual.dataset, split)
            np.testing.assert_array_equal(ours.x[getattr(real, split)], theirs.x[rows])
            np.testing.assert_array_equal(ours.y[getattr(real, split)], theirs.y[rows])


def test_the_command_prints_settings_that_can_be_used(tmp_path: Path, fedivon: Command) -> None:
    done = fedivon("data", "parts", str(tmp_path / "parts"), "-s", "clients=2", "-s", "clients-per-round=2")
    assert done.code == 0, done.err
    told = tomllib.loads(done.out)
    assert told["clients"] == 2
    assert clients.contract(Settings.from_config({**CONFIG, **told, "clients-per-round": 2})).shape == (1, 8, 8)


def test_what_cannot_be_done_is_one_sentence(tmp_path: Path) -> None:
    nodes = Settings.from_config({**CONFIG, "dataset": "nodes", "input-shape": "3", "classes": 2})
    with pytest.raises(UserError, match="only a dataset that is here"):
        export_parts(nodes, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written to"):
        export_parts(Settings.from_config(CONFIG), tmp_path / "file" / "parts")
