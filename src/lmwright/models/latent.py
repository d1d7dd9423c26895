"""Decoders with experts whose attention keeps one latent vector a token, as DeepSeek-V2
(https://arxiv.org/abs/2405.04434) brought it.

    x --q_a--> norm --q_b--> q, the end of each head rotated              or x --q--> q
    x --kv_a--> latent --norm--> kv_b --> keys and values of each head
           +--> a rotated key, at the end of the keys of all heads

Whole rows are computed with the keys and values of all heads. Generation keeps only what they are
made of, `kv_lora_rank` + `qk_rope_head_dim` numbers a token: queries and results are multiplied
with `kv_b` in their place, and all heads look at the same keys.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.contract import Work
from lmwright.core.fanout import dots
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import as_array, before_products, dot, name_result
from lmwright.errors import UserError
from lmwright.models.block import into_stream, output
from lmwright.models.layers import Attend
from lmwright.models.moe import DenseDim, DenseLayers, MoeDecoder
from lmwright.models.own_keys import refuse_groups
from lmwright.nn.attention import Scoring
from lmwright.nn.norm import rms_norm
from lmwright.nn.rope import YarnRope
from lmwright.nn.rope_pairs import of_pairs, turn_pairs
from lmwright.nn.rope_scaling import yarn_length

LATENT_EPS = 1e-6  # of the norms of latents, whatever that of the others is
DOWN, UP = "btd,dl->btl", "btd,dnh->btnh"
STREAM = "batch stream rank"


@section
class Latent(MoeDecoder):
    """Fields and layers of these families, which differ in their experts."""

    normed_branches: ClassVar = ("q_a", "kv_a")
    own_keys: ClassVar[bool] = True

    head_dim: Annotated[
        PositiveInt,
        Field(description="Width of a head of queries and keys, rotated part included."),
    ]
    qk_rope_head_dim: PositiveInt
    """Dims of each head that are rotated, at its end; those of keys are the same in all heads."""
    v_head_dim: PositiveInt
    """Width of a head of values."""
    kv_lora_rank: PositiveInt
    """Width of the latent vector that keys and values are made of."""
    q_lora_rank: PositiveInt | None = None
    """Width of the latent vector that queries are made of; none if unset."""
    mlp_dim: DenseDim
    dense_layers: DenseLayers = ()
    norm_eps: Positive = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_groups(self)
        if self.qk_rope_head_dim >= self.head_dim:
            raise UserError(
                f"model.qk_rope_head_dim: {self.qk_rope_head_dim} leaves nothing of the "
                f"{self.head_dim} of model.head_dim that is not rotated; make it smaller"
            )

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return self.qk_rope_head_dim

    @property
    def heads_text(self) -> str:
        """The model's heads in words."""
        return (
            f"{self.num_heads} heads of {self.head_dim} and {self.v_head_dim}, from latents of "
            f"{self.kv_lora_rank}"
        )

    @property
    def scoring(self) -> Scoring:
        """Scale of the scores, which YaRN's `mscale_all_dim` makes larger."""
        scale, rope = self.head_dim**-0.5, self.rope_scaling
        if isinstance(rope, YarnRope) and rope.mscale_all_dim:
            scale *= yarn_length(rope.factor, rope.mscale_all_dim) ** 2
        return Scoring(scale)

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`."""
        return _work(self, seq_len)

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer. The input of `q_b` and `kv_b` is cut over devices as the residual
        stream's width is."""
        d, n, q, kv = self.embed_dim, self.num_heads, self.q_lora_rank, self.kv_lora_rank
        heads, size, values = "embed -> heads head_dim", self.head_dim, self.v_head_dim
        into = into_stream(self) * (n * values) ** -0.5
        of_queries = {"q": Param(heads, (d, n, size))} if q is None else {
            "q_a": Param("embed -> rank", (d, q)),
            "q_a_norm": Param("norm", (q,), fill=1.0),
            "q_b": Param(heads, (q, n, size)),
        }  # fmt: skip
        return {
            "attention_norm": Param("norm", (d,), fill=1.0),
            **of_queries,
            "kv_a": Param("embed -> rank", (d, kv + self.qk_rope_head_dim)),
            "kv_a_norm": Param("norm", (kv,), fill=1.0),
            "kv_b": Param(heads, (kv, n, self._unrotated + values)),
            "o": Param("heads head_dim -> embed", (n, values, d), std=into),
            "mlp_norm": Param("norm", (d,), fill=1.0),
            **self.ffn_spec(kind),
        }

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, for neighboring dims."""
        return of_pairs(super().tables(positions, length))

    def state(self, kind: str, *, batch_size: int, length: int, dtype: jnp.dtype) -> Tree:
        """Shape of what a layer carries: latents with the rotated key behind, as keys of one head
        whose values they are, too."""
        width = self.kv_lora_rank + self.qk_rope_head_dim
        return {"k": jax.ShapeDtypeStruct((batch_size, length, 1, width), dtype)}

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and feed-forward."""
        q, latent, key = self._projected(w, self.attention_input(w, x), tables)
        look = self._whole if attend.state is None else self._on_latents
        x = constrain(x + output(w, look(w, q, latent, key, attend)), "batch stream embed")
        y, aux = self.ffn(kind, w, self.stream_norm(w, x, "mlp_norm"), attend)
        return constrain(x + y, "batch stream embed"), aux

    @property
    def _unrotated(self) -> int:
        return self.head_dim - self.qk_rope_head_dim

    def _projected(self, w: Tree, x: Array, tables: Tree) -> tuple[Array, Array, Array]:
        """Queries [B, T, N, H], latents [B, T, R] and rotated keys [B, T, 1, P] of x [B, T, D]."""
        x = before_products(x)
        kv = constrain(dot(DOWN, x, w["kv_a"]), STREAM)  # narrow: tokens stay apart
        if self.q_lora_rank is None:
            (q,) = dots(x, (UP, w["q"]))
        else:
            q = rms_norm(constrain(dot(DOWN, x, w["q_a"]), STREAM), w["q_a_norm"], LATENT_EPS)
            (q,) = dots(before_products(q), (UP, w["q_b"]))
        latent, key = jnp.split(kv, [self.kv_lora_rank], axis=-1)
        latent = before_products(rms_norm(latent, w["kv_a_norm"], LATENT_EPS))
        plain, end = jnp.split(q, [self._unrotated], axis=-1)
        q = jnp.concatenate([plain, turn_pairs(end, tables)], axis=-1)
        q = constrain(name_result(q), "batch seq heads head_dim")
        key = constrain(key, "batch seq rank")[:, :, None]
        return q, latent, name_result(turn_pairs(key, tables))

    def _whole(self, w: Tree, q: Array, latent: Array, key: Array, attend: Attend) -> Array:
        """Results of all heads [B, T, N, V] for whole rows."""
        (up,) = dots(latent, (UP, w["kv_b"]))
        up = constrain(up, "batch seq heads head_dim")
        k, v = jnp.split(up, [self._unrotated], axis=-1)
        ends = jnp.broadcast_to(key, (*k.shape[:-1], self.qk_rope_head_dim))
        k = jnp.concatenate([k, ends], axis=-1)
        q, k, v = (widened(a, self.attended_dim) for a in (q, k, v))
        return attend(q, k, v, self.scoring)[..., : self.v_head_dim]

    @property
    def attended_dim(self) -> int:
        """Width of queries, keys and values as kernels take them: that of the wider ones, zeros
        behind the others."""
        return max(self.head_dim, self.v_head_dim)

    def _on_latents(self, w: Tree, q: Array, latent: Array, key: Array, attend: Attend) -> Array:
        """Results of all heads [B, T, N, V] for tokens behind others."""
        up = as_array(w["kv_b"], q.dtype).astype(q.dtype)  # [R, N, H - P + V]
        to_keys, to_values = jnp.split(up, [self._unrotated], axis=-1)
        plain, end = jnp.split(q, [self._unrotated], axis=-1)
        q = jnp.concatenate([jnp.einsum("btnh,rnh->btnr", plain, to_keys), end], axis=-1)
        k = jnp.concatenate([latent[:, :, None], key], axis=-1)  # [B, T, 1, R + P]
        h = attend(q, k, k, self.scoring)[..., : self.kv_lora_rank]
        return jnp.einsum("btnr,rnh->btnh", h, to_values)


def widened(a: Array, size: int) -> Array:
    """a [..., H] with zeros behind, [..., size]."""
    return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, size - a.shape[-1])])


@lru_cache(256)
def _work(model: Latent, seq_len: int) -> Work:
    work: Work = MoeDecoder.work(model, seq_len)
    assert work.attention is not None
    narrower = min(model.head_dim, model.v_head_dim)
    attention = replace(work.attention, head_dim=model.attended_dim, narrower_dim=narrower)
    return replace(work, attention=attention)
