"""Weights in float8 with a scale for each block, as DeepSeek-V3, Kimi K2 and others release them,
or with one for the whole, as Ministral 3 and Devstral Small 2.

    X.weight             float8_e4m3fn [out, in]
    X.weight_scale_inv   float32 [out / rows, in / columns], rounded up: a factor for each block;
                         [] or [1] for the whole
    X.activation_scale   a factor by which a server rounds inputs, which no training does

https://huggingface.co/docs/transformers/quantization/finegrained_fp8
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lmwright.errors import UserError
from lmwright.formats.safetensors import FLOAT8, Tensors, described

SCALE = "_scale_inv"  # behind the name of a weight
OF_INPUTS = ".activation_scale"


def is_float8(config: Mapping[str, Any]) -> bool:
    """True for a config.json of weights in float8."""
    said = config.get("quantization_config")
    return isinstance(said, dict) and said.get("quant_method") == "fp8"


class Float8Blocks(Tensors):
    """The tensors of such a folder, as the floats that they stand for. Raises UserError for scales
    of other than blocks or whole tensors."""

    def __init__(self, stored: Mapping[str, np.ndarray], config: Mapping[str, Any], where: str):
        self._stored, self._where = stored, Path(where).parent
        said = config["quantization_config"]
        block = said.get("weight_block_size")
        sizes = isinstance(block, list) and len(block) == 2 and all(type(n) is int for n in block)
        known = block is None or (sizes and min(block) > 0)
        if not known or said.get("fmt", "e4m3") != "e4m3":
            raise UserError(
                f"{where}: quantization_config is not float8 (e4m3) with a scale for each block of "
                "weight_block_size or for each tensor, the only form that is read; start from the "
                "unquantized model instead"
            )
        self._block: tuple[int, ...] | None = tuple(block) if block else None
        self._scaled = {name for name in stored if f"{name}{SCALE}" in stored}
        super().__init__([name for name in stored if not name.endswith((SCALE, OF_INPUTS))])

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a tensor as floats. Raises UserError for a scale that is missing or
        does not fit."""
        dtype, shape = described(self._stored, name)
        if name not in self._scaled:
            if dtype == FLOAT8:
                raise UserError(f"{self._where}: lacks {name}{SCALE}; download the folder again")
            return dtype, shape
        wanted: tuple[tuple[int, ...], ...] = (), (1,)
        if self._block:
            pairs = zip(shape, self._block, strict=False)
            wanted = (tuple(-(-size // block) for size, block in pairs),)
        found = described(self._stored, f"{name}{SCALE}")[1]
        if dtype != FLOAT8 or len(shape) != 2 or found not in wanted:
            raise UserError(
                f"{self._where}: {name} and {name}{SCALE} do not agree; download the folder again"
            )
        return "float32", shape

    def __getitem__(self, name: str) -> np.ndarray:
        _, shape = self.described(name)
        array = self._stored[name]
        if name not in self._scaled:
            return array
        scale = np.asarray(self._stored[f"{name}{SCALE}"]).astype(np.float32)
        for axis, (size, block) in enumerate(zip(shape, self._block or (), strict=False)):
            scale = np.repeat(scale, block, axis)[(slice(None),) * axis + (slice(size),)]
        return array.astype(np.float32) * scale
