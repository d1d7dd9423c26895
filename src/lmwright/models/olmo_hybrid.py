"""OLMo Hybrid (https://huggingface.co/allenai/Olmo-Hybrid-7B): OLMo 3 with attention in one of
four layers; the others have a gated delta rule, and norms before the branches.

    linear   x --+--> norm --> memory --+--> norm --> mlp --+-->
                 +----------------------^ +-----------------^

    full     x --+--> attention --> norm --+--> mlp --> norm --+-->
                 +-------------------------^ +-----------------^

Queries and keys of memories have another width than values. A token may write with a strength of up
to two, which turns around what its key finds. The released models rotate nothing.
"""

from typing import ClassVar, Literal

from jax import Array

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.fanout import dots
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import before_products
from lmwright.errors import UserError
from lmwright.models.block import feed_forward, mlp_spec
from lmwright.models.by_reach import no_rotations
from lmwright.models.decoder import Decoder
from lmwright.models.delta_net import DeltaNet, mixed, write_and_decay
from lmwright.models.layers import Attend
from lmwright.models.olmo2 import NormsBehind
from lmwright.models.smollm3 import Rotation
from lmwright.nn.delta_rule import gates

MEMORY_EPS = 1e-5  # of the norm behind memories, whatever the others have
CONVOLVED = {"linear_q": "q_conv", "linear_k": "k_conv", "linear_v": "v_conv"}


@section
class OlmoHybrid(NormsBehind, DeltaNet):
    """A decoder of the OLMo Hybrid family; its fields are the model."""

    mlp: ClassVar[Literal["swiglu"]] = "swiglu"  # type: ignore[misc]
    qk_norm: ClassVar = "all"
    behind: ClassVar = ("attention_out_norm", "mlp_out_norm")
    kind: Literal["olmo-hybrid"] = "olmo-hybrid"
    mlp_dim: PositiveInt
    linear_num_key_heads: PositiveInt
    """Heads of queries and keys in linear layers."""
    linear_num_value_heads: PositiveInt
    """Heads of values in linear layers, each with a memory: a multiple of those of keys."""
    linear_key_dim: PositiveInt
    """Width of the queries and keys of these heads."""
    linear_value_dim: PositiveInt
    """Width of their values."""
    write_limit: Literal["one", "two"] = "two"
    """Strength that writing does not reach; beyond one, what is found is turned around."""
    rotation: Rotation = "nope"
    """Whether attention rotates queries and keys."""
    norm_eps: Positive = 1e-6
    bias: Literal["none", "attention"] = "none"
    """Projections of attention that add a bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        said = self.rope_scaling is not None or self.rope_theta != 10_000.0
        if self.rotation == "nope" and said:
            name = "rope_theta" if self.rope_scaling is None else "rope_scaling"
            raise UserError(
                f'model.{name}: has no effect without rotations; set model.rotation = "rope", or '
                "leave it out"
            )

    @property
    def memory_dims(self) -> tuple[int, int]:
        """Widths of a key and of a value in linear layers."""
        return self.linear_key_dim, self.linear_value_dim

    @property
    def convolved(self) -> dict[str, tuple[int, int]]:
        """Heads, and their width, that the filters of each name see."""
        keys = self.linear_num_key_heads, self.linear_key_dim
        return {"q_conv": keys, "k_conv": keys,
                "v_conv": (self.linear_num_value_heads, self.linear_value_dim)}  # fmt: skip

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        if kind == "full":
            return super().layer_spec(kind)
        d, by_head = self.embed_dim, "embed -> heads head_dim"
        values = (d, self.linear_num_value_heads)
        inputs = {name: Param(by_head, (d, *self.convolved[of])) for name, of in CONVOLVED.items()}
        return inputs | {
            "output_gate": Param(by_head, (*values, self.linear_value_dim)),
            "write_gate": Param("embed -> heads", values),
            "decay_gate": Param("embed -> heads", values),
            **self.memory_spec(),
            **mlp_spec(self, self.mlp_dim),
            **{name: Param("norm", (d,), fill=1.0) for name in ("attention_norm", "mlp_norm")},
        }

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, of no dimension if there are none."""
        if self.rotation == "rope":
            return {"full": Decoder.tables(self, positions, length)}
        return {"full": no_rotations(positions)}

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after its mixer and mlp."""
        if kind == "full":
            return super().layer(kind, w, x, tables, attend)
        h = self._linear(w, self.stream_norm(w, x, "attention_norm"), attend)
        x = constrain(x + h, "batch stream embed")
        h = self.stream_norm(w, x, "mlp_norm")
        h = feed_forward("swiglu", w, h, attend.mlp_chunk_tokens)
        return constrain(x + h, "batch stream embed"), {}

    def _linear(self, w: Tree, x: Array, attend: Attend) -> Array:
        """[B, T, D] of normed x [B, T, D]."""
        x, by_head = before_products(x), "btd,dnh->btnh"
        *qkv, gate = dots(x, *((by_head, w[name]) for name in (*CONVOLVED, "output_gate")))
        qkv = [constrain(a, "batch seq heads head_dim") for a in qkv]
        strength, decay = gates(*write_and_decay(w, x), w["a_log"], w["dt_bias"], attend.ids)
        strength = 2 * strength if self.write_limit == "two" else strength
        inputs = dict(zip(CONVOLVED.values(), qkv, strict=True))
        return self.remembered(w, inputs, gate, (strength, decay), mixed, attend, MEMORY_EPS)
