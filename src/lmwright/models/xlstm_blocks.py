"""xLSTM[a:b] (https://arxiv.org/abs/2405.04517): a mlstm blocks for every b slstm blocks.

mlstm   norm --> up --+--> conv --> q, k --> mLSTM --> norm of each head, plus conv x skip --+
                      +-----------> v --------^                                             |
                      +--> silu ---------------------------------------------------- times -+--> o
slstm   norm --+--> conv --> i, f --> sLSTM --> norm of each head --> (stream) --> norm --> mlp
               +-----------> z, o ----^

Convolutions see the last few tokens of a document, with SiLU behind. Projections of q, k and v are
of four numbers each, gates of sLSTM of a head's. Such block-diagonal weights are no matrices of the
stream: LoRA, int8 and weight decay leave them alone.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.compute import HEADS
from lmwright.core.contract import Work
from lmwright.core.fanout import dots
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import before_products, name_result
from lmwright.errors import UserError
from lmwright.models.block import feed_forward, output
from lmwright.models.decoder import Head
from lmwright.models.layers import Attend
from lmwright.models.xlstm import Recurrent, moved_numbers
from lmwright.nn import mlstm, slstm
from lmwright.nn.causal_conv import causal_conv, conv_from
from lmwright.nn.for_all import plus, times
from lmwright.nn.layer_norm import layer_norm
from lmwright.nn.mlp import GatedMlp

BLOCK = 4  # numbers that a projection of q, k or v joins
TILE = 128  # numbers whose projections are one product
CELL_MOVES = 40.0  # float32 numbers that a cell of sLSTM moves for a token, assumed
BlockKind = Literal["mlstm", "slstm"]


@section
class XlstmBlocks(Recurrent):
    """A decoder of xLSTM[a:b] blocks; its fields are the model."""

    mixer: ClassVar[str] = "mLSTM and sLSTM"
    head_dim: ClassVar[None] = None  # type: ignore[misc, assignment]

    kind: Literal["xlstm-blocks"] = "xlstm-blocks"
    mlp_dim: PositiveInt
    """Width of the feed-forward in blocks of sLSTM, 4/3 of `embed_dim` in the paper."""
    block_pattern: Annotated[tuple[BlockKind, ...], Field(min_length=1)] = (
        "mlstm", "mlstm", "mlstm", "slstm", "mlstm", "mlstm", "mlstm", "mlstm",
    )  # fmt: skip
    """Kinds of the layers, mlstm or slstm, over and over."""
    conv_tokens: Annotated[int, Field(ge=2)] = 4
    """Tokens that a convolution sees, the token itself included."""
    chunk_tokens: Annotated[int, Field(ge=1)] = 64
    """Tokens that are computed together in a block of mLSTM, and between which a block of sLSTM
    keeps its cells for the backward pass. The results do not depend on it."""
    norm_eps: Positive = 1e-5
    mlp: GatedMlp = "geglu_erf"
    """Gate of the feed-forward."""
    head: Head = "untied"

    def __post_init__(self) -> None:
        d = self.embed_dim
        fits = [n for n in range(1, self.num_heads + 1) if d % n == 0 == 2 * d % (BLOCK * n)]
        if self.num_heads not in fits:
            raise UserError(
                f"model.num_heads: {self.num_heads} heads do not divide model.embed_dim = {d} into "
                f"whole ones; use {max(fits, default=1)}"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        return tuple(
            self.block_pattern[i % len(self.block_pattern)] for i in range(self.num_layers)
        )

    @property
    def memory_dim(self) -> int:
        """Width of the keys and values of a head of mLSTM."""
        return 2 * self.embed_dim // self.num_heads

    @property
    def cell_dim(self) -> int:
        """Cells of a head of sLSTM."""
        return self.embed_dim // self.num_heads

    @property
    def heads_text(self) -> str:
        """The model's heads and memories in words."""
        return (
            f"{self.num_heads} heads with memories of {self.memory_dim} x {self.memory_dim} or "
            f"{self.cell_dim} cells"
        )

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        norm = {"norm": Param("norm", (self.embed_dim,), fill=1.0)}
        return norm | (self._mlstm_spec() if kind == "mlstm" else self._slstm_spec())

    def _conv_spec(self, head_dim: int) -> Tree:
        shape, std = (self.num_heads, head_dim), (3 * self.conv_tokens) ** -0.5
        return {
            "conv": Param("blocks heads head_dim", (self.conv_tokens, *shape), std=std),
            "conv_bias": Param("heads head_dim", shape, fill=0.0),
        }

    def _mlstm_spec(self) -> Tree:
        d, n, h, small = self.embed_dim, self.num_heads, self.memory_dim, self.small_std
        return {
            **{name: Param("embed -> heads head_dim", (d, n, h), std=small)
               for name in ("up", "output_gate")},
            **self._conv_spec(h),
            **{name: Param("heads head_dim blocks", (n, h, BLOCK), std=small)
               for name in ("q", "k", "v")},
            "gates": Param("blocks heads head_dim norm", (3, n, h, 2 * n), fill=0.0),
            "input_gate_bias": Param("heads", (n,), std=0.1),
            "forget_gate_bias": Param("heads", (n,), fill=3.0, fill_to=6.0),
            "memory_norm": Param("heads head_dim", (n, h), fill=1.0),
            "skip": Param("heads head_dim", (n, h), fill=1.0),
            "o": Param("heads head_dim -> embed", (n, h, d), std=self.stream_std),
        }  # fmt: skip

    def _slstm_spec(self) -> Tree:
        d, n, h, small = self.embed_dim, self.num_heads, self.cell_dim, self.small_std
        bias = lambda **start: Param("heads head_dim", (n, h), **start)  # noqa: E731
        return {
            **self._conv_spec(h),
            "gates": Param("heads head_dim blocks head_dim", (n, h, slstm.GATES, h), std=small),
            "recurrent": Param("heads head_dim blocks head_dim", (n, h, slstm.GATES, h), fill=0.0),
            # one of the input gate would change c and n alike
            **{f"{name}_bias": bias(fill=0.0) for name in ("cell", "output_gate")},
            # by the paper 5 - 12 x^(0.3 + 1.3 l / (L - 1)) of cell x and layer l: here the straight
            # line, which is a layer's in the middle
            "forget_gate_bias": bias(fill=5.0, fill_to=-7.0),
            "memory_norm": Param("heads head_dim", (n, h), fill=1.0),
            "mlp_norm": Param("norm", (d,), fill=1.0),
            **self.fresh_mlp(self.mlp_dim),
        }  # fmt: skip

    def state(self, kind: str, *, batch_size: int, length: int, dtype: jnp.dtype) -> Tree:
        """Shapes of what a layer carries, of the same size for any `length`."""
        n, h = self.num_heads, self.memory_dim if kind == "mlstm" else self.cell_dim
        conv = jax.ShapeDtypeStruct((batch_size, self.conv_tokens - 1, n, h), dtype)
        if kind == "mlstm":
            mix = jax.eval_shape(lambda: mlstm.empty(batch_size, n, h, h))
        else:
            mix = jax.eval_shape(lambda: slstm.empty(batch_size, n, h))
        return {"conv": conv, "mix": mix}

    def stream_norm(self, w: Tree, x: Array, name: str = "norm") -> Array:
        """x [B, T, D] after the norm of this name; the last one's is what the head sees."""
        return layer_norm(x, w[name], None, self.norm_eps)

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after a block."""
        h = before_products(self.stream_norm(w, x))
        if kind == "mlstm":
            return constrain(x + self._mlstm(w, h, attend), "batch stream embed"), {}
        x = constrain(x + self._slstm(w, h, attend), "batch stream embed")
        h = self.stream_norm(w, x, "mlp_norm")
        h = feed_forward(self.mlp, w, h, attend.mlp_chunk_tokens)
        return constrain(x + h, "batch stream embed"), {}

    def _conv(self, w: Tree, x: Array, attend: Attend, state: Tree | None) -> tuple[Array, Any]:
        """SiLU of the convolution of x [B, T, N, H], and its state after."""
        taps = w["conv"], w["conv_bias"]
        if state is None:
            return jax.nn.silu(causal_conv(x, *taps, attend.ids)), None
        y, after = conv_from(state["conv"], x, *taps, attend.real)
        return jax.nn.silu(y), after

    def _normed(self, w: Tree, h: Array) -> Array:
        """h [B, T, N, H] normed for each head."""
        unit = layer_norm(h, jnp.ones(h.shape[-1]), None, self.norm_eps)
        return times(unit, w["memory_norm"])

    def _mlstm(self, w: Tree, x: Array, attend: Attend) -> Array:
        by_head = "btd,dnh->btnh"
        x, gate = dots(x, (by_head, w["up"]), (by_head, w["output_gate"]))
        x = constrain(x, "batch seq heads head_dim")

        def run(state: Tree | None) -> tuple[Array, Tree]:
            near, conv = self._conv(w, x, attend, state)
            q, k, v = (by_blocks(a, w[name]) for a, name in ((near, "q"), (near, "k"), (x, "v")))
            i, f = (name_result(a, HEADS) for a in self._gates(w, [q, k, v]))
            size = self.chunk_tokens
            if state is None:
                h, mix = attend.mix(q, k, v, i, f, setting=size), None
            else:
                h, mix = mlstm.mlstm_from(
                    state["mix"], q, k, v, i, f, attend.ids, chunk_tokens=size
                )
            h = self._normed(w, h) + times(near, w["skip"])
            return h, {"conv": conv, "mix": mix}

        return output(w, jax.nn.silu(gate) * _carried(attend, run))

    def _gates(self, w: Tree, qkv: list[Array]) -> list[Array]:
        """Arguments of the input and the forget gates, float32 [B, T, N] each."""
        wide = partial(jnp.einsum, "btnh,nhg->btg", preferred_element_type=jnp.float32)
        each = [wide(a, w["gates"][i].astype(a.dtype)) for i, a in enumerate(qkv)]
        parts = jnp.split(sum(each[1:], each[0]), 2, axis=-1)
        names = "input_gate_bias", "forget_gate_bias"
        return [a + w[name].astype(a.dtype) for a, name in zip(parts, names, strict=True)]

    def _slstm(self, w: Tree, x: Array, attend: Attend) -> Array:
        x = constrain(x.reshape(*x.shape[:2], self.num_heads, -1), "batch seq heads head_dim")

        def run(state: Tree | None) -> tuple[Array, Tree]:
            near, conv = self._conv(w, x, attend, state)
            z, i, f, o = (
                jnp.einsum("btnh,nhk->btnk", a, w["gates"][:, :, at].astype(a.dtype))
                for at, a in enumerate((x, near, near, x))
            )
            z, f, o = (plus(a, w[f"{name}_bias"]) for a, name in
                       ((z, "cell"), (f, "forget_gate"), (o, "output_gate")))  # fmt: skip
            gates = name_result(jnp.stack([z, i, f, o], axis=3), HEADS)
            first = slstm.empty(*(x.shape[i] for i in (0, 2, 3)))
            cells = first if state is None else state["mix"]
            h, mix = slstm.slstm(cells, gates, w["recurrent"], attend.ids, self.chunk_tokens)
            return self._normed(w, h), {"conv": conv, "mix": mix}

        h = _carried(attend, run)
        return h.reshape(*h.shape[:2], -1)

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`. Raises UserError where chunks do not divide it."""
        return _work(self, seq_len)


