"""Queries, keys and values within a limit, as in OLMo and OLMoE."""

from typing import Annotated

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import Positive

QkvLimit = Annotated[
    Positive | None,
    Field(description="Largest magnitude of queries, keys and values; none if unset."),
]


def limited(limit: float | None, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values with no number beyond the limit, if there is one."""
    if limit is None:
        return q, k, v
    return jnp.clip(q, -limit, limit), jnp.clip(k, -limit, limit), jnp.clip(v, -limit, limit)
