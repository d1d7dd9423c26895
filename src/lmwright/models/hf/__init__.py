"""The registry of the families' tables in Hugging Face, of which a family may have none yet."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmwright.config.registry import Registry
from lmwright.errors import UserError
from lmwright.models import CLASSES


class Tables(Registry):
    """`kind` -> class of the table; the kinds are those whose table is written."""

    def __getitem__(self, kind: str) -> Any:
        """The table of a family. Raises UserError where none is written."""
        if not self._written(kind):
            file = Path(__file__).with_name(f"{self._module(kind)}.py")
            raise UserError(
                f"model.kind: {kind!r} has no table of its names in Hugging Face, which this "
                f"needs; write {file} (docs/internals/add-a-family.md)"
            )
        return super().__getitem__(kind)

    def __iter__(self) -> Iterator[str]:
        return filter(self._written, super().__iter__())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _module(self, kind: str) -> str:
        return self._members[kind].partition(".")[0]

    def _written(self, kind: str) -> bool:
        return find_spec(f"{__name__}.{self._module(kind)}") is not None


TABLES = Tables(__name__, {kind: f"{name}Hf" for kind, name in CLASSES.items()})
