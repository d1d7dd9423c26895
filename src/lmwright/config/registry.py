"""Registries: what a `kind` in a run file stands for, imported on demand."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any


class Registry(Mapping[str, Any]):
    """`kind` -> a module of the registry's own package, or a class in one, as in
    `Registry(__name__, {"llama": "llama.Llama"})`; each is imported on first use."""

    def __init__(self, package: str, members: Mapping[str, str]):
        self._package, self._members = package, dict(members)

    def __getitem__(self, kind: str) -> Any:
        module, _, name = self._members[kind].partition(".")
        imported = import_module(f"{self._package}.{module}")
        return getattr(imported, name) if name else imported

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)