def _carried(attend: Attend, run: Callable[[Tree | None], tuple[Array, Tree]]) -> Array:
    return attend.carry(lambda: run(None)[0], run)


def by_blocks(x: Array, w: Array) -> Array:
    """y [B, T, N, H] of x [B, T, N, H], in which four numbers are joined by w [N, H, 4]: the
    products of up to 128 of them are one, with zeros between the blocks."""
    n, h, block = w.shape
    size = next(s for s in range(min(TILE, h), 0, -1) if h % s == 0 and s % block == 0)
    w = jnp.moveaxis(w.reshape(n, h // size, size, block), 3, 2)  # [N, G, 4, out]
    same = (jnp.arange(size)[:, None] // block) == (jnp.arange(size) // block)
    dense = jnp.where(same, jnp.tile(w, (1, 1, size // block, 1)), 0).astype(x.dtype)
    parts = x.reshape(*x.shape[:2], n, h // size, size)
    return jnp.einsum("btngc,ngch->btngh", parts, dense).reshape(x.shape)


@lru_cache(256)
def _work(model: XlstmBlocks, seq_len: int) -> Work:
    chunk = model.chunk_of(seq_len)
    d, h, n = model.embed_dim, model.memory_dim, model.num_heads
    memories = model.kinds.count("mlstm")
    cells = model.num_layers - memories
    # convolution, blocks of q, k and v, gates; the memory, and tokens of a chunk as in xLSTM-7B
    around = 2.0 * 2 * d * (model.conv_tokens + 3 * BLOCK + 3 * 2 * n)
    memory = n * (4.0 * h * h + 2 * chunk * h)
    recurrent = 2.0 * d * (model.conv_tokens + 2 * slstm.GATES * model.cell_dim)
    moved = 4.0 * n * moved_numbers(chunk, h, h)
    return Work(
        spec=model.spec(),
        seq_len=seq_len,
        num_layers=model.num_layers,
        embed_dim=d,
        vocab_size=model.vocab_size,
        active={} if model.head == "tied" else {"embed": 0.0},
        mixing_flops=memories * (memory + around) + cells * recurrent,
        mixing_kept=memories * 2.0 * d + cells * d,
        mixing_bytes=memories * moved + cells * 4.0 * CELL_MOVES * d,
    )
