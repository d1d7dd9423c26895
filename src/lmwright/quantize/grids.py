"""Grids that matrices are rounded to: those of training (`core.rounding`), IQ4_NL, whose 16 levels
lie closer around zero and are its codes, and the K-quants (`superblocks`), of which a file may hold
several (`gguf_blocks.MIXES`)."""

from itertools import pairwise
from typing import Literal

import jax.numpy as jnp
from jax import Array

from lmwright.core.rounding import GRIDS, Q4_0, Grid
from lmwright.formats.gguf_blocks import IQ4_NL, MIXES
from lmwright.quantize.superblocks import KINDS

GridName = Literal["int4", "int8", "q4_0", "iq4_nl", "q4_k", "q5_k", "q6_k"]
"""Grid of a matrix."""
Target = GridName | Literal["q4_k_m", "q5_k_m"]
"""Grid, or mix of grids, of a model."""
BETWEEN = tuple((a + b) / 2 for a, b in pairwise(IQ4_NL))


class Iq4Nl(Q4_0):
    """GGUF's: the value of largest magnitude is -127, the scale a float16."""

    def scale(self, blocks: Array) -> tuple[Array, Array]:
        """(scale, its inverse) of each block, along axis -2."""
        scale = self.stored(super().scale(blocks)[0] * (-8 / self.low))
        return scale, jnp.where(scale == 0, 0.0, 1 / jnp.where(scale == 0, 1.0, scale))

    def whole(self, x: Array) -> Array:
        """The level next to `x`."""
        return jnp.asarray(IQ4_NL, jnp.float32)[jnp.searchsorted(jnp.asarray(BETWEEN), x)]


RULES: dict[GridName, Grid] = {
    **GRIDS, "iq4_nl": Iq4Nl(IQ4_NL[0], IQ4_NL[-1]),
    **{name: kind.rule for name, kind in KINDS.items()},
}  # type: ignore[dict-item] # fmt: skip
BLOCKS: tuple[GridName, ...] = ("q4_0", "iq4_nl", "q4_k", "q5_k", "q6_k")
"""Grids of .gguf files, whose scales may be negative."""
MIXED = tuple(name.lower() for name in MIXES)
FILES = (*BLOCKS, *MIXED)
"""What a .gguf file is asked to be."""
