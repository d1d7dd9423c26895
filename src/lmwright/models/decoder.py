"""Decoder: fields and methods that causal decoders share."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.registry import Kind, Registry
from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.compute import Compute
from lmwright.core.contract import Attention, Batch, Work
from lmwright.core.param import Param, Tree, walk
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux, Span, spans
from lmwright.core.weight import Noisy, dot, lookup
from lmwright.errors import UserError
from lmwright.kernels import select
from lmwright.models import TableOf
from lmwright.models.layers import (
    Attend,
    Kernel,
    LayerKind,
    Plain,
    Spans,
    layers_spec,
    run_layers,
)
from lmwright.nn.mlp import Mlp
from lmwright.nn.norm import rms_norm
from lmwright.nn.rope import SCALED, RopeScaling, rope_tables

ANY_MLP = "Gated (swiglu, geglu, geglu_erf, reglu) or plain (gelu_erf, gelu_tanh, relu, relu2) mlp."
AnyMlp = Annotated[Mlp, Field(description=ANY_MLP)]
Head = Annotated[
    Literal["tied", "untied"], Field(description="Whether the output head is the embedding table.")
]
# imported on demand: a step without experts needs none of their code
REASONING = Kind("reasoning", Registry("lmwright.models", {"reasoning": "reasoning.Reasoning"}))
ReasoningSection = Annotated[
    Annotated[Any, REASONING] | None,
    Field(description="Small experts beside the decoder's own layers, after every few of them."),
]
QkNorm = Literal["none", "head", "all"]
Named = TypeVar("Named", bound=str)
LayerReach = Literal["local", "global"]
"""Keys of a layer: those in the model's window, or the whole row."""


