"""Things by name: a function or class is added to a registry by decorating it."""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Generic, TypeVar

from fedivon_flwr.errors import UserError

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Named things of one kind; looking up an unknown name lists the known ones.

    >>> shapes: Registry[str] = Registry("shape")
    >>> shapes.add("round")("ball")
    'ball'
    >>> shapes["round"]
    'ball'
    >>> shapes["square"]
    Traceback (most recent call last):
    fedivon_flwr.errors.UserError: Unknown shape 'square'; choose one of: round.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._things: dict[str, T] = {}

    def add(self, name: str) -> Callable[[T], T]:
        """Register the decorated thing under a name."""

        def register(thing: T) -> T:
            if name in self._things:
                raise ValueError(f"{self.kind} '{name}' is registered twice")
            self._things[name] = thing
            return thing

        return register

    def __getitem__(self, name: str) -> T:
        if name not in self._things:
            raise UserError(unknown(self.kind, name, self._things))
        return self._things[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)


class Plugins(Generic[T]):
    """Classes by the name of the file they are in: a file with a subclass of `base` in a package is a plugin."""

    def __init__(self, kind: str, package: str, base: T) -> None:
        self.kind, self.package, self.base = kind, package, base

    def names(self) -> list[str]:
        """The files of the package that stand for a method, found without importing them all."""
        path = import_module(self.package).__path__
        return sorted(m.name for m in pkgutil.iter_modules(path) if m.name not in ("base", "aggregation"))

    def __getitem__(self, name: str) -> T:
        if name not in self.names():
            raise UserError(unknown(self.kind, name, self.names()))
        module = import_module(f"{self.package}.{name}")
        classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
        for found in classes:
            if issubclass(found, self.base):  # type: ignore[arg-type]
                return found  # type: ignore[return-value]
        raise UserError(f"The file {self.package}/{name}.py has no subclass of {self.base.__name__}.")  # type: ignore[attr-defined]


def unknown(kind: str, name: str, known: Mapping[str, object] | list[str]) -> str:
    """Say that a name is not known, and which ones are."""
    return f"Unknown {kind} '{name}'; choose one of: {', '.join(sorted(known))}."
