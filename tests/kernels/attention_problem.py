"""Rows of several segments with padding, for tests of attention."""

import jax.numpy as jnp
import numpy as np


def problem(b, t, n, k, h, seed=0):
    """q, k, v, segment ids, and a cotangent of the result."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    ids = jnp.asarray(np.sort(rng.integers(1, 4, (b, t)), axis=1), jnp.int32)
    ids = ids.at[0, -t // 5 :].set(0)  # padding
    return normal(b, t, n, h), normal(b, t, k, h), normal(b, t, k, h), ids, normal(b, t, n, h)
