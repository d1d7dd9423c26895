"""The gated delta rule of whole rows, on each device's own rows and heads, by the kernels of each
platform.

TPU from v4 on     tpu_delta_rule, where chunks fit it
everything else    nn.delta_rule, whose chunks the compiler puts together
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from lmwright.core.compute import Kernels
from lmwright.core.sharding import by_shard, tensor_ways
from lmwright.kernels.select import KERNELS
from lmwright.nn import delta_rule as reference

GATES = "batch seq heads"


def delta_rule(
    q: Array, k: Array, v: Array, b: Array, g: Array, ids: Array, chunk_tokens: int,
    *, kernels: Kernels, interpret: Any = False,
) -> Array:  # fmt: skip
    """`nn.delta_rule.delta_rule` over the mesh that is set. Left to the compiler, the memory that
    goes from chunk to chunk would be whole on every device."""
    if q.shape[2] % tensor_ways():
        q, k = (jnp.repeat(a, v.shape[2] // a.shape[2], axis=2) for a in (q, k))

    def local(v: Array, q: Array, k: Array, ids: Array, *gates: Array) -> Array:
        own = q, k, v, *gates, ids, chunk_tokens
        if kernels == "tpu":
            o = KERNELS["tpu delta rule"](*own, interpret=interpret)
            return reference.delta_rule(*own) if o is None else o
        return reference.delta_rule(*own)

    return by_shard(local, GATES, GATES)(v, q, k, ids, b, g)
