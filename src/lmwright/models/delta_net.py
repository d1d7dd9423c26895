"""Layers with a gated delta rule (https://arxiv.org/abs/2412.06464) in the place of attention.

    inputs --> conv --> SiLU --> q, k of length 1, v --> delta rule --> norm of each head
           --> times silu(output gate) --> out

A family says what is convolved and how q, k and v come of it: several arrays, each with filters of
its own. G heads of keys and N of values, each of which has a memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import PositiveInt, section
from lmwright.core.compute import HEADS
from lmwright.core.contract import Work
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.weight import dot, name_result
from lmwright.errors import UserError
from lmwright.kernels.select import KERNELS
from lmwright.models.block import into_stream
from lmwright.models.decoder import Decoder, repeated
from lmwright.models.layers import Attend
from lmwright.nn.causal_conv import causal_conv, conv_from
from lmwright.nn.delta_rule import delta_rule_from, empty, unit
from lmwright.nn.norm import rms_norm

# how often a chunk's memory, keys and values, its matrix that is inverted, and what convolutions
# read are moved in a forward pass, by what the TPU compiler says: in the kernel, of what its cycles
# would move, and in products by themselves, where small ones take as long
KERNEL_MOVES, MOVES = (0.0, 4.5, 0.0, 4.8), (27.0, 13.0, 0.12, 4.8)
KERNEL_CHUNKS = (64, 128)
Mixer = Literal["linear", "full"]
GATES = ("write_gate", "decay_gate")
CONV_TOKENS = "Tokens that a convolution sees, the token itself included."
CHUNK_TOKENS = (
    "Tokens that a linear layer computes together; between chunks goes a memory. The results do "
    "not depend on it, but time and memory do."
)


@section
class DeltaNet(Decoder):
    """A decoder of which some layers have such memories."""

    mixer: ClassVar[str] = "delta rule and attention"

    mixer_pattern: Annotated[
        tuple[Mixer, ...],
        Field(
            description="Mixer of each layer, a linear one or full attention; the pattern repeats "
            "over all layers."
        ),
    ] = ("linear", "linear", "linear", "full")
    linear_num_key_heads: PositiveInt
    linear_num_value_heads: PositiveInt
    conv_tokens: Annotated[int, Field(ge=2, description=CONV_TOKENS)] = 4
    chunk_tokens: Annotated[int, Field(ge=1, description=CHUNK_TOKENS)] = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            raise UserError(
                f"model.linear_num_value_heads: {values} is not a multiple of "
                f"model.linear_num_key_heads = {keys}; use a multiple, such as "
                f"{keys * max(1, round(values / keys))}"
            )

    @property
    def memory_dims(self) -> tuple[int, int]:
        """Widths of a key and of a value in linear layers."""
        raise NotImplementedError

    @property
    def convolved(self) -> dict[str, tuple[int, int]]:
        """Heads, and their width, that the filters of each name see."""
        raise NotImplementedError

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer: its mixer."""
        return repeated("mixer_pattern", self.mixer_pattern, self.num_layers, '["linear", "full"]')

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer with attention: none."""
        return (None,) * self.kinds.count("full")

    @property
    def heads_text(self) -> str:
        """The model's heads and memories in words."""
        (keys, values), count = self.memory_dims, self.linear_num_value_heads
        return f"{super().heads_text} or {count} memories of {keys} x {values}"

    def memory_spec(self) -> Tree:
        """Weights of a linear layer but those before its convolutions and gates."""
        n, h, taps = self.linear_num_value_heads, self.memory_dims[1], self.conv_tokens
        std = into_stream(self) * (n * h) ** -0.5
        filters = {
            name: Param("heads head_dim blocks", (*heads, taps), std=(3 * taps) ** -0.5)
            for name, heads in self.convolved.items()
        }
        return filters | {
            # steps over what the paper's code draws from: memories of 1000 tokens to less than one
            "a_log": Param("heads", (n,), fill=0.0, fill_to=2.77),
            "dt_bias": Param("heads", (n,), fill=-6.9, fill_to=-2.25),
            "memory_norm": Param("head_dim", (h,), fill=1.0),
            "out": Param("heads head_dim -> embed", (n, h, self.embed_dim), std=std),
        }

    def state(self, kind: str, *, batch_size: int, length: int, dtype: jnp.dtype) -> Tree:
        """Shapes of what a layer carries: keys and values, or the last tokens of its convolutions
        and float32 memories, of the same size for any `length`."""
        if kind == "full":
            return super().state(kind, batch_size=batch_size, length=length, dtype=dtype)
        before, n = (batch_size, self.conv_tokens - 1), self.linear_num_value_heads
        memory = jax.eval_shape(lambda: empty(batch_size, n, *self.memory_dims))
        last = {name: jax.ShapeDtypeStruct((*before, *heads), dtype)
                for name, heads in self.convolved.items()}  # fmt: skip
        return {**last, "memory": memory}

    def remembered(
        self, w: Tree, inputs: Mapping[str, Array], gate: Array, rates: tuple[Array, Array],
        qkv: Callable[..., tuple[Array, Array, Array]], attend: Attend, norm_eps: float,
    ) -> Array:  # fmt: skip
        """[B, T, D] of what is convolved, by the names of `convolved` [B, T, heads, width], the
        output gate [B, T, N, H], and strengths and log decays [B, T, N]; `qkv` makes queries, keys
        and values of the convolved arrays in their order."""
        ids, size = attend.ids, self.chunk_tokens
        # the filter of the token itself first
        taps = {name: jnp.moveaxis(w[name], -1, 0)[::-1] for name in inputs}

        def whole() -> Array:
            near = (causal_conv(a, taps[name], None, ids) for name, a in inputs.items())
            return KERNELS["delta rule"](*qkv(*near), *rates, ids, size, kernels=attend.kernels)

        def on(state: Tree) -> tuple[Array, Tree]:
            pairs = [conv_from(state[name], a, taps[name], None, attend.real)
                     for name, a in inputs.items()]  # fmt: skip
            mixed = *qkv(*(near for near, _ in pairs)), *rates, ids
            h, memory = delta_rule_from(state["memory"], *mixed, chunk_tokens=size)
            after = dict(zip(inputs, (last for _, last in pairs), strict=True))
            return h, {**after, "memory": memory}

        h = rms_norm(attend.carry(whole, on), w["memory_norm"], norm_eps)  # [B, T, N, H]
        return dot("btnh,nhd->btd", h * jax.nn.silu(gate), w["out"])

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`."""
        return _work(self, seq_len)


def write_and_decay(w: Tree, x: Array) -> tuple[Array, Array]:
    """Inputs of the gates of writing and of decay, float32 [B, T, N] of x [B, T, D]."""
    write, decay = (dot("btd,dn->btn", x, w[name], out_dtype=jnp.float32) for name in GATES)
    return name_result(write, HEADS), name_result(decay, HEADS)


def mixed(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values as the delta rule reads them, of convolved ones."""
    q, k, v = (jax.nn.silu(a) for a in (q, k, v))
    return unit(q), unit(k), constrain(v, "batch seq heads head_dim")


@lru_cache(256)
def _work(model: DeltaNet, seq_len: int) -> Work:
    work: Work = Decoder.work(model, seq_len)
    if not (layers := model.kinds.count("linear")):
        return work
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    (k, h), chunk = model.memory_dims, min(model.chunk_tokens, seq_len)
    channels = sum(heads * width for heads, width in model.convolved.values())
    # the memory read twice and written; tokens before in a chunk, half of it on average, and the
    # triangular matrix that is inverted
    memory = values * (6.0 * k * h + 2 * chunk * h + chunk**2 / 3) + keys * 2 * chunk * k
    of_memory, token, inverse, near = KERNEL_MOVES if chunk in KERNEL_CHUNKS else MOVES
    moved = values * (of_memory * k * h / chunk + token * (k + h) + inverse * chunk**2)
    moved += near * channels
    more: dict[str, Any] = {} if layers < model.num_layers else {"attention": None}
    return replace(
        work,
        mixing_flops=layers * (memory + 2.0 * model.conv_tokens * channels),
        mixing_kept=layers * (values * h + 6.5 * channels),  # and around convolutions
        mixing_bytes=4.0 * layers * moved,
        **more,
    )
