"""Rows of several segments with padding, for tests of attention."""

import jax
import jax.numpy as jnp
import numpy as np

from lmwright.nn import intervals

WAYS_TO_SEE = ("both ways", "near, both ways", "blocks", "none at padding")


def problem(b, t, n, k, h, seed=0):
    """q, k, v, segment ids, and a cotangent of the result."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(1, 4, (b, t)), axis=1).astype(np.int32)
    ids[0, -t // 5 :] = 0  # padding
    q, k, v, g = (rng.standard_normal((b, t, heads, h)).astype("f4") for heads in (n, k, k, n))
    return jax.device_put((q, k, v, ids, g))  # no program for each shape


def seen_by(kind, ids):
    """Intervals of one of WAYS_TO_SEE, and their reach; in the last one some queries see no key."""
    start, end = intervals.causal(ids)
    return {
        "both ways": (intervals.both_ways(ids), intervals.Reach()),
        "near, both ways": (intervals.both_ways(ids, 9), intervals.Reach(9, 9)),
        "blocks": (intervals.blocks(ids, 8), intervals.Reach(after=7)),
        "none at padding": (intervals.Interval(start, jnp.where(ids > 0, end, start)),
                            intervals.Reach(after=0)),
    }[kind]  # fmt: skip
