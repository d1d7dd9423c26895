"""Nemotron-H (https://arxiv.org/abs/2504.03624): each layer is Mamba-2, attention or an mlp alone,
and nothing is rotated.

    x --+--> norm --> mamba, attention or mlp --+-->
        +---------------------------------------^
"""

from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jax import Array

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.models import block
from lmwright.models.by_reach import no_rotations
from lmwright.models.layers import Attend, LayerResult
from lmwright.models.mamba import Mamba

MLP = "mlp"


@section
class NemotronH(Mamba):
    """A decoder of the Nemotron-H family; its fields are the model."""

    mlp: ClassVar[Literal["relu2"]] = "relu2"  # type: ignore[misc]
    rope_theta: ClassVar[float] = 10_000.0  # type: ignore[misc]
    rope_scaling: ClassVar[Any] = None  # type: ignore[misc]

    kind: Literal["nemotron-h"] = "nemotron-h"
    mlp_dim: PositiveInt
    mixer_pattern: tuple[Literal["mamba", "full", "mlp"], ...] = (  # type: ignore[assignment]
        "mamba", "mlp", "mamba", "mlp", "mamba", "full", "mlp",
    )  # fmt: skip
    """Each layer: Mamba-2, full attention or an mlp; the pattern repeats over all layers."""
    mamba_num_heads: PositiveInt = 128
    """Heads of Mamba layers, each with a memory: a multiple of `mamba_num_groups`."""
    mamba_num_groups: PositiveInt = 8
    """Groups of heads that write and read their memories by the same vectors."""

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations of no dimension."""
        return no_rotations(positions)

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        own = self.ffn_spec(kind) if kind == MLP else self.mixer_spec(kind)
        return own | {"attention_norm": Param("norm", (self.embed_dim,), fill=1.0)}

    def state(self, kind: str, *, batch_size: int, length: int, dtype: jnp.dtype) -> Tree:
        """Shapes of what a layer carries: nothing, of an mlp."""
        if kind == MLP:
            return {}
        return super().state(kind, batch_size=batch_size, length=length, dtype=dtype)

    def layer(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> LayerResult:
        """x [B, T, D] after Mamba-2, attention or an mlp."""
        if kind == MLP:
            h = self.attention_input(w, x)
            y = block.feed_forward("relu2", w, h, attend.mlp_chunk_tokens)
        else:
            y = self.mixed(kind, w, x, tables, attend)
        return constrain(x + y, "batch stream embed"), {}
