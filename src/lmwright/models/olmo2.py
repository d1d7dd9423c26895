"""OLMo 2 (https://arxiv.org/abs/2501.00656): norms behind the branches instead of before them,
and norms of q and k over all heads together.

    x --+--> attention --> norm --+--> mlp --> norm --+-->
        +-------------------------^ +-----------------^

OLMo 3 (https://arxiv.org/abs/2512.13961) has windows in three of four layers.
"""

from functools import partial
from typing import ClassVar, Literal

from jax import Array

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import name_result
from lmwright.errors import UserError
from lmwright.models.block import (
    Bias,
    OutNorm,
    attention_spec,
    feed_forward,
    mlp_spec,
    output,
    project,
    qk_norm_spec,
    qk_normed,
)
from lmwright.models.by_reach import THREE_OF_FOUR, tables_by_reach
from lmwright.models.decoder import Decoder, LayerReach
from lmwright.models.layers import Attend
from lmwright.nn.attention import Scoring
from lmwright.nn.norm import rms_norm
from lmwright.nn.rope import apply_rope


class NormsBehind(Decoder):
    """A decoder of blocks with norms behind the branches, and of queries and keys."""

    normed_branches: ClassVar = ("o", "down")
    behind: ClassVar[tuple[str, str]] = ("attention_norm", "mlp_norm")
    """Names of the norms behind attention and mlp."""
    mlp_dim: int
    bias: Bias = "none"

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        return {
            **attention_spec(self, self.bias),
            **qk_norm_spec(self, self.qk_norm),
            **mlp_spec(self, self.mlp_dim),
            **{name: Param("norm", (self.embed_dim,), fill=1.0) for name in self.behind},
        }

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and mlp."""
        q, k, v = project(w, x)
        q, k = qk_normed(self.qk_norm, w, q, k, self.norm_eps)
        q, k = (name_result(apply_rope(a, tables[kind])) for a in (q, k))
        h = output(w, attend(q, k, v, Scoring(self.head_dim**-0.5, self.window_of(kind))))
        behind_attention, behind_mlp = self.behind
        h = rms_norm(constrain(h, "batch stream embed"), w[behind_attention], self.norm_eps)
        x = constrain(x + h, "batch stream embed")
        norm = OutNorm(behind_mlp, partial(rms_norm, eps=self.norm_eps))
        h = feed_forward(self.mlp, w, x, attend.mlp_chunk_tokens, norm)
        return constrain(x + h, "batch stream embed"), {}


@section
class Olmo2(NormsBehind):
    """A decoder of the OLMo 2 family; its fields are the model."""

    qk_norm: ClassVar = "all"
    kind: Literal["olmo2"] = "olmo2"
    mlp_dim: PositiveInt
    rope_theta: Positive = 500_000.0
    norm_eps: Positive = 1e-6
    bias: Literal["none", "attention"] = "none"
    """Projections that add a bias."""
    window: PositiveInt | None = None
    """Tokens that local layers look at, the query included; none in OLMo 2."""
    layer_pattern: tuple[LayerReach, ...] = THREE_OF_FOUR
    """Reach of each layer where there is a window; the pattern repeats over all layers."""
    local_rope_theta: Positive | None = None
    """Theta of local layers, which are then not scaled; that of all layers if unset."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unread = {"layer_pattern": self.layer_pattern != THREE_OF_FOUR,
                  "local_rope_theta": self.local_rope_theta is not None}  # fmt: skip
        if self.window is None and any(unread.values()):
            name = next(name for name, said in unread.items() if said)
            raise UserError(
                f"model.{name}: has no effect without model.window; give the window too"
            )

    @property
    def reach(self) -> tuple[int | None, tuple[LayerReach, ...]]:
        """The window of local layers, and the pattern of local and global ones."""
        return self.window, self.layer_pattern

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, by the reach of a layer."""
        return tables_by_reach(self, self.local_rope_theta, positions, length)