@section
class Decoder:
    """All of a causal decoder but `layer_spec`, `layer` and fields of the family's own. Help is in
    `Field`, since pydantic does not find docstrings of inherited fields."""

    hf: ClassVar[TableOf] = TableOf()
    """The family's table of Hugging Face names."""
    normed_branches: ClassVar[tuple[str, ...]] = ()  # weights whose products a norm reads
    both_ways: ClassVar[bool] = False  # whether queries see tokens after themselves
    fills_masks: ClassVar[bool] = False  # whether it writes text in the place of masks
    mixer: ClassVar[str] = "attention"  # what joins tokens in its layers
    sinks: ClassVar[bool] = False  # whether each softmax has a learned score without a key
    own_keys: ClassVar[bool] = False  # whether each head of queries has keys of its own
    # fields of some families, the same in all models of the others
    qk_norm: ClassVar[QkNorm] = "none"
    logits_soft_cap: ClassVar[float | None] = None

    vocab_size: PositiveInt
    embed_dim: PositiveInt
    num_layers: Annotated[int, Field(gt=0, le=10_000)]
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    seq_len: Annotated[
        PositiveInt, Field(description="Context length the model is built for, in tokens.")
    ]
    rope_theta: Positive = 10_000.0
    rope_scaling: Annotated[
        RopeScaling | None, Field(description="How rotations change for a longer context.")
    ] = None
    norm_eps: Positive = 1e-5
    mlp: AnyMlp = "swiglu"
    head: Head = "untied"
    embed_std: Annotated[Positive, Field(description="Standard deviation of fresh embeddings.")] = (
        0.02
    )
    reasoning: ReasoningSection = None

    def __post_init__(self) -> None:
        check_decoder(self)

    @property
    def reach(self) -> tuple[int | None, tuple[LayerReach, ...]]:
        """The window of local layers, and the pattern of local and global ones."""
        return None, ("global",)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer: here its reach."""
        window, pattern = self.reach
        return reaches(pattern if window else ("global",), self.num_layers)

    def window_of(self, kind: str) -> int | None:
        """Tokens that queries of such a layer look at, themselves included; None for all."""
        return self.reach[0] if kind == "local" else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(map(self.window_of, self.kinds))

    @property
    def heads_text(self) -> str:
        """The model's heads in words."""
        return f"{self.num_heads} query and {self.num_kv_heads} kv heads of {self.head_dim}"

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return self.head_dim

    @property
    def spans(self) -> Spans:
        """The layers as they are stacked."""
        kinds: tuple[LayerKind, ...] = tuple(map(Plain, self.kinds))
        if self.reasoning is not None:
            kinds = self.reasoning.among(self.kinds, self.embed_dim, self.norm_eps)
        return spans(kinds)

    @property
    def mixtures(self) -> dict[str, Any]:
        """Experts of the layers, by prefix of their statistics."""
        return {"reasoning": self.reasoning.experts} if self.reasoning else {}

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`."""
        return _work(self, seq_len)

    def spec(self) -> Tree:
        """Every weight, once."""
        return {
            **self.embedding_spec(),
            **layers_spec(self.spans, self.layer_spec),
            "norm": Param("norm", (self.embed_dim,), fill=1.0),
        }

    def embedding_spec(self) -> Tree:
        """The embedding table, and the head where it is not the table."""
        d, v = self.embed_dim, self.vocab_size
        spec = {"embed": Param("vocab -> embed", (v, d), std=self.embed_std)}
        return spec | ({"head": Param("embed -> vocab", (d, v))} if self.head == "untied" else {})

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        raise NotImplementedError

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after one layer, and sums over tokens beside it."""
        raise NotImplementedError

    def embedded(self, w: Tree, tokens: Array, compute: Compute) -> Array:
        """The residual stream before the first layer, [B, T, D]."""
        return constrain(lookup(w["embed"], tokens, compute.dtype), "batch stream embed")

    def placed(self, w: Tree, x: Array, positions: Array) -> Array:
        """x [B, T, D] with learned vectors of positions [B, T], where the model has some."""
        return x

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, as every layer sees them."""
        return rope_tables(
            positions, self.rotary_dim, self.rope_theta, self.rope_scaling, length=length
        )

    def with_inputs(self, w: Tree, tokens: Array, x: Array) -> Tree:
        """The weights, and beside them what layers read of tokens [B, T], embedded as x."""
        return w

    def stream_norm(self, w: Tree, x: Array, name: str = "norm") -> Array:
        """x [B, T, D] after the norm of this name; the last one's is what the head sees."""
        return rms_norm(x, w[name], self.norm_eps)

    def with_noise(self, w: Tree, noise: Array) -> Tree:
        """The weights, with noise [B, T, D] on the embeddings of a batch."""
        return {**w, "embed": Noisy(w["embed"], noise)}

    def hidden(self, w: Tree, batch: Batch, compute: Compute) -> tuple[Array, Aux]:
        """Residual stream after the last norm, [B, T, D] in the compute dtype, and what the
        layers return beside it."""
        return self.hidden_by(select.self_attention(compute, self.both_ways), w, batch, compute)

    def hidden_by(
        self, kernel: Kernel, w: Tree, batch: Batch, compute: Compute
    ) -> tuple[Array, Aux]:
        """`hidden` by any attention that takes what `select.self_attention` does."""
        x = self.placed(w, self.embedded(w, batch.tokens, compute), batch.positions)
        tables = self.tables(batch.positions, batch.tokens.shape[1])
        cut, join = select.pieces_of_rows(self, x, tables, compute, kernel)
        x, tables = cut(x), jax.tree.map(cut, tables)
        x, aux = run_layers(self.layer, self.spans, w, x, tables, batch, compute, kernel)
        return self.stream_norm(w, join(x)), aux

    def head_weights(self, w: Tree) -> Tree:
        """The part of the weights that `logits` reads."""
        return {"head": w["head"]} if self.head == "untied" else {"embed": w["embed"]}

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [..., V] for hidden [..., D]; `w` may be `head_weights(w)` alone."""
        by, name = ("btd,dv->btv", "head") if self.head == "untied" else ("btd,vd->btv", "embed")
        return dot(by, hidden, w[name], out_dtype=jnp.float32)

    def state(self, kind: str, *, batch_size: int, length: int, dtype: jnp.dtype) -> Tree:
        """Shapes of what a layer carries from token to token, in rows of up to `length`: here
        keys and values."""
        each = jax.ShapeDtypeStruct((batch_size, length, self.num_kv_heads, self.head_dim), dtype)
        return {"k": each, "v": each}

    def tables_after(self, span: Span, states: Tree, tables: Tree) -> Tree:
        """Tables of the layers behind a span, by the states of its own."""
        return tables


def reaches(pattern: Sequence[LayerReach], num_layers: int) -> tuple[LayerReach, ...]:
    """The reach of each layer, from the repeated pattern. Raises UserError for an empty one."""
    return repeated("layer_pattern", pattern, num_layers, '["local", "global"]')


def repeated(
    name: str, pattern: Sequence[Named], num_layers: int, example: str
) -> tuple[Named, ...]:
    """The kind of each layer, from the repeated pattern in the field `name`. Raises UserError for
    an empty one."""
    if not pattern:
        raise UserError(f"model.{name}: is empty; write {example} or leave it out")
    return tuple(pattern[i % len(pattern)] for i in range(num_layers))


def check_decoder(model: Decoder) -> None:
    """Raises UserError where fields that `Decoder` reads do not go together."""
    if model.num_heads % model.num_kv_heads:
        raise UserError(
            f"model.num_heads: {model.num_heads} is not a multiple of "
            f"model.num_kv_heads = {model.num_kv_heads}; use a multiple, such as "
            f"{model.num_kv_heads * max(1, round(model.num_heads / model.num_kv_heads))}"
        )
    if model.rotary_dim % 2:
        raise UserError(
            f"model.head_dim: {model.head_dim} rotates {model.rotary_dim} dims, which is odd; "
            "choose an even number"
        )
    if model.rope_scaling is not None:
        SCALED["refuse lists"](model.rope_scaling, model.rotary_dim // 2)
    _ = model.kinds


@lru_cache(256)
def _work(model: Decoder, seq_len: int) -> Work:
    """Work of a token in a row of `seq_len`; with an untied head the embedding is only looked
    up."""
    spec = model.spec()
    active = {path: active_share(model, path, param) for path, param in walk(spec)}
    active |= {"embed": 0.0} if model.head == "untied" else {}
    return Work(
        spec=spec,
        seq_len=seq_len,
        num_layers=model.num_layers,
        embed_dim=model.embed_dim,
        vocab_size=model.vocab_size,
        active=active,
        attention=Attention(
            model.windows, model.num_heads, model.num_kv_heads, model.head_dim, model.both_ways
        ),
        uncut=(),
        soft_capped=model.logits_soft_cap is not None,
        normed=frozenset((*model.normed_branches, *("qk" if model.qk_norm != "none" else ""))),
    )


def active_share(model: Decoder, path: str, param: Param) -> float:
    """Fraction of a weight that each token meets: all of it, of experts the chosen ones."""
    if "experts" not in param.batch:
        return 1.0
    own = path.rpartition(".")[2].startswith("reasoning_")
    return model.mixtures["reasoning" if own else "router"].active_share
