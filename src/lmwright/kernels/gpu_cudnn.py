"""Attention by cuDNN through `jax.nn`, for rows of one document: with several it would read a mask
of all pairs, so other kernels take those.
"""

from functools import cache

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Reach


@cache
def is_installed() -> bool:
    """True if JAX finds cuDNN."""
    from jax._src.lib import cuda_versions

    try:
        return cuda_versions is not None and cuda_versions.cudnn_get_version() > 0
    except RuntimeError:
        return False


def fits(q: Array, scoring: Scoring, reach: Reach) -> bool:
    """True for what cuDNN computes on every card from Ampere on. Causal attention alone: an
    objective may cut the end of a row off, which only queries there notice."""
    head_dim = q.shape[3]
    narrow = q.dtype == jnp.bfloat16 and head_dim % 8 == 0 and head_dim <= 128
    return narrow and reach.causal and scoring.soft_cap is None and is_installed()


def attention(q: Array, k: Array, v: Array, scoring: Scoring, reach: Reach) -> Array:
    """Attention of rows that are one document each, for which `fits` holds; shapes as in
    `nn.intervals.attention`."""
    return jax.nn.dot_product_attention(
        q, k, v, scale=scoring.scale, is_causal=True, implementation="cudnn",
        local_window_size=None if reach.before is None else (reach.before, 0),
    )  # fmt: skip
