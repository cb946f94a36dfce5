"""Machines for a test: network namespaces joined by a bridge, or this machine's loopback where those are refused."""

import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

NETWORK = "10.77.0"


class Machines:
    """Names with an address each, on which programs can be started."""

    def __init__(self, names: Sequence[str], namespaces: bool) -> None:
        self.names, self.namespaces = list(names), namespaces

    def address(self, name: str) -> str:
        return f"{NETWORK}.{self.names.index(name) + 1}" if self.namespaces else "127.0.0.1"

    def on(self, name: str, command: Sequence[str]) -> list[str]:
        """A command as it is started on that machine."""
        return [*(["nsenter", f"--net=/run/netns/{space(name)}"] if self.namespaces else []), *command]

    def link(self, name: str, state: str) -> None:
        """Cut a machine's cable (``down``), or plug it in again (``up``)."""
        ip("-n", space("hub"), "link", "set", f"to-{name}", state)


def space(name: str) -> str:
    return f"fedivon-{os.getpid()}-{name}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def machines(names: Sequence[str]) -> Iterator[Machines]:
    """Machines that are gone afterwards; the host's own network is not touched."""
    made: list[str] = []
    try:
        try:
            for name in ("hub", *names):
                ip("netns", "add", space(name))
                made.append(name)
                ip("-n", space(name), "link", "set", "lo", "up")
            ip("-n", space("hub"), "link", "add", "bridge", "type", "bridge")
            ip("-n", space("hub"), "link", "set", "bridge", "up")
            for number, name in zip(itertools.count(1), names):
                ends = ("link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", space(name))
                ip("-n", space("hub"), *ends)
                ip("-n", space("hub"), "link", "set", f"to-{name}", "master", "bridge", "up")
                ip("-n", space(name), "address", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
                ip("-n", space(name), "link", "set", "eth0", "up")
            found = Machines(names, True)
        except (OSError, subprocess.CalledProcessError):  # not root, or a kernel without
            found = Machines(names, False)
        yield found
    finally:
        for name in made:
            ip("netns", "delete", space(name))
