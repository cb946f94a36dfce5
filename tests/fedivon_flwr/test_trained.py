"""A trained posterior predicts what its file says, from arrays and images, in Python and by `fedivon predict`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command, assert_refused
from PIL import Image

import strategies
from fedivon_flwr.data import load, normalise
from fedivon_flwr.errors import UserError
from fedivon_flwr.evaluation import Evaluator, draw_seed
from fedivon_flwr.metrics import score
from fedivon_flwr.models import build
from fedivon_flwr.records import to_record
from fedivon_flwr.runs import Checkpoint, RunFolder, load_arrays, read_json, save_arrays
from fedivon_flwr.settings import Settings
from fedivon_flwr.trained import Trained, read_inputs
from simulation.federation import finish, keep_posterior


def finished(path: Path, method: str, **more: Any) -> Path:
    """The folder of a run that ends as all do, but after training its network here, for a moment."""
    short = {"model": "mlp", "dataset": "digits", "test-samples": 4, "rounds": 1}
    settings = Settings.from_config({**short, "run-dir": str(path), "method": method, **more})
    strategy, data = strategies.build(settings), load(settings.dataset)
    network = build(settings.model, data.shape, data.classes, seed=0)
    adam = torch.optim.Adam(network.parameters(), lr=0.01)
    x, y = normalise(data.train.x[:512], data.mean, data.std, torch.device("cpu")), torch.tensor(data.train.y[:512])
    for _ in range(40):
        adam.zero_grad()
        torch.nn.functional.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
        adam.step()
    folder = RunFolder.open(settings)
    folder.append_metrics({"round": 1, "train_loss": 1.0, "seconds": 0.1})
    arrays = to_record(strategy.model_arrays(network))
    keep_posterior(folder, strategy, data, settings, arrays)
    finish(folder, strategy, settings, Evaluator(network, data, torch.device("cpu"), 0), arrays)
    folder.close()
    return path


@pytest.fixture(scope="module")
def cache(shared_cache: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDIVON_CACHE", str(shared_cache))
        load.cache_clear()
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Path:
    return finished(tmp_path_factory.mktemp("runs") / "fedivon", "fedivon")


@pytest.fixture(scope="module")
def fedavg_run(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Path:
    return finished(tmp_path_factory.mktemp("runs") / "fedavg", "fedavg")


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    np.savez(tmp_path / "in.npz", x=load("digits").test.x[:30])
    return tmp_path / "in.npz"


# ---------------------------------------------------------------- in Python


def test_it_predicts_what_the_summary_says(run: Path) -> None:
    trained, test = Trained.load(run), load("digits").test
    assert (trained.inputs.shape, trained.inputs.classes) == ((1, 8, 8), 10)
    expected = read_json(run / "summary.json")["metrics"]["mean"]
    assert expected["accuracy"] > 0.7
    scores = score(trained.predict(test.x, samples=0), torch.tensor(test.y)).as_dict()
    assert scores == pytest.approx(expected, abs=1e-5)


def test_the_file_and_its_folder_are_the_same(run: Path) -> None:
    x = load("digits").test.x[:5]
    there, here = Trained.load(run / "posterior.safetensors"), Trained.load(run)
    assert torch.equal(there.predict(x, 3, seed=1), here.predict(x, 3, seed=1))


def test_sampling_goes_by_the_seed_and_tends_to_one_answer(run: Path) -> None:
    trained, x = Trained.load(run), load("digits").test.x[:20]
    assert torch.equal(trained.predict(x, 4, seed=1), trained.predict(x, 4, seed=1))
    assert not torch.equal(trained.predict(x, 4, seed=1), trained.predict(x, 4, seed=2))
    many = [trained.predict(x, 400, seed=seed) for seed in (1, 2)]
    torch.testing.assert_close(many[0], many[1], atol=0.03, rtol=0)


def test_the_posterior_has_the_width_that_its_file_says(run: Path) -> None:
    trained = Trained.load(run)
    arrays, about = load_arrays(run / "posterior.safetensors")
    hess = np.concatenate([array.ravel() for key, array in arrays.items() if key.startswith("hess/")])
    assert trained.posterior is not None
    expected = about["ess"] * (hess.astype(np.float64) + about["weight_decay"])
    np.testing.assert_allclose(trained.posterior.precision.numpy(), expected, rtol=1e-5)


def test_a_finished_run_predicts_with_its_test_ess(tmp_path: Path, cache: None) -> None:
    path = finished(tmp_path / "run", "fedivon", **{"fedivon.ess": 800.0, "fedivon.test-ess": 50.0})
    trained, test = Trained.load(path), load("digits").test
    assert trained.posterior is not None
    torch.testing.assert_close(trained.posterior.precision, torch.full_like(trained.posterior.mean, 50 * (1 + 2e-4)))
    wider = Trained.load(path, ess=5.0).posterior
    assert wider is not None
    torch.testing.assert_close(wider.precision, trained.posterior.precision / 10)
    metrics = read_json(path / "summary.json")["metrics"]
    again = score(trained.predict(test.x, metrics["mc"]["samples"], draw_seed(0)), torch.tensor(test.y)).as_dict()
    assert again == pytest.approx({key: metrics["mc"][key] for key in again}, abs=1e-5)
    assert metrics["mc"]["nll"] > metrics["mean"]["nll"] + 0.01  # so wide that it shows


def test_without_posterior_samples_do_not_matter(fedavg_run: Path) -> None:
    trained, x = Trained.load(fedavg_run), load("digits").test.x[:20]
    assert trained.posterior is None
    assert torch.equal(trained.predict(x, 8), trained.predict(x, 0))


def test_batches_do_not_show(run: Path) -> None:
    trained, x = Trained.load(run), load("digits").test.x[:300]  # more than a batch
    together, alone = trained.predict(x, 0), torch.cat([trained.predict(x[i : i + 1], 0) for i in (0, 255, 256, 299)])
    torch.testing.assert_close(together[[0, 255, 256, 299]], alone)


def test_a_checkpoint_is_no_outcome(tmp_path: Path) -> None:
    folder = RunFolder.open(Settings(run_dir=str(tmp_path / "run")))
    folder.save_checkpoint(Checkpoint(1, {"mean/x": np.zeros(3)}, {}))
    folder.close()
    with pytest.raises(UserError, match="checkpoint of an unfinished run"):
        Trained.load(tmp_path / "run" / "checkpoints" / "round-000001.safetensors")
    with pytest.raises(UserError, match="There is no file"):
        Trained.load(tmp_path / "run")


def test_the_servers_half_of_a_personal_method_does_not_predict(tmp_path: Path, cache: None) -> None:
    path = finished(tmp_path / "run", "fedper")
    with pytest.raises(UserError, match="'fedper', which trains no model for all"):
        Trained.load(path)


def test_own_float_data(tmp_path: Path, cache: None) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(600) % 3
    x = (np.eye(3)[y] * 3 + rng.standard_normal((600, 3))).astype(np.float32)
    np.savez(tmp_path / "own.npz", x_train=x[:500], y_train=y[:500], x_test=x[500:], y_test=y[500:])
    trained = Trained.load(finished(tmp_path / "run", "fedivon", dataset=str(tmp_path / "own.npz")))
    names, inputs = read_inputs(tmp_path / "own.npz", trained.inputs.shape)  # x_test will do for x
    assert len(names) == 100
    assert (trained.predict(inputs, 20).argmax(1).numpy() == y[500:]).mean() > 0.8
    np.savez(tmp_path / "text.npz", x=np.array([["a", "b", "c"]]))
    with pytest.raises(UserError, match="must be floating-point"):
        read_inputs(tmp_path / "text.npz", trained.inputs.shape)
    Image.new("L", (3, 3)).save(tmp_path / "x.png")
    with pytest.raises(UserError, match="not grey or colour images"):
        read_inputs(tmp_path / "x.png", trained.inputs.shape)


def test_colour_images_keep_their_channels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    names, x = read_inputs(tmp_path / "x.png", (3, 6, 5))
    assert names == ["x.png"]
    np.testing.assert_array_equal(x[0], pixels)


# ---------------------------------------------------------------- by `fedivon predict`


def test_json_output(run: Path, npz: Path, fedivon: Command) -> None:
    ended = fedivon("predict", run, npz, "--json", "--samples", 8)
    assert (ended.code, ended.err) == (0, "")
    rows = json.loads(ended.out)
    assert [row["name"] for row in rows] == [str(i) for i in range(30)]
    p = np.array([row["probabilities"] for row in rows])
    assert p.shape == (30, 10)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-5)
    assert [row["class"] for row in rows] == p.argmax(1).tolist()
    entropies = -(p * np.log(np.maximum(p, 1e-12))).sum(1)
    np.testing.assert_allclose([row["entropy"] for row in rows], entropies, atol=1e-3)
    assert np.mean(p.argmax(1) == load("digits").test.y[:30]) > 0.6


def test_json_output_goes_by_the_seed(run: Path, npz: Path, fedivon: Command) -> None:
    words = ("predict", run, npz, "--json", "--samples", 3, "--seed")
    assert fedivon(*words, 1).out == fedivon(*words, 1).out != fedivon(*words, 2).out


def test_no_samples_predict_at_the_mean(run: Path, npz: Path, fedivon: Command) -> None:
    rows = json.loads(fedivon("predict", run, npz, "--json", "--samples", 0).out)
    expected = Trained.load(run).predict(load("digits").test.x[:30], 0).numpy()
    np.testing.assert_allclose([row["probabilities"] for row in rows], expected, atol=1e-5)


def test_a_wider_posterior_is_less_certain(run: Path, npz: Path, fedivon: Command) -> None:
    narrow, wide = (
        json.loads(fedivon("predict", run, npz, "--json", "--samples", 32, "--ess", ess).out) for ess in (1e6, 10)
    )
    assert sum(row["entropy"] for row in wide) > 2 * sum(row["entropy"] for row in narrow)
    refused = fedivon("predict", run, npz, "--ess", 0)
    assert (refused.code, refused.out) == (2, "")
    assert "--ess" in refused.err


def test_images_are_predicted_like_the_array(run: Path, npz: Path, tmp_path: Path, fedivon: Command) -> None:
    folder = tmp_path / "[images]"
    folder.mkdir()
    for i in range(30):
        Image.fromarray(load("digits").test.x[i, :, :, 0]).save(folder / f"{i:02d}.png")
    (folder / "notes.txt").write_text("no image")
    from_images = json.loads(fedivon("predict", run, folder, "--json", "--samples", 4).out)
    from_array = json.loads(fedivon("predict", run, npz, "--json", "--samples", 4).out)
    assert [row["name"] for row in from_images] == [f"{i:02d}.png" for i in range(30)]
    assert [row["probabilities"] for row in from_images] == [row["probabilities"] for row in from_array]
    (one,) = json.loads(fedivon("predict", run, folder / "07.png", "--json", "--samples", 0).out)
    assert one["name"] == "07.png"


def test_table(run: Path, npz: Path, fedivon: Command) -> None:
    ended = fedivon("predict", run, npz, "--limit", 7)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.count("│\n") == 7
    assert "and 23 more" in ended.out
    assert fedivon("predict", run, npz, "--limit", 0).out.count("│\n") == 30


def test_names_with_brackets_are_shown(run: Path, tmp_path: Path, fedivon: Command) -> None:
    Image.fromarray(load("digits").test.x[0, :, :, 0]).save(tmp_path / "a[bold]b.png")
    assert "a[bold]b.png" in fedivon("predict", run, tmp_path / "a[bold]b.png").out


IMAGES = np.zeros((4, 8, 8), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"x": IMAGES[:, :7]}, ("(4, 7, 8, 1)", "(N, 8, 8, 1)")),
        ({"x": IMAGES[:0]}, ("(0, 8, 8, 1)", "(N, 8, 8, 1)")),
        ({"x": IMAGES[0]}, ("(8, 8)", "(N, 8, 8, 1)")),
        ({"x": np.array(3, np.uint8)}, ("()", "(N, 8, 8, 1)")),
        ({"x": IMAGES.astype(np.float32)}, ("float32", "uint8")),
        ({"x": np.array([{}])}, ("cannot be read as .npz",)),
        ({"y": IMAGES}, ("no array named 'x'",)),
    ],
)
def test_wrong_arrays(
    run: Path, tmp_path: Path, fedivon: Command, arrays: dict[str, Any], named: tuple[str, ...]
) -> None:
    np.savez(tmp_path / "in.npz", **arrays)
    assert_refused(fedivon("predict", run, tmp_path / "in.npz"), "in.npz", *named)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 broken"])
def test_a_file_that_is_no_npz(run: Path, tmp_path: Path, fedivon: Command, content: bytes) -> None:
    (tmp_path / "in.npz").write_bytes(content)
    assert_refused(fedivon("predict", run, tmp_path / "in.npz"), "in.npz", "cannot be read as .npz")


def test_a_lone_array_is_no_npz(run: Path, tmp_path: Path, fedivon: Command) -> None:
    np.save(tmp_path / "in.npy", IMAGES)
    (tmp_path / "in.npy").rename(tmp_path / "in.npz")
    assert_refused(fedivon("predict", run, tmp_path / "in.npz"), "in.npz", "cannot be read as .npz")


def test_a_cut_off_npz(run: Path, npz: Path, fedivon: Command) -> None:
    npz.write_bytes(npz.read_bytes()[:400])
    assert_refused(fedivon("predict", run, npz), "in.npz", "cannot be read as .npz")


def test_wrong_images(run: Path, tmp_path: Path, fedivon: Command) -> None:
    Image.new("L", (9, 8)).save(tmp_path / "wide.png")
    assert_refused(fedivon("predict", run, tmp_path / "wide.png"), "wide.png", "9 by 8", "8 by 8")
    noise = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    for length in (0, 20, 50, 80):
        (tmp_path / "cut.png").write_bytes(whole[:length])
        assert_refused(fedivon("predict", run, tmp_path / "cut.png"), "cut.png", "cannot be read as an image")
    (tmp_path / "x.txt").write_text("hello")
    assert_refused(fedivon("predict", run, tmp_path / "x.txt"), "x.txt", "cannot be read as an image")
    (tmp_path / "empty").mkdir()
    assert_refused(fedivon("predict", run, tmp_path / "empty"), "empty", "no images", ".png")


def test_missing_files(run: Path, npz: Path, tmp_path: Path, fedivon: Command) -> None:
    assert_refused(fedivon("predict", run, tmp_path / "no.npz"), "no.npz", "There is no file")
    assert_refused(fedivon("predict", tmp_path / "no run", npz), "no run", "There is no file")
    assert_refused(fedivon("predict", tmp_path, npz), "posterior.safetensors", "There is no file")
    assert_refused(fedivon("predict", npz, npz), "in.npz", "is not a posterior")


def test_a_posterior_of_another_model(run: Path, npz: Path, tmp_path: Path, fedivon: Command) -> None:
    arrays, about = load_arrays(run / "posterior.safetensors")
    save_arrays(tmp_path / "odd.safetensors", arrays, {**about, "model": "nope"})
    assert_refused(fedivon("predict", tmp_path / "odd.safetensors", npz), "Unknown model 'nope'", "mlp")


def test_a_file_cannot_make_us_run_code(tmp_path: Path) -> None:
    """A model outside of this project is imported only when the user names it."""
    hostile = {"model": "os:system", "shape": [1, 8, 8], "classes": 10, "mean": [0.5], "std": [0.5]}
    save_arrays(tmp_path / "posterior.safetensors", {"mean/w": np.zeros(1, np.float32)}, hostile)
    with pytest.raises(UserError, match="--model os:system"):
        Trained.load(tmp_path)
    with pytest.raises(UserError, match="--model os:system"):
        Trained.load(tmp_path, "other:function")


# Personal posteriors


def site(path: Path, classes: tuple[int, ...] = (0, 1, 2), **changes: Any) -> Path:
    """A site that has digits of a few classes."""
    data = load("digits")
    arrays: dict[str, Any] = {}
    for part, split in (("train", data.train), ("test", data.test)):
        here = np.isin(split.y, classes)
        arrays |= {f"x_{part}": split.x[here], f"y_{part}": split.y[here]}
    np.savez(path, **(arrays | changes))
    return path


def test_a_site_gets_a_personal_posterior(fedivon: Command, run: Path, tmp_path: Path) -> None:
    own = site(tmp_path / "own.npz")
    ended = fedivon("personalize", run, own, "-o", tmp_path / "mine.safetensors", "--samples", 8)
    assert ended.code == 0, ended
    everybody, mine = Trained.load(run), Trained.load(tmp_path / "mine.safetensors")
    with np.load(own) as file:
        x, y = file["x_test"], torch.from_numpy(file["y_test"])
    before, after = (score(trained.predict(x, 8, 0), y).as_dict() for trained in (everybody, mine))
    assert after["nll"] < before["nll"]
    for scores in (before, after):
        assert f"{scores['nll']:.4f}" in ended.out
    kept = fedivon("predict", tmp_path / "mine.safetensors", own, "--samples", 2)
    assert kept.code == 0
    again = fedivon("personalize", run, own, "-o", tmp_path / "again.safetensors", "--samples", 8)
    assert again.out.replace("again", "mine") == ended.out
    settings = Settings.from_config(json.loads((run / "settings.json").read_text()))
    told = strategies.build(settings).personal_config()
    made = load_arrays(tmp_path / "mine.safetensors")[1]["personal"]  # as the clients of the run make theirs
    assert made["local-epochs"] == settings.local_epochs
    assert (made["lr"], made["temperature"]) == (told["lr"], told["temperature"])
    assert fedivon("personalize", run, own, "-o", tmp_path / "again.safetensors", "--epochs", 2).code == 0
    assert load_arrays(tmp_path / "again.safetensors")[1]["personal"] == made | {"local-epochs": 2}


def test_an_infinite_strength_keeps_the_global_posterior(fedivon: Command, run: Path, tmp_path: Path) -> None:
    words = ("-o", tmp_path / "same.safetensors", "--temperature", "inf", "--samples", 0)
    assert fedivon("personalize", run, site(tmp_path / "own.npz"), *words).code == 0
    one, other = Trained.load(run).posterior, Trained.load(tmp_path / "same.safetensors").posterior
    assert one is not None
    assert other is not None
    torch.testing.assert_close(one.mean, other.mean)
    torch.testing.assert_close(one.precision, other.precision)


def test_without_the_global_posterior_a_personal_one_has_no_width(fedivon: Command, run: Path, tmp_path: Path) -> None:
    own, point = site(tmp_path / "own.npz"), tmp_path / "point.safetensors"
    assert fedivon("personalize", run, own, "-o", point, "--temperature", 0).code == 0
    assert Trained.load(point).posterior is None
    assert fedivon("predict", point, own).code == 0
    assert_refused(fedivon("personalize", point, own), "point.safetensors", "without a width")


def test_what_does_not_fit_is_one_sentence(fedivon: Command, run: Path, fedavg_run: Path, tmp_path: Path) -> None:
    own = site(tmp_path / "own.npz")
    assert_refused(fedivon("personalize", fedavg_run, own), "'fedavg'", "FedIvon")
    assert_refused(fedivon("personalize", run, tmp_path / "nope.npz"), "There is no data file")
    high = site(tmp_path / "high.npz", y_test=np.full(np.isin(load("digits").test.y, (0, 1, 2)).sum(), 10))
    assert_refused(fedivon("personalize", run, high), "go up to 10", "0 to 9")
    wide = np.zeros((4, 9, 9), np.uint8)
    np.savez(tmp_path / "wide.npz", x_train=wide, x_test=wide, y_train=np.arange(4), y_test=np.arange(4))
    assert_refused(fedivon("personalize", run, tmp_path / "wide.npz"), "(1, 9, 9)", "(1, 8, 8)")
    for words in (("--temperature", "nan"), ("--lr", "nan"), ("--lr", "inf")):
        assert_refused(fedivon("personalize", run, own, *words), words[0], words[1], "must be numbers")
    for command in ("personalize", "predict"):
        large = fedivon(command, run, own, "--seed", 2**63)
        assert (large.code, "9223372036854775807" in large.err) == (2, True)
    between = finished(tmp_path / "between", "fedivon", **{"fedivon.personalise": "w2"})
    assert_refused(fedivon("personalize", between, own, "--temperature", 2), "--temperature", "'w2'")
    assert_refused(fedivon("personalize", run, own, "--lr", 1e39), "diverged", "--lr")
    ended = fedivon("personalize", run, own, "-o", tmp_path / "nope" / "file")
    assert ended.code == 2
    assert "cannot be written" in ended.err
