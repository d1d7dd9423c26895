"""Rotations that differ between layers: between local and global ones, or of none at all."""

from typing import Annotated

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Tree
from lmwright.errors import UserError
from lmwright.models.decoder import Decoder, LayerReach
from lmwright.nn.rope import rope_tables

THREE_OF_FOUR: tuple[LayerReach, ...] = ("local", "local", "local", "global")


def tables_by_reach(
    model: Decoder, local_theta: float | None, positions: Array, length: int
) -> dict[str, Tree]:
    """Rotations of local and of global layers: those of local ones have `local_theta` and no
    scaling, or are the same if it is None."""
    whole = Decoder.tables(model, positions, length)
    if local_theta is None:
        return {"local": whole, "global": whole}
    return {"local": rope_tables(positions, model.rotary_dim, local_theta), "global": whole}


def reach_in(kind: str) -> str:
    """The reach in a kind of layers, local or global."""
    return kind.split()[0]


def no_rotations(positions: Array) -> Tree:
    """Rotations of no dimension for positions [B, T], of layers that turn nothing."""
    none = jnp.zeros((*positions.shape, 0), jnp.float32)
    return none, none


@section
class LocalTurns(Decoder):
    """A decoder that may have windows; its global layers beside local ones do not rotate."""

    window: Annotated[
        PositiveInt | None,
        Field(
            description="Tokens that local layers look at, the query included; with it, only these "
            "layers rotate."
        ),
    ] = None
    layer_pattern: Annotated[
        tuple[LayerReach, ...],
        Field(
            description="Reach of each layer where there is a window; the pattern repeats over all "
            "layers."
        ),
    ] = THREE_OF_FOUR

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is None and self.layer_pattern != THREE_OF_FOUR:
            raise UserError(
                "model.layer_pattern: has no effect without model.window; give the window too"
            )

    @property
    def reach(self) -> tuple[int | None, tuple[LayerReach, ...]]:
        """The window of local layers, and the pattern of local and global ones."""
        return self.window, self.layer_pattern

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, by the reach of a layer: of no
        dimension in global layers beside local ones."""
        turned = super().tables(positions, length)
        return {
            "local": turned,
            "global": turned if self.window is None else no_rotations(positions),
        }


def local_rotations(model: Decoder, positions: Array, length: int) -> dict[str, Tree]:
    """Rotations of local layers, beside global ones that turn nothing."""
    turned = Decoder.tables(model, positions, length)
    return {"local": turned, "global": no_rotations(positions)}
