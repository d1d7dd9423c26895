"""Mamba-2 (https://arxiv.org/abs/2405.21060): layers of state spaces alone, without attention,
mlps or positions.

    x --+--> norm --> mamba --+-->
        +---------------------^
"""

from typing import Any, ClassVar, Literal

from jax import Array

from lmwright.config.run import section
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.models.by_reach import no_rotations
from lmwright.models.layers import Attend, LayerResult
from lmwright.models.mamba import MAMBA, Mamba


@section
class Mamba2(Mamba):
    """A decoder of the Mamba-2 family; its fields are the model."""

    mixer: ClassVar[str] = "state spaces"
    mixer_pattern: ClassVar[Any] = (MAMBA,)  # type: ignore[misc]
    # of attention and mlps, which no layer has
    num_heads: ClassVar[int] = 1  # type: ignore[misc]
    num_kv_heads: ClassVar[int] = 1  # type: ignore[misc]
    head_dim: ClassVar[int] = 0  # type: ignore[misc]
    rope_theta: ClassVar[float] = 10_000.0  # type: ignore[misc]
    rope_scaling: ClassVar[Any] = None  # type: ignore[misc]
    mlp: ClassVar[Any] = None  # type: ignore[misc]

    kind: Literal["mamba2"] = "mamba2"

    @property
    def heads_text(self) -> str:
        """The model's memories in words."""
        return f"{self.mamba_num_heads} memories of {self.mamba_state_dim} x {self.mamba_head_dim}"

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations of no dimension."""
        return no_rotations(positions)

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        norm = Param("norm", (self.embed_dim,), fill=1.0)
        return self.mixer_spec(kind) | {"attention_norm": norm}

    def layer(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> LayerResult:
        """x [B, T, D] after Mamba-2."""
        y = self.mixed(kind, w, x, tables, attend)
        return constrain(x + y, "batch stream embed"), {}
