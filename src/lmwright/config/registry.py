"""Registries: what a `kind` in a run file stands for, imported on demand; sections chosen so."""

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from importlib import import_module
from typing import Annotated, Any, Union

from pydantic import Field


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


Kinds = Mapping[str, Mapping[str, type]]
"""Dataclasses of the sections that come in kinds: by section, then by `kind`."""

OFFERED: ContextVar[Kinds] = ContextVar("OFFERED")
"""The kinds for which pydantic's schema of a run is being made."""


class Kind:
    """Marker for a section chosen by `kind`, or imported from a registry of one, `members`."""

    def __init__(self, section: str, members: Mapping[str, type] | None = None):
        self.section, self.members = section, members

    def classes(self, offered: Kinds) -> tuple[type, ...]:
        """The dataclasses of the section, of those that are offered unless it names its own."""
        return tuple((self.members or offered[self.section]).values())

    def __get_pydantic_core_schema__(self, _source: Any, handler: Any) -> Any:
        kinds = self.classes({} if self.members else OFFERED.get())
        union = kinds[0]
        if len(kinds) > 1:
            union = Annotated[Union[kinds], Field(discriminator="kind")]  # noqa: UP007
        return handler.generate_schema(union)
