"""Moments: what the inputs of a model's matrices are on calibration rows.

rows --the model, every matrix a `Gauged`--> sums of x x' over all tokens, by matrix
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model
from lmwright.core.leaves import Gauged
from lmwright.core.param import Param, Tree, nest, walk

Moments = dict[str, Array]
"""float32 [*batch, I, I] by path, for a weight [*batch, *inputs, *outputs] of I inputs."""


def moments_shape(param: Param) -> tuple[int, ...]:
    """Shape of a weight's moments."""
    inputs = param.matrix_shape[0]
    return (*param.shape[: len(param.batch)], inputs, inputs)


def measure(
    model: Model,
    w: Tree,
    rows: Iterable[Batch],
    params: Mapping[str, Param],
    compute: Compute,
    each: Callable[[], None] = lambda: None,
) -> Moments:
    """The moments of the weights at the paths of `params` over `rows`, batches of one shape; `each`
    is called after every one. The backward pass by which they come out computes a layer again, so
    one layer's activations are in memory at a time."""
    compute = replace(compute, remat="block", unroll=False)
    total = {path: jnp.zeros(moments_shape(param), jnp.float32) for path, param in params.items()}
    inputs = {path: len(param.inputs) for path, param in params.items()}
    add = jax.jit(partial(_added, model, inputs, compute), donate_argnums=0)
    for batch in rows:
        total = jax.block_until_ready(add(total, w, batch))
        each()
    return total


def _added(
    model: Model, inputs: Mapping[str, int], compute: Compute, total: Moments, w: Tree, batch: Batch
) -> Moments:
    def result(moments: Moments) -> Array:
        leaves = ((p, Gauged(a, moments[p], inputs[p]) if p in moments else a) for p, a in walk(w))
        hidden, _ = model.hidden(nest(leaves), batch, compute)
        return jnp.sum(hidden, dtype=jnp.float32)

    new: dict[str, Any] = jax.grad(result)({p: jnp.zeros_like(a) for p, a in total.items()})
    return {path: total[path] + new[path] for path in total}
