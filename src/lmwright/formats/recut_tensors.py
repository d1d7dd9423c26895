"""Tensors that files cut along their rows otherwise than released ones: into other parts, or not at
all."""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from lmwright.errors import UserError
from lmwright.formats.safetensors import Tensors, described
from lmwright.models.hf.table import Fused


class RecutTensors(Tensors):
    """The parts of tensors that files may hold whole, or in parts of the same names with other
    rows; other tensors as they are. `renamed` has pieces of names for which there are others.
    Raises UserError for tensors with other rows than all their parts have."""

    def __init__(
        self, stored: Mapping[str, np.ndarray], parts: Fused, renamed: Mapping[str, str], where: str
    ):
        self._stored = stored
        self.not_taken = getattr(stored, "not_taken", ())
        self._sources: dict[str, tuple[tuple[str, ...], slice]] = {}
        endings = {own: whole for whole, each in parts.items() for own in (whole, *dict(each))}
        for name in stored:
            ending = next((ending for ending in endings if name.endswith(ending)), None)
            if ending is None:
                own = name
                for there, here in renamed.items():
                    own = own.replace(there, here)
                self._sources[own] = (name,), slice(None)
                continue
            base, whole = name.removesuffix(ending), endings[ending]
            self._cut(base, whole, parts[whole], where)
        super().__init__(self._sources)

    def _cut(self, base: str, whole: str, parts: tuple[tuple[str, int], ...], where: str) -> None:
        names = [base + whole] if base + whole in self._stored else [base + n for n, _ in parts]
        sources = tuple(name for name in names if name in self._stored)
        found, sizes = sum(self._rows(name) for name in sources), [rows for _, rows in parts]
        if found != sum(sizes):
            raise UserError(
                f"{where}: {' and '.join(sources)} have {found} rows, config.json implies "
                f"{sum(sizes)}; they do not belong to the same model"
            )
        ends = pairwise(np.cumsum([0, *sizes]).tolist())
        for (own, _), (start, stop) in zip(parts, ends, strict=True):
            self._sources[base + own] = sources, slice(start, stop)

    def _rows(self, name: str) -> int:
        return described(self._stored, name)[1][0]

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a tensor, which is not read."""
        sources, rows = self._sources[name]
        dtype, shape = described(self._stored, sources[0])
        return dtype, shape if rows == slice(None) else (rows.stop - rows.start, *shape[1:])

    def __getitem__(self, name: str) -> np.ndarray:
        sources, rows = self._sources[name]
        if rows == slice(None):
            return self._stored[sources[0]]
        return np.concatenate([self._stored[source] for source in sources])[rows]
