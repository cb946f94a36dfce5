"""The `fedivon` command: simulate, study, calibrate, data, predict, personalize, runs, deploy."""

import json
import signal
import sys
import tomllib
from enum import StrEnum
from math import isfinite, isnan
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.cli import PORT, Address, Insecure, ServerFolder, State, own_folder
from deploy.cli import app as deploy_app
from fedivon_flwr.errors import UserError
from fedivon_flwr.runs import new_path, read_json, read_metrics, runs_folder, write_json
from fedivon_flwr.settings import Settings

app = typer.Typer(
    help="Bayesian federated learning: FedIvon on Flower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # they may hold secrets, and go into logs
)
data_app = typer.Typer(
    help="Datasets: list, prepare, show who has what, cut into parts for nodes.", no_args_is_help=True
)
runs_app = typer.Typer(help="Runs: list, compare.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(runs_app, name="runs")
app.add_typer(deploy_app, name="deploy")
out = Console(markup=False)  # names of runs and files may hold brackets


class Engine(StrEnum):
    """What carries the messages."""

    RAY = "ray"
    FLWR = "flwr"


def main() -> None:
    """Run the command line; bad input ends with one sentence and exit code 2."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    sys.path.append(str(Path.cwd()))  # for model = "package.module:function"
    try:
        app()
    except UserError as error:
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


def parse_pair(text: str) -> tuple[str, Any]:
    """``key=value`` with a TOML value; a bare word is a string.

    >>> parse_pair("rounds=3"), parse_pair("fedivon.rule=lp"), parse_pair("device='cpu'")
    (('rounds', 3), ('fedivon.rule', 'lp'), ('device', 'cpu'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"'{text}' is not a setting; write key=value, e.g. rounds=50.")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = None
    return key.strip(), parsed if isinstance(parsed, str | int | float | bool) else value.strip()


def make_settings(preset: str, pairs: list[str], **overrides: Any) -> Settings:
    """A preset with what the command line changes; paths are made absolute."""
    from simulation.presets import preset_config, settings_of

    config = preset_config(preset) | dict(parse_pair(pair) for pair in pairs)
    config |= {key.replace("_", "-"): value for key, value in overrides.items() if value is not None}
    settings = settings_of(config)
    run_dir = Path(settings.run_dir).expanduser() if settings.run_dir else new_path(settings)
    return settings.model_copy(update={"run_dir": str(run_dir.resolve())})


@app.command()
def simulate(
    preset: Annotated[str, typer.Argument(help="Name of a preset, or a .toml file of settings.")] = "digits",
    set_: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a setting.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", "-m", help="Method; several are run in turn and compared.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    run_dir: Annotated[
        str | None, typer.Option(help="Folder of the run; an interrupted run there is continued.")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="ray: our engine; flwr: Flower's `flwr run`.")] = Engine.RAY,
    client_cpus: Annotated[float, typer.Option(min=0.0, help="CPUs of a virtual client.")] = 1.0,
    client_gpus: Annotated[
        float | None,
        typer.Option(min=0.0, help="GPUs of a virtual client, e.g. 0.25 (default: this machine's, shared)."),
    ] = None,
    ray_address: Annotated[str | None, typer.Option(help="Address of a running Ray cluster to join.")] = None,
) -> None:
    """Train with virtual clients and show the scores."""
    from simulation.engine import Resources, gpu_share
    from simulation.launch import check

    share = gpu_share(client_cpus) if client_gpus is None else client_gpus
    resources = Resources(client_cpus, share, ray_address)
    every = [
        make_settings(preset, set_ or [], method=m, seed=seed, rounds=rounds, run_dir=run_dir)
        for m in method or (None,)
    ]
    if len({settings.run_dir for settings in every}) < len(every):
        raise UserError("A run-dir is one run's folder; give one --method with it, and no method twice.")
    for settings in every:
        check(settings)
    for settings in every:
        if (Path(settings.run_dir) / "summary.json").exists():
            out.print(f"{settings.method}: this run is finished already", highlight=False)
        else:
            launch(settings, engine, resources)
    show_scores([Path(settings.run_dir) for settings in every])
    for settings in every:
        out.print(f"{settings.method}: {settings.run_dir}", highlight=False, soft_wrap=True)


@deploy_app.command("run")
def deploy_run(
    preset: Annotated[str, typer.Argument(help="Name of a preset, or a .toml file of settings.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a setting.")
    ] = None,
    run_dir: Annotated[
        str | None, typer.Option(help="Folder of the run; an interrupted run there is continued.")
    ] = None,
    credentials: ServerFolder = None,
    state: State = Path("federation"),
    superlink: Address = f"localhost:{PORT}",
    insecure: Insecure = False,
) -> None:
    """Train on the nodes that are connected, and show the scores; on the SuperLink's machine."""
    from deploy.programs import Security
    from fedivon_flwr.flower import HOME
    from simulation.launch import with_superlink
    from simulation.progress import Watch

    security = Security.of(credentials, insecure, ("ca.crt",), superlink)
    settings = make_settings(preset, set_ or [], run_dir=run_dir)
    with Watch(settings, out):
        with_superlink(settings, own_folder(state) / HOME, superlink, security.authority)
    show_scores([Path(settings.run_dir)])
    out.print(f"{settings.method}: {settings.run_dir}", highlight=False, soft_wrap=True)


@deploy_app.command("stop")
def deploy_stop(
    run_dir: Annotated[Path, typer.Argument(help="Folder of the run.", file_okay=False)],
    credentials: ServerFolder = None,
    state: State = Path("federation"),
    superlink: Address = f"localhost:{PORT}",
    insecure: Insecure = False,
) -> None:
    """Stop a run; `run` with the same --run-dir goes on from its last checkpoint."""
    from deploy.programs import Security
    from fedivon_flwr.flower import HOME
    from simulation.launch import stop_run

    security = Security.of(credentials, insecure, ("ca.crt",), superlink)
    stopped = stop_run(run_dir, own_folder(state) / HOME, superlink, security.authority)
    out.print(f"{run_dir}: {'stopped' if stopped else 'had ended already'}", highlight=False, soft_wrap=True)


@app.command()
def study(
    name: Annotated[str | None, typer.Argument(help="Name of a study, or a .toml file; none lists them.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small form of a few minutes, on bundled data.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a setting of all runs.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Do only these runs now, e.g. '*-100-*'; several are possible."),
    ] = None,
    results: Annotated[Path | None, typer.Option(help="Where the results go (default: results/NAME).")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time (default: one for each CPU, or one on a GPU).")
    ] = None,
    background: Annotated[bool, typer.Option("--background", help="Go on after the terminal is closed.")] = False,
) -> None:
    """Run a table or figure of the paper: all its runs, then the table and the figures."""
    from simulation.studies.runner import Results, default_jobs, detach, run_study
    from simulation.studies.spec import known_studies, load_study

    if name is None:
        table = Table("study", "what it shows")
        for known in known_studies():
            table.add_row(known, load_study(known).title)
        out.print(table)
        return
    described = load_study(name, quick, dict(parse_pair(pair) for pair in set_ or []))
    found = Results(described, (results or Path("results") / described.name).resolve(), only or ())
    if background:
        detach(found, out)
        return
    failed = run_study(found, jobs or default_jobs(), out)
    out.print((found.folder / "README.md").read_text(), highlight=False, soft_wrap=True)
    out.print(f"{described.name}: {found.folder}", highlight=False, soft_wrap=True)
    if failed:
        logs = ", ".join(str(found.log(job)) for job in failed)
        raise UserError(
            f"{len(failed)} of {len(found.wanted)} runs failed, see {logs}; the same command tries them again."
        )


def launch(settings: Settings, engine: Engine, resources: Any) -> None:
    """Run one simulation with a live line of progress."""
    from simulation.launch import with_flwr, with_ray
    from simulation.progress import Watch

    with Watch(settings, out):
        (with_flwr if engine is Engine.FLWR else with_ray)(settings, resources)


def show_scores(folders: list[Path], names: list[str] | None = None) -> None:
    """A table of the scores of finished runs, by their names where these tell them apart."""
    from simulation.report import SCORES, number, rows_of

    summaries = [read_json(folder / "summary.json") for folder in folders]
    table = Table(title=", ".join(sorted({describe(summary) for summary in summaries})))
    for _ in ("run", "method") if names else ("method",):
        table.add_column("")
    for label in SCORES.values():
        table.add_column(label, justify="right")
    for name, summary in zip(names or [""] * len(summaries), summaries, strict=True):
        for label, scores in rows_of(summary):
            table.add_row(*([name] if name else []), label, *(number(scores[key]) for key in SCORES))
    out.print(table)


def describe(summary: dict[str, Any]) -> str:
    """What a run was, without its method."""
    return f"{Path(summary['dataset']).stem}: {summary['rounds']} rounds, {summary['clients']} clients"


@data_app.command("list")
def data_list() -> None:
    """The datasets by name."""
    from fedivon_flwr.data import DATASETS

    table = Table("name", "classes", "channels", "comes from")
    for name in DATASETS:
        spec = DATASETS[name]
        where = "an installed package (no download)" if spec.bundled else "NAME.npz in FEDIVON_DATA, or torchvision"
        table.add_row(name, str(spec.classes), str(len(spec.mean)), where)
    out.print(table)


@data_app.command("prepare")
def data_prepare(names: Annotated[list[str], typer.Argument(help="Names, or .npz files.")]) -> None:
    """Download or convert datasets into the memory-mapped cache."""
    from fedivon_flwr.data import load

    for name in names:
        dataset = load(name)
        sizes = f"{len(dataset.train)} training and {len(dataset.test)} test examples"
        out.print(f"{name}: {sizes} of shape {dataset.shape}", highlight=False, soft_wrap=True)


@data_app.command("show")
def data_show(
    preset: Annotated[str, typer.Argument(help="Name of a preset, or a .toml file.")] = "digits",
    set_: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a setting.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Picture to write (.png or .svg).")] = Path(
        "partition.png"
    ),
) -> None:
    """Show who has what: the partition of a preset as a picture."""
    from simulation.plots import save_figure
    from simulation.report import who_has_what

    if output.suffix not in (".png", ".svg"):
        raise UserError(f"The picture '{output}' must end in .png or .svg.")
    settings = make_settings(preset, set_ or [])
    counts, figure = who_has_what(settings)
    sizes = counts.sum(1)
    try:
        save_figure(figure, output)
    except OSError as error:
        raise UserError(f"The picture '{output}' cannot be written ({error.strerror}).") from None
    out.print(
        f"{len(counts)} clients with {sizes.min()} to {sizes.max()} examples ({sizes.sum()} in all), "
        f"{(counts > 0).sum(1).min()} to {(counts > 0).sum(1).max()} classes each: {output}",
        highlight=False,
        soft_wrap=True,
    )


