"""Rows of several segments with padding, for tests of attention."""

import jax.numpy as jnp
import numpy as np

from lmwright.nn import intervals

WAYS_TO_SEE = ("both ways", "near, both ways", "blocks", "none at padding")


def problem(b, t, n, k, h, seed=0):
    """q, k, v, segment ids, and a cotangent of the result."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    ids = jnp.asarray(np.sort(rng.integers(1, 4, (b, t)), axis=1), jnp.int32)
    ids = ids.at[0, -t // 5 :].set(0)  # padding
    return normal(b, t, n, h), normal(b, t, k, h), normal(b, t, k, h), ids, normal(b, t, n, h)


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
