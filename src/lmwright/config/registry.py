"""Registries: the dataclasses of a section by `kind`, each imported on demand."""

from collections.abc import Iterator, Mapping
from importlib import import_module


class Registry(Mapping[str, type]):
    """`kind` -> dataclass. The members are modules of the registry's own package, as in
    `Registry(__name__, {"llama": "llama.Llama"})`, so that none of them is imported in vain."""

    def __init__(self, package: str, members: Mapping[str, str]):
        self._package, self._members = package, dict(members)

    def __getitem__(self, kind: str) -> type:
        module, _, name = self._members[kind].rpartition(".")
        return getattr(import_module(f"{self._package}.{module}"), name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)
