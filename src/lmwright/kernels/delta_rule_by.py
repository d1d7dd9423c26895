"""The gated delta rule of whole rows, on each device's own rows and heads, by the kernels of each
platform.

TPU from v4 on     tpu_delta_rule, where chunks fit it
everything else    nn.delta_rule, whose chunks the compiler puts together

Where `context` cuts the rows, a device does not know the memory S before its tokens. All that they
do is linear in it, so each computes with an empty memory and, as further dims of values, with the
unit matrix in the place of S:

    o = O + P S        S after = N + M S

Devices exchange N and M, [K, H] and [K, K] of each head, and each finds its S from those before it.
Both are read and written by tokens that stand around a device's own, whose keys or queries are the
unit vectors.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.compute import Kernels
from lmwright.core.sharding import by_shard, context_ways, tensor_ways
from lmwright.kernels.select import KERNELS
from lmwright.nn import delta_rule as reference
from lmwright.nn.mlstm import documents

AXIS, GATES = "context", "batch seq heads"
Rule = Callable[..., Array]


def delta_rule(
    q: Array, k: Array, v: Array, b: Array, g: Array, ids: Array, chunk_tokens: int,
    *, kernels: Kernels, interpret: Any = False,
) -> Array:  # fmt: skip
    """`nn.delta_rule.delta_rule` over the mesh that is set. Left to the compiler, the memory that
    goes from chunk to chunk would be whole on every device."""
    if q.shape[2] % tensor_ways():
        q, k = (jnp.repeat(a, v.shape[2] // a.shape[2], axis=2) for a in (q, k))

    def rule(*arrays: Array) -> Array:
        own = *arrays, chunk_tokens
        o = KERNELS["tpu delta rule"](*own, interpret=interpret) if kernels == "tpu" else None
        return reference.delta_rule(*own) if o is None else o

    def local(v: Array, q: Array, k: Array, ids: Array, *gates: Array) -> Array:
        return rule(q, k, v, *gates, ids)

    if (ways := context_ways()) > 1:
        local, ids = partial(_of_a_piece, ways, rule, chunk_tokens), documents(ids)
    return by_shard(local, GATES, GATES)(v, q, k, ids, b, g)


def _of_a_piece(
    ways: int, rule: Rule, chunk_tokens: int,
    v: Array, q: Array, k: Array, docs: Array, b: Array, g: Array,
) -> Array:  # fmt: skip
    """o [B, t, N, H] of a device's own tokens; `docs` [B, t] is the document of each."""
    length, width, size = v.shape[1], v.shape[3], k.shape[3]
    docs = going_on(ways, docs)
    behind = size + -(length + 2 * size) % chunk_tokens  # of whole chunks

    def units(a: Array, count: int) -> Array:
        """Unit vectors of `count` tokens, as wide as those of a."""
        unit = jnp.eye(count, size, dtype=a.dtype)[:, None]
        return jnp.broadcast_to(unit, (len(a), count, a.shape[2], size))

    def around(a: Array, first: Array | int = 0, after: Array | int = 0) -> Array:
        """a [B, t, ...] of a device's own tokens, and of those around them."""
        sides = ((first, size), (after, behind))
        before, then = (jnp.broadcast_to(x, (len(a), n, *a.shape[2:])) for x, n in sides)
        return jnp.concatenate([before.astype(a.dtype), a, then.astype(a.dtype)], axis=1)

    room = ((0, 0),) * 3
    o = rule(
        around(q, after=units(q, behind)), around(k, units(k, size)),
        around(jnp.pad(v, (*room, (0, size))), jnp.pad(units(v, size), (*room, (width, 0)))),
        around(b, 1), around(g), around(docs, 1, docs[:, -1:]),
    )  # fmt: skip
    own = o[:, size : size + length]
    after = o[:, size + length :][:, :size].astype(jnp.float32)
    scale = (jnp.ones((), q.dtype) * size**-0.5).astype(jnp.float32)  # as `rule` rounds it
    before = _before(ways, width, jnp.moveaxis(after / scale, 1, 2))
    read = jnp.einsum(
        "btnk,bnkh->btnh", own[..., width:], before.astype(o.dtype),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return (own[..., :width] + read).astype(v.dtype)


def going_on(ways: int, docs: Array) -> Array:
    """`docs` [B, t], the document of each of a device's tokens, counted so that 1 is the one that
    goes on from the device before."""
    last = lax.ppermute(docs[:, -1:], AXIS, [(i, i + 1) for i in range(ways - 1)])
    return docs - jnp.where(lax.axis_index(AXIS) == 0, 1, last) + 1


def _before(ways: int, width: int, piece: Array) -> Array:
    """The memory [B, N, K, H] before a device's tokens; `piece` [B, N, K, H + K] is N and M."""

    def go_on(memory: Array, piece: Array) -> tuple[Array, Array]:
        new, moves = piece[..., :width], piece[..., width:]
        exact = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
        return new + exact("bnkj,bnjh->bnkh", moves, memory), memory

    pieces = lax.all_gather(piece, AXIS)  # [ways, B, N, K, H + K]
    _, before = lax.scan(go_on, jnp.zeros_like(piece[..., :width]), pieces)
    return lax.dynamic_index_in_dim(before, lax.axis_index(AXIS), keepdims=False)
