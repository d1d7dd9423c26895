"""Nemotron-H (https://arxiv.org/abs/2504.03624): each layer is Mamba-2, attention, an mlp or a
mixture of experts alone, and nothing is rotated.

    x --+--> norm --> mamba, attention, mlp or experts --+-->
        +------------------------------------------------^
"""

from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.errors import UserError
from lmwright.models.block import into_stream
from lmwright.models.by_reach import no_rotations
from lmwright.models.experts import Experts
from lmwright.models.layers import Attend, LayerResult
from lmwright.models.mamba import Mamba

MLP, MOE = "mlp", "moe"
LETTERS = {"M": "mamba", "*": "full", "-": MLP, "E": MOE}
"""Kinds of layers as released files write them."""


@section
class LayersAlone(Mamba):
    """All of the family but the experts."""

    mlp: ClassVar[Literal["relu2"]] = "relu2"  # type: ignore[misc]
    rope_theta: ClassVar[float] = 10_000.0  # type: ignore[misc]
    rope_scaling: ClassVar[Any] = None  # type: ignore[misc]

    mlp_dim: Annotated[PositiveInt, Field(description="Width of the mlps.")]
    mamba_num_heads: PositiveInt = 128
    """Heads of Mamba layers, each with a memory: a multiple of `mamba_num_groups`."""
    mamba_num_groups: PositiveInt = 8
    """Groups of heads that write and read their memories by the same vectors."""

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations of no dimension."""
        return no_rotations(positions)

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        own = self.ffn_spec(kind) if kind in (MLP, MOE) else self.mixer_spec(kind)
        return own | {"attention_norm": Param("norm", (self.embed_dim,), fill=1.0)}

    def state(self, kind: str, *, batch_size: int, length: int, dtype: jnp.dtype) -> Tree:
        """Shapes of what a layer carries: nothing, of an mlp or experts."""
        if kind in (MLP, MOE):
            return {}
        return super().state(kind, batch_size=batch_size, length=length, dtype=dtype)

    def layer(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> LayerResult:
        """x [B, T, D] after Mamba-2, attention, an mlp or experts."""
        aux: Aux = {}
        if kind in (MLP, MOE):
            y, aux = self.ffn(kind, w, self.attention_input(w, x), attend)
        else:
            y = self.mixed(kind, w, x, tables, attend)
        return constrain(x + y, "batch stream embed"), aux


@section
class NemotronH(LayersAlone):
    """A decoder of the Nemotron-H family; its fields are the model."""

    kind: Literal["nemotron-h"] = "nemotron-h"
    mixer_pattern: tuple[Literal["mamba", "full", "mlp"], ...] = (  # type: ignore[assignment]
        "mamba", "mlp", "mamba", "mlp", "mamba", "full", "mlp",
    )  # fmt: skip
    """Each layer: Mamba-2, full attention or an mlp; the pattern repeats over all layers."""


@section
class NemotronHMoe(LayersAlone):
    """Nemotron-H with mixtures of experts among its layers (Nemotron 3,
    https://arxiv.org/abs/2512.20848)."""

    kind: Literal["nemotron-h-moe"] = "nemotron-h-moe"
    experts: Annotated[Experts, Field(description="Experts of the layers that are a mixture.")]
    mixer_pattern: tuple[Literal["mamba", "full", "mlp", "moe"], ...] = (  # type: ignore[assignment]
        "mamba", "moe", "mamba", "moe", "mamba", "full", "moe",
    )  # fmt: skip
    """Each layer: Mamba-2, full attention, an mlp or experts; the pattern repeats over all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if MOE not in self.kinds:
            raise UserError(
                'model.mixer_pattern: no layer is "moe"; name one, or use the kind "nemotron-h"'
            )

    @property
    def mixtures(self) -> dict[str, Experts]:
        """Experts of the layers, by prefix of their statistics."""
        return {"router": self.experts, **super().mixtures}

    def ffn_spec(self, kind: str) -> Tree:
        """Weights of an mlp, or of experts."""
        if kind == MLP:
            return super().ffn_spec(kind)
        return self.experts.spec("relu2", self.embed_dim, into_stream(self))

    def ffn(self, kind: str, w: Tree, h: Array, attend: Attend) -> tuple[Array, Aux]:
        """[B, T, D] of h [B, T, D], and what the router did."""
        if kind == MLP:
            return super().ffn(kind, w, h, attend)
        return self.experts.run("relu2", w, h, attend.real, attend.mlp_chunk_tokens)
