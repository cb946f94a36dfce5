"""``fedivon deploy``: credentials, the programs on the machines, registration of nodes, and runs."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedivon_flwr.errors import UserError

app = typer.Typer(help="Real federations: SuperLink and SuperNodes on machines of their own.", no_args_is_help=True)
out = Console(markup=False, highlight=False, soft_wrap=True)

PORT, OUTER_PORT, NODE_PORT = 8000, 9443, 9094  # Flower's own, and the proxy's
ServerFolder = Annotated[
    Path | None, typer.Option("--credentials", "-c", help="Folder 'server' of the credentials.", file_okay=False)
]
Insecure = Annotated[bool, typer.Option("--insecure", help="No encryption; for this machine only.")]
State = Annotated[Path, typer.Option(help="Folder that must survive a restart.", file_okay=False)]


def host_and_port(address: str) -> str:
    """An address that Flower's programs and nginx take."""
    host, _, port = address.rpartition(":")
    named = re.fullmatch(r"[A-Za-z0-9][\w.-]*|\[[0-9A-Fa-f:.]+\]", host)
    if not named or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"The address '{address}' of the SuperLink must be HOST:PORT, e.g. link.example.org:9443.")
    return address


Address = Annotated[str, typer.Option(help="HOST:PORT of the SuperLink, seen from here.", callback=host_and_port)]


@app.command()
def credentials(
    folder: Annotated[Path, typer.Argument(help="Where they go; what is there is kept.", file_okay=False)],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address by which nodes reach the server; several are possible.")
    ] = None,
    node: Annotated[list[str] | None, typer.Option(help="Name of a node; several are possible.")] = None,
) -> None:
    """Make certificates and keys of a federation, and say what to copy where."""
    from deploy.credentials import make_credentials

    made = make_credentials(folder, host or [], node or [])
    out.print(f"SuperLink's machine: copy {made.server}/")
    for name in sorted(path.name for path in (folder / "nodes").glob("*")):
        out.print(f"machine of node {name}: copy {made.node(name)}/")
    out.print(f"nowhere: {folder / 'ca.key'} can let anybody in; keep it offline.")
    out.print("Private keys (*.key) are readable by you only; keep them so, e.g. with `scp -rp`.")


