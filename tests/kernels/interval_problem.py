"""Intervals of keys for tests of the kernels that take them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from lmwright.nn import intervals
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval, Reach


def odd(ids, seed=1):
    """Any intervals, as no mask has them; a third of them empty, and those of a whole stretch."""
    rng, (b, t) = np.random.default_rng(seed), ids.shape
    start, end = rng.integers(0, t, (b, t)), rng.integers(1, t + 1, (b, t))
    end = np.where(rng.random((b, t)) < 0.3, start, end)
    end[:, t // 3 : 2 * t // 3] = 0
    return jax.device_put(Interval(start.astype(np.int32), end.astype(np.int32)))


def odd_within(ids, before, after):
    """Those of them within reach."""
    (start, end), at = odd(ids), jnp.arange(ids.shape[1])
    return Interval(jnp.maximum(start, at - before), jnp.minimum(end, at + 1 + after))


def without_padding(ids):
    """Causal, of which padding sees nothing and is not seen."""
    start, end = intervals.causal(ids)
    return Interval(start, jnp.where(ids > 0, end, 0))


KINDS = {
    "causal window": (lambda ids: intervals.causal(ids, 70), intervals.causal_reach(70)),
    "both ways": (intervals.both_ways, intervals.both_ways_reach()),
    "near": (lambda ids: intervals.both_ways(ids, 40), intervals.both_ways_reach(40)),
    "itself": (lambda ids: intervals.both_ways(ids, 0), intervals.both_ways_reach(0)),
    "far": (lambda ids: intervals.both_ways(ids, 150), intervals.both_ways_reach(150)),
    "blocks": (lambda ids: intervals.blocks(ids, 48), intervals.blocks_reach(48)),
    "none at padding": (without_padding, Reach(after=0)),
    "odd": (odd, Reach()),
}
EXACT = [kind for kind, (_, reach) in KINDS.items() if reach.exact]


def with_gradients(attend, seen, q, k, v, g, scoring=None):
    """The result of `attend(q, k, v, seen, scoring)` and its gradients."""
    scoring = scoring or Scoring(0.3, soft_cap=2.0)
    out, back = jax.vjp(lambda *a: attend(*a, seen, scoring), q, k, v)
    return out, *back(g)


@partial(jax.jit, static_argnums=(2,))
def plain(seen, arrays, scoring):
    """By the plain reference; one program for all intervals of a shape."""
    return with_gradients(intervals.attention, seen, *arrays, scoring)


def check(attend, seen, arrays, scoring=None):
    """`attend` equals the plain reference, and gives zeros where a query sees nothing."""
    run = jax.jit(lambda seen, arrays: with_gradients(attend, seen, *arrays, scoring))
    got, want = run(seen, arrays), plain(seen, arrays, scoring)
    for a, b in zip(got, map(np.asarray, want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(np.abs(b).max()) + 1e-5)
    blind = np.asarray(seen.start) >= np.asarray(seen.end)
    assert not np.asarray(got[0])[blind].any() and not np.asarray(got[1])[blind].any()
