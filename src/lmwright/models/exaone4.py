"""EXAONE 4 (https://arxiv.org/abs/2507.11407): norms behind the branches, as in OLMo 2, and of each
head of queries and keys. Its large model has windows in three of four layers, and the others do not
rotate; without windows all layers rotate."""

from typing import ClassVar, Literal

from jax import Array

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Tree
from lmwright.errors import UserError
from lmwright.models.by_reach import no_rotations
from lmwright.models.decoder import Head, LayerReach
from lmwright.models.olmo2 import USUAL, NormsBehind


@section
class Exaone4(NormsBehind):
    """A decoder of the EXAONE 4 family; its fields are the model."""

    qk_norm: ClassVar = "head"
    kind: Literal["exaone4"] = "exaone4"
    mlp_dim: PositiveInt
    head: Head = "tied"
    window: PositiveInt | None = None
    """Tokens that local layers look at, the query included; with it, only these layers rotate."""
    layer_pattern: tuple[LayerReach, ...] = USUAL
    """Reach of each layer where there is a window; the pattern repeats over all layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is None and self.layer_pattern != USUAL:
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
