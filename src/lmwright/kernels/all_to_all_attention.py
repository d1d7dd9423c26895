"""Attention over `context` by trading heads for tokens (https://arxiv.org/abs/2309.14509).

    q [B, T/n, N, H] --all-to-all--> [B, T, N/n, H] --any kernel--> --all-to-all--> [B, T/n, N, H]

Each device sees whole rows of a few heads, so the kernel of a single device does the work; the
query heads must divide over context and tensor together. Of fewer kv heads than devices, copies
are sent, such that each device gets the one that its queries share:

    8 query and 2 kv heads, 4 devices:   d0: q 0 1, kv 0   d1: q 2 3, kv 0   d2: q 4 5, kv 1
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, use_abstract_mesh

from lmwright.core.param import Tree
from lmwright.core.sharding import by_shard
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval, Reach

AXIS = "context"


def copies_of(num_kv_heads: int, ways: int) -> int:
    """Number of copies of each kv head that are sent, so that they divide over the devices."""
    return ways // math.gcd(num_kv_heads, ways)


def causal_attention(
    inner: Callable[..., Array],
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    scoring: Scoring,
) -> Array:
    """Causal attention, as `nn.attention.causal_attention`; `inner` has its signature and sees one
    device."""
    attend = partial(inner, scoring=scoring)
    return by_shard(partial(traded, attend))(q, k, v, segment_ids)


def attention(
    inner: Callable[..., Array],
    q: Array,
    k: Array,
    v: Array,
    seen: Interval,
    scoring: Scoring,
    reach: Reach,
) -> Array:
    """Attention over intervals within `reach`, as `nn.intervals.attention`; `inner` has this
    signature and sees one device."""
    attend = partial(inner, scoring=scoring, reach=reach)
    return by_shard(partial(traded, attend))(q, k, v, seen)


def traded(attend: Callable[..., Array], q: Array, k: Array, v: Array, seen: Tree) -> Array:
    """One device's part of `attend(q, k, v, seen)`. `seen`, segment ids or intervals, has no heads:
    every device needs all of it."""
    trade = partial(lax.all_to_all, axis_name=AXIS, tiled=True)
    copies = copies_of(k.shape[2], lax.axis_size(AXIS))
    if copies > 1:
        k, v = (jnp.repeat(a, copies, axis=2) for a in (k, v))
    q, k, v = (trade(a, split_axis=2, concat_axis=1) for a in (q, k, v))
    seen = jax.tree.map(lambda a: lax.all_gather(a, AXIS, axis=1, tiled=True), seen)
    # what follows is one device's own; the kind of device still chooses the kernel
    device = jax.sharding.get_abstract_mesh().abstract_device
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        out = attend(q, k, v, seen)
    return trade(out, split_axis=1, concat_axis=2)
