"""The `fedivon` command in tests."""

from collections.abc import Callable
from typing import NamedTuple


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Ended]


def assert_refused(ended: Ended, *named: str) -> None:
    """Bad input: exit code 2, nothing but one sentence, which names what is wrong."""
    assert ended.code == 2, ended
    assert ended.out == ""
    assert ended.err.startswith("Error: ")
    assert ended.err.count("\n") == 1
    assert ended.err.endswith(".\n")
    assert all(part in ended.err for part in named), ended.err
