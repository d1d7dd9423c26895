"""Rotations that differ between layers: between local and global ones, or of none at all."""

import jax.numpy as jnp
from jax import Array

from lmwright.core.param import Tree
from lmwright.models.decoder import Decoder
from lmwright.nn.rope import rope_tables


def tables_by_reach(
    model: Decoder, local_theta: float | None, positions: Array, length: int
) -> dict[str, Tree]:
    """Rotations of local and of global layers: those of local ones have `local_theta` and no
    scaling, or are the same if it is None."""
    whole = Decoder.tables(model, positions, length)
    if local_theta is None:
        return {"local": whole, "global": whole}
    return {"local": rope_tables(positions, model.rotary_dim, local_theta), "global": whole}


def no_rotations(positions: Array) -> Tree:
    """Rotations of no dimension for positions [B, T], of layers that turn nothing."""
    none = jnp.zeros((*positions.shape, 0), jnp.float32)
    return none, none


def local_rotations(model: Decoder, positions: Array, length: int) -> dict[str, Tree]:
    """Rotations of local layers, beside global ones that turn nothing."""
    turned = Decoder.tables(model, positions, length)
    return {"local": turned, "global": no_rotations(positions)}
