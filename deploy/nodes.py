"""Which nodes the SuperLink lets in: their keys are registered under a name, and struck off by it."""

import time
from pathlib import Path

from fedivon_flwr.errors import UserError
from fedivon_flwr.flower import CONNECTION, HOME, ask
from fedivon_flwr.runs import read_json, write_json

FILE = "nodes.json"
RETRY_SECONDS = 1.0


def register(key: Path, state: Path, give_up: float) -> str:
    """Let the node in that has a public key, and say what became of it; the SuperLink may be starting until `give_up`.

    Flower does not forget a key that was shut out, and then knows it "already".
    """
    while True:
        said = ask(state / HOME, "supernode", "register", str(key), CONNECTION, "--name", key.stem)
        if said["success"]:
            write_json(state / FILE, {**numbers(state), key.stem: said["node-id"]})
            return "registered"
        if "already" in said["error-message"]:
            shut_out = numbers(state).get(key.stem, 0) is None
            return "was shut out, and needs a new key" if shut_out else "is registered already"
        if time.monotonic() > give_up:
            raise UserError(f"The node {key.stem} could not be registered: {said['error-message']}")
        time.sleep(RETRY_SECONDS)


def unregister(name: str, server: Path, state: Path) -> None:
    """Shut a node out for good: its key is gone from the SuperLink and from the server's folder of credentials."""
    known = numbers(state)
    if (number := known.get(name)) is None:
        there = ", ".join(each for each, number in known.items() if number is not None) or "none"
        raise UserError(f"No node '{name}' has been registered from here; there are: {there}.")
    said = ask(state / HOME, "supernode", "unregister", str(number), CONNECTION)
    if not said["success"]:
        raise UserError(f"The node {name} could not be shut out: {said['error-message']}")
    write_json(state / FILE, {**known, name: None})
    key = server / "nodes" / f"{name}.pub"
    try:
        key.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"The node {name} is shut out, but '{key}' cannot be deleted ({error.strerror}).") from None


def numbers(state: Path) -> dict[str, int | None]:
    """The numbers that Flower gave to the nodes, which it lists without their names; None for who was shut out."""
    return read_json(state / FILE) or {}
