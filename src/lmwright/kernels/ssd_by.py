"""State spaces of Mamba-2 of whole rows, on each device's own rows and heads, by the kernels of
each platform.

TPU from v4 on     tpu_ssd, where chunks fit it
everything else    nn.ssd, whose chunks the compiler puts together

Where `context` cuts the rows, a device does not know the memory S before its tokens. Each computes
with an empty one and adds what its tokens read of S, which fades by the decays P since its first:

    y = Y + P S^T c      S after = W + M S

W and M are what a device's tokens write and how much of S they leave. Devices exchange them, and
each finds its S from those before it.
"""

import math
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from lmwright.config.registry import Registry
from lmwright.core.compute import Kernels
from lmwright.core.sharding import by_shard, context_ways, tensor_ways
from lmwright.kernels.delta_rule_by import AXIS, GATES, Rule, going_on
from lmwright.nn import ssd as reference
from lmwright.nn.mlstm import documents

KERNELS = Registry(__package__, {"tpu ssd": "tpu_ssd.ssd"})


def ssd(
    c: Array, b: Array, x: Array, dt: Array, g: Array, ids: Array, chunk_tokens: int,
    *, kernels: Kernels, interpret: Any = False,
) -> Array:  # fmt: skip
    """`nn.ssd.ssd` over the mesh that is set. Left to the compiler, the memory that goes from chunk
    to chunk would be whole on every device."""
    groups = b.shape[2]
    c, b = (jnp.repeat(a, math.lcm(groups, tensor_ways()) // groups, axis=2) for a in (c, b))

    def rule(*arrays: Array) -> Array:
        own = *arrays, chunk_tokens
        y = KERNELS["tpu ssd"](*own, interpret=interpret) if kernels == "tpu" else None
        return reference.ssd(*own) if y is None else y

    def local(x: Array, c: Array, b: Array, ids: Array, *gates: Array) -> Array:
        return rule(c, b, x, *gates, ids)

    if (ways := context_ways()) > 1:
        local, ids = partial(_of_a_piece, ways, rule), documents(ids)
    return by_shard(local, GATES, GATES)(x, c, b, ids, dt, g)


def _of_a_piece(
    ways: int, rule: Rule, x: Array, c: Array, b: Array, docs: Array, dt: Array, g: Array
) -> Array:
    """y [B, t, N, H] of a device's own tokens; `docs` [B, t] is the document of each."""
    docs = going_on(ways, docs)
    y = rule(c, b, x, dt, g, docs)
    begun, ours = docs == 1, docs == docs[:, -1:]
    fades = jnp.where(begun[..., None], jnp.exp(lax.cumsum(g, axis=1)), 0.0)  # P
    later = lax.cumsum(jnp.pad(g[:, 1:], ((0, 0), (0, 1), (0, 0))), axis=1, reverse=True)
    share = jnp.where(ours[..., None], dt * jnp.exp(later), 0.0)

    of_group = lambda a: a.reshape(*a.shape[:2], b.shape[2], -1, *a.shape[3:])  # noqa: E731
    wide = partial(jnp.einsum, preferred_element_type=jnp.float32)
    left = of_group((share[..., None] * x).astype(x.dtype))  # [B, t, G, R, H]
    written = wide("btgk,btgrh->bgrkh", b, left)
    before = _before(ways, written.reshape(x.shape[0], -1, *written.shape[3:]), fades[:, -1])
    held = before.reshape(written.shape).astype(c.dtype)
    read = wide("btgk,bgrkh->btgrh", c, held) * of_group(fades)[..., None]
    return (y + read.reshape(x.shape)).astype(x.dtype)


def _before(ways: int, written: Array, kept: Array) -> Array:
    """The memory [B, N, K, H] before a device's tokens, which write `written` into it and leave
    `kept` [B, N] of it."""

    def go_on(memory: Array, piece: tuple[Array, Array]) -> tuple[Array, Array]:
        new, share = piece
        return new + share[..., None, None] * memory, memory

    pieces = lax.all_gather((written, kept), AXIS)
    _, before = lax.scan(go_on, jnp.zeros_like(written), pieces)
    return lax.dynamic_index_in_dim(before, lax.axis_index(AXIS), keepdims=False)