@app.command()
def superlink(
    credentials: ServerFolder = None,
    state: State = Path("federation"),
    host: Annotated[str, typer.Option(help="Address to listen on; the proxy is for other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = PORT,
    insecure: Insecure = False,
) -> None:
    """Carry the messages of the federation; on its machine, with superexec and proxy."""
    from deploy.programs import SERVER_FILES, Security, is_local
    from deploy.programs import superlink as command

    security = Security.of(credentials, insecure, SERVER_FILES, host)
    if not is_local(host):
        out.print(f"Whoever reaches {host}:{port} can submit runs; let nobody but the proxy.")
    run_program(command(security, own_folder(state), host, port), state)


@app.command()
def superexec(
    credentials: ServerFolder = None,
    state: State = Path("federation"),
    superlink: Address = f"localhost:{PORT}",
    insecure: Insecure = False,
) -> None:
    """Run the server's part of training; beside the SuperLink, in a process of its own."""
    from deploy.programs import Security
    from deploy.programs import superexec as command

    run_program(command(Security.of(credentials, insecure, ("ca.crt",), superlink), superlink), state)


@app.command()
def proxy(
    credentials: ServerFolder = None,
    state: State = Path("federation"),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to which nodes connect.")] = OUTER_PORT,
    superlink: Address = f"127.0.0.1:{PORT}",
) -> None:
    """Let nodes in from other machines, and nothing but nodes."""
    from deploy.programs import SERVER_FILES, Security
    from deploy.programs import proxy as command

    security = Security.of(credentials, None, SERVER_FILES)
    run_program(command(security, own_folder(state) / "proxy", port, superlink), state)


@app.command()
def supernode(
    superlink: Annotated[str, typer.Option(help="HOST:PORT by which the server is reached.", callback=host_and_port)],
    credentials: Annotated[
        Path | None, typer.Option("--credentials", "-c", help="This node's folder of the credentials.", file_okay=False)
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The node's data: an .npz file or a folder of images.")] = None,
    number: Annotated[
        int | None, typer.Option(min=0, help="The node's number: with the seed it decides batches and noise.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes, for parts of a public dataset.")] = None,
    state: State = Path("node"),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port for the node's own processes.")] = NODE_PORT,
    insecure: Insecure = False,
) -> None:
    """Take part in the federation with the data of this machine."""
    from deploy.programs import NODE_FILES, Security
    from deploy.programs import supernode as command

    security = Security.of(credentials, insecure, NODE_FILES, superlink)
    if data is not None:
        prepare(data, state)
    known = {
        "data": None if data is None else str(data.resolve()),
        "partition-id": number,
        "num-partitions": nodes,
        "state-dir": str(private(own_folder(state) / "memory")),
    }
    node = {key: value for key, value in known.items() if value is not None}
    run_program(command(security, superlink, node, port), state)


@app.command()
def register(
    credentials: ServerFolder = None,
    state: State = Path("federation"),
    superlink: Address = f"localhost:{PORT}",
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the SuperLink.")] = 60.0,
) -> None:
    """Let the SuperLink know the nodes' keys; again when there are new ones."""
    from deploy.nodes import register as let_in
    from deploy.programs import Security
    from fedivon_flwr.flower import HOME, connect

    security = Security.of(credentials, None, ("ca.crt",))
    keys = sorted(Path(security.path("nodes")).glob("*.pub"))
    if not keys:
        raise UserError(f"The folder '{credentials}' has no keys of nodes (nodes/*.pub).")
    folder, give_up = own_folder(state), time.monotonic() + wait
    connect(folder / HOME, superlink, security.authority)
    for key in keys:
        out.print(f"{key.stem}: {let_in(key, folder, give_up)}")


@app.command()
def unregister(
    node: Annotated[str, typer.Argument(help="Name of the node.")],
    credentials: ServerFolder = None,
    state: State = Path("federation"),
    superlink: Address = f"localhost:{PORT}",
) -> None:
    """Shut a node out, e.g. because its key was lost; a run goes on without it."""
    from deploy.nodes import unregister as shut_out
    from deploy.programs import Security
    from fedivon_flwr.flower import HOME, connect

    security = Security.of(credentials, None, ("ca.crt",))
    folder = own_folder(state)
    connect(folder / HOME, superlink, security.authority)
    shut_out(node, Path(security.path("")), folder)
    out.print(f"{node}: shut out; its key is deleted here")


def run_program(command: list[str], state: Path) -> None:
    """Run one of Flower's programs until we are told to stop."""
    from deploy.programs import supervise
    from fedivon_flwr.flower import HOME, environment

    home = private(own_folder(state) / HOME)
    sys.exit(supervise(command, environment(str(home)) | own_cache(state), out.print))


def prepare(data: Path, state: Path) -> None:
    """Bring a node's data into the form in which they are mapped, before a round waits for that; or say what is wrong.

    In a process of its own, so that this one, which only waits afterwards, stays small.
    """
    if not os.access(data, os.R_OK):
        raise UserError(f"There are no data '{data}' that you may read; give an .npz file or a folder of images.")
    command = [sys.executable, "-m", "fedivon_flwr", "data", "prepare", str(data.resolve())]
    if code := subprocess.run(command, env=os.environ | own_cache(state), check=False).returncode:
        sys.exit(code)


def own_cache(state: Path) -> dict[str, str]:
    """Prepared data lie beside the other things of a program; they are as private as the data themselves."""
    return {"FEDIVON_CACHE": os.environ.get("FEDIVON_CACHE") or str(private(own_folder(state) / "cache"))}


def private(path: Path) -> Path:
    """A folder that nobody else may look into, wherever it is."""
    path.mkdir(exist_ok=True)
    path.chmod(0o700)
    return path


def own_folder(path: Path) -> Path:
    """A folder that is there, and whose content is the owner's."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(f"The folder '{path}' cannot be made ({error.strerror}); use another --state.") from None
    if not os.access(path, os.W_OK):
        raise UserError(f"The folder '{path}' cannot be written to; use another --state.")
    return path.resolve()
