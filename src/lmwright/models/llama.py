"""The llama family (https://arxiv.org/abs/2302.13971): pre-norm blocks, rotary positions,
grouped kv heads (https://arxiv.org/abs/2305.13245), a gated or plain MLP.

    x --+--> norm --> attention --+--> norm --> mlp --+-->
        +-------------------------^ +-----------------^

Biases as in Qwen 2, per-head q and k norms as in Qwen 3, windows as in Mistral are fields, not
other models. `PreNorm` is the block alone; `models.moe` puts experts in place of the mlp.
"""

from typing import Literal

from jax import Array

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.weight import name_result
from lmwright.errors import UserError
from lmwright.models import block
from lmwright.models.decoder import Decoder, Head, LayerReach
from lmwright.models.layers import Attend, LayerResult
from lmwright.nn.attention import Scoring
from lmwright.nn.rope import apply_rope


class PreNorm(Decoder):
    """A decoder of pre-norm blocks. `ffn_spec` and `ffn` are the feed-forward of a layer: a plain
    mlp, or what a family puts in its place."""

    bias: block.Bias = "none"
    mlp_dim: int
    """Width of a plain mlp; missing where no layer has one."""

    def ffn_spec(self, kind: str) -> Tree:
        """Weights of a layer's feed-forward."""
        return block.mlp_spec(self, self.mlp_dim, self.bias)

    def ffn(self, kind: str, w: Tree, h: Array, attend: Attend) -> LayerResult:
        """[B, T, D] of h [B, T, D], and sums over real tokens."""
        return block.feed_forward(self.mlp, w, h, attend.mlp_chunk_tokens), {}

    @property
    def score_scale(self) -> float:
        """Factor on attention scores."""
        return self.head_dim**-0.5

    def mixer_spec(self, kind: str) -> Tree:
        """Weights of what joins tokens."""
        return block.attention_spec(self, self.bias) | block.qk_norm_spec(self, self.qk_norm)

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        names = ("attention_norm", "mlp_norm")
        norms = {name: Param("norm", (self.embed_dim,), fill=1.0) for name in names}
        return self.mixer_spec(kind) | norms | self.ffn_spec(kind)

    def attention_input(self, w: Tree, x: Array) -> Array:
        """The input of the q, k and v projections, [B, T, D]."""
        return self.stream_norm(w, x, "attention_norm")

    def normed(self, w: Tree, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values before the rotation."""
        return *block.qk_normed(self.qk_norm, w, q, k, self.norm_eps), v

    def rotated(self, q: Array, k: Array, tables: Tree) -> tuple[Array, Array]:
        """Queries and keys after the rotation."""
        return apply_rope(q, tables), apply_rope(k, tables)

    def mixed(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> Array:
        """[B, T, D] that attention adds to x [B, T, D]."""
        q, k, v = self.normed(w, *block.project(w, self.attention_input(w, x)))
        q, k = map(name_result, self.rotated(q, k, tables))
        return block.output(w, attend(q, k, v, Scoring(self.score_scale, self.window_of(kind))))

    def layer(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> LayerResult:
        """x [B, T, D] after attention and feed-forward."""
        x = constrain(x + self.mixed(kind, w, x, tables, attend), "batch stream embed")
        y, aux = self.ffn(kind, w, self.stream_norm(w, x, "mlp_norm"), attend)
        return constrain(x + y, "batch stream embed"), aux


@section
class Llama(PreNorm):
    """A decoder of the llama family; its fields are the model."""

    kind: Literal["llama"] = "llama"
    mlp_dim: PositiveInt
    window: PositiveInt | None = None
    """Tokens that local layers look at, the query included."""
    layer_pattern: tuple[LayerReach, ...] = ("local",)
    """Reach of each layer; the pattern repeats over all layers."""
    head: Head = "tied"
    qk_norm: Literal["none", "head"] = "none"  # type: ignore[misc]
    """RMS norm of q and k over head_dim."""
    bias: block.Bias = "none"
    """Projections that add a bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is None and self.layer_pattern != ("local",):
            raise UserError(
                "model.layer_pattern: has no effect without model.window; give the window too"
            )

    @property
    def reach(self) -> tuple[int | None, tuple[LayerReach, ...]]:
        """The window of local layers, and the pattern of local and global ones."""
        return self.window, self.layer_pattern