@data_app.command("parts")
def data_parts(
    folder: Annotated[Path, typer.Argument(help="Where the files go.", file_okay=False)],
    preset: Annotated[str, typer.Argument(help="Name of a preset, or a .toml file.")] = "digits",
    set_: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a setting.")
    ] = None,
) -> None:
    """Cut a dataset into files for real nodes, one a client; prints the settings that a run on them needs."""
    import tomli_w

    from deploy.parts import common, export_parts

    settings = make_settings(preset, set_ or [])
    export_parts(settings, folder)
    out.print(tomli_w.dumps(common(settings)), end="", highlight=False, soft_wrap=True)


@app.command()
def calibrate(
    run: Annotated[Path, typer.Argument(help="A run's folder, finished or not.")],
    ess: Annotated[list[float], typer.Option(help="Effective sample sizes λ to try.")],
    prior_precision: Annotated[
        list[float] | None, typer.Option(help="Prior precisions; else the run's, in proportion to λ.")
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Training images that no client holds.")] = 2000,
    samples: Annotated[int, typer.Option(min=1, help="Weight samples.")] = 16,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file to write.")] = None,
    model: Annotated[str | None, typer.Option(help="package.module:function of a model that you trust.")] = None,
) -> None:
    """Try other widths of a posterior, λ h + prior, on training images that no client holds."""
    from simulation.calibration import calibrate as scores_of
    from simulation.report import SCORES, number

    priors = prior_precision or []
    if bad := [value for value in (*ess, *priors) if not 0 < value < float("inf")]:
        raise UserError(f"The value {bad[0]:g} of --ess or --prior-precision must be positive.")
    found = scores_of(run, ess, priors, examples, samples, trusted=model)
    table = Table("λ", "prior", *SCORES.values(), title=f"{found['method']} after round {found['round']}")
    table.add_row("at the mean", "", *(number(found["mean"][key]) for key in SCORES))
    for row in found["grid"]:
        table.add_row(f"{row['ess']:g}", f"{row['prior_precision']:g}", *(number(row[key]) for key in SCORES))
    out.print(table)
    if output is not None:
        try:
            write_json(output, found)
        except OSError as error:
            raise UserError(f"The file '{output}' cannot be written ({error.strerror}).") from None


@app.command()
def predict(
    posterior: Annotated[Path, typer.Argument(help="A run's folder or its posterior.safetensors.")],
    inputs: Annotated[Path, typer.Argument(help="An .npz with an array x, an image, or a folder of images.")],
    samples: Annotated[int, typer.Option(min=0, help="Weight samples; 0 predicts at the mean.")] = 64,
    ess: Annotated[float | None, typer.Option(min=1e-6, help="λ of the posterior; else the run's.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the weight samples.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="All probabilities as JSON instead of a table.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Rows of the table; 0 for all.")] = 20,
    model: Annotated[str | None, typer.Option(help="package.module:function of a model that you trust.")] = None,
) -> None:
    """Class probabilities and predictive entropy (in nats) of a trained posterior."""
    from fedivon_flwr.metrics import entropy
    from fedivon_flwr.trained import Trained, read_inputs

    trained = Trained.load(posterior, model, ess)
    names, x = read_inputs(inputs, trained.inputs.shape)
    probabilities = trained.predict(x, samples, seed)
    uncertainty = entropy(probabilities)
    if as_json:
        rows = [
            {
                "name": name,
                "class": int(p.argmax()),
                "entropy": float(u),
                "probabilities": [round(float(v), 6) for v in p],
            }
            for name, p, u in zip(names, probabilities, uncertainty, strict=True)
        ]
        typer.echo(json.dumps(rows))
        return
    table = Table("input", "class", "probability", "entropy")
    for i in range(len(names) if limit == 0 else min(limit, len(names))):
        best = int(probabilities[i].argmax())
        table.add_row(names[i], str(best), f"{probabilities[i, best]:.3f}", f"{uncertainty[i]:.3f}")
    out.print(table)
    if limit and len(names) > limit:
        out.print(f"… and {len(names) - limit} more (--limit 0 shows all)", highlight=False)


@app.command()
def personalize(
    posterior: Annotated[Path, typer.Argument(help="A run's folder or its posterior.safetensors (of FedIvon).")],
    data: Annotated[
        Path, typer.Argument(help="The site's .npz (x_train, y_train, maybe x_test, y_test) or folder of images.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The personal posterior to write.")] = Path(
        "personal.safetensors"
    ),
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="β, strength of the global posterior as prior (default: the run's).")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data (default: the run's).")] = None,
    lr: Annotated[float | None, typer.Option(min=1e-9, help="Learning rate (default: the run's).")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Examples in a step (default: the run's).")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Weight samples for the scores; 0 predicts at the mean.")] = 64,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of batches and noise.")] = 0,
    model: Annotated[str | None, typer.Option(help="package.module:function of a model that you trust.")] = None,
) -> None:
    """Make a site's personal posterior from a global one, which is its prior; `fedivon predict` takes either."""
    import numpy as np
    import torch

    import strategies
    from clients.base import LocalData
    from clients.fedivon import personal_arrays
    from fedivon_flwr.data import load
    from fedivon_flwr.metrics import score
    from fedivon_flwr.runs import load_arrays, save_arrays
    from fedivon_flwr.trained import Trained, posterior_file
    from simulation.report import SCORES, number
    from strategies.base import unusable

    trained, (arrays, about) = Trained.load(posterior, model), load_arrays(posterior_file(posterior))
    if about["method"] != "fedivon":
        raise UserError(f"'{posterior}' is of the method '{about['method']}' but must be a posterior of FedIvon.")
    dataset, settings = trained.inputs.fit(load(str(data.resolve()))), Settings.from_config(about["settings"])
    strategy = strategies.build(settings)
    strategy.load_state(about)
    config = {
        **strategy.personal_config(),
        "local-epochs": settings.personal_epochs or settings.local_epochs,
        "batch-size": settings.batch_size,
        "seed": seed,
    }
    if temperature is not None and config["personalise"] != "prior":
        raise UserError(
            f"--temperature is the strength of a prior, but the run makes personal models by fedivon.personalise = "
            f"'{config['personalise']}', which has none; leave it out."
        )
    chosen = {"temperature": temperature, "local-epochs": epochs, "batch-size": batch_size, "lr": lr}
    config |= {key: value for key, value in chosen.items() if value is not None}
    if isnan(config["temperature"]) or not isfinite(config["lr"]):
        raise UserError(f"--lr {config['lr']:g} --temperature {config['temperature']:g}: both must be numbers.")
    if trained.posterior is None:
        raise UserError(f"'{posterior}' was made with --temperature 0, without a width; it cannot be a prior.")
    found = personal_arrays(trained.model, arrays, LocalData.whole(dataset), config)
    if reason := unusable(found):
        raise UserError(f"The training diverged: {reason}; use a lower --lr.")
    made = {"examples": len(dataset.train), **{key: config[key] for key in (*chosen, "seed")}}
    try:
        save_arrays(output, found, {**about, "personal": made})
    except OSError as error:
        raise UserError(f"The file '{output}' cannot be written ({error.strerror}).") from None
    if len(dataset.test):
        table = Table("", *SCORES.values(), title=f"on the {len(dataset.test)} test examples of {data.name}")
        labels = torch.from_numpy(np.array(dataset.test.y))
        for name, path in (("global", posterior), ("personal", output)):
            scores = score(Trained.load(path, model).predict(dataset.test.x, samples, seed), labels).as_dict()
            table.add_row(name, *(number(scores[key]) for key in SCORES))
        out.print(table)
    out.print(f"personal posterior: {output}", highlight=False, soft_wrap=True)


@runs_app.command("list")
def runs_list(
    folder: Annotated[Path | None, typer.Argument(help="Where the runs are (default: runs/).")] = None,
) -> None:
    """All runs with their state and accuracy."""
    from simulation.report import number

    table = Table("run", "method", "data", "seed", "rounds", "accuracy", "ECE")
    for path in run_folders(folder or runs_folder()):
        config, summary = read_json(path / "settings.json"), read_json(path / "summary.json")
        rows = list(read_metrics(path))
        done = rows[-1]["round"] if rows else 0
        scores = (summary or {}).get("metrics", {})
        last = scores.get("mc") or scores.get("mean") or {}
        state = f"{config['rounds']}" if summary else f"{done} of {config['rounds']}"
        cells = [number(last.get(key)) for key in ("accuracy", "ece")]
        table.add_row(path.name, config["method"], Path(config["dataset"]).stem, str(config["seed"]), state, *cells)
    out.print(table)


@runs_app.command("compare")
def runs_compare(folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")]) -> None:
    """The scores of runs side by side, and the settings in which they differ."""
    summaries = {}
    for folder in folders:
        if (summary := read_json(folder / "summary.json")) is None:
            raise UserError(f"The folder '{folder}' holds no finished run.")
        name = folder.resolve().name
        summaries[name if name not in summaries else str(folder)] = summary
    show_scores(folders, list(summaries))
    keys = sorted({key for summary in summaries.values() for key in summary["settings"]} - {"run-dir"})
    table = Table("setting", *summaries)
    for key in keys:
        values = [summary["settings"].get(key) for summary in summaries.values()]
        if len(set(values)) > 1:
            table.add_row(key, *("-" if value is None else str(value) for value in values))
    if table.row_count:
        out.print(table)


def run_folders(folder: Path) -> list[Path]:
    """The runs below a folder."""
    if not folder.is_dir():
        raise UserError(f"There is no folder '{folder}' with runs; `fedivon simulate` makes one.")
    return sorted(path.parent for path in folder.glob("*/settings.json"))
