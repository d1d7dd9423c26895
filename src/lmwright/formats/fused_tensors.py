"""Tensors of a checkpoint in which several matrices are one, under the names of each alone."""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from lmwright.errors import UserError
from lmwright.formats.safetensors import Tensors, described

Parts = Mapping[str, tuple[tuple[str, int], ...]]
"""Parts of a fused tensor by the ending of its name: their endings and rows, in order."""


class FusedTensors(Tensors):
    """Parts of fused tensors, each read when it is asked for; other tensors as they are. Raises
    UserError for a fused tensor with other rows than its parts have."""

    def __init__(self, stored: Mapping[str, np.ndarray], parts: Parts, where: str):
        self._stored = stored
        self._part_of: dict[str, tuple[str, slice]] = {}
        super().__init__(self._part_of)
        for name in stored:
            ending = next((ending for ending in parts if name.endswith(ending)), None)
            if ending is None:
                self._part_of[name] = name, slice(None)
                continue
            sizes = [rows for _, rows in parts[ending]]
            if (found := described(stored, name)[1][0]) != sum(sizes):
                raise UserError(
                    f"{where}: {name} has {found} rows, config.json implies {sum(sizes)}; they are "
                    "not of one model"
                )
            ends = pairwise(np.cumsum([0, *sizes]).tolist())
            for (own, _), (start, stop) in zip(parts[ending], ends, strict=True):
                self._part_of[name.removesuffix(ending) + own] = name, slice(start, stop)

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a tensor, which is not read."""
        source, rows = self._part_of[name]
        dtype, (first, *rest) = described(self._stored, source)
        return dtype, (len(range(*rows.indices(first))), *rest)

    def __getitem__(self, name: str) -> np.ndarray:
        source, rows = self._part_of[name]
        return self._stored[source][rows]
