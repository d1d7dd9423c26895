"""Pipeline: the stack's layers cut over `stage`, microbatches passed from stage to stage.

    tick      0    1    2    3    4          A microbatches, S stages: A + S - 1 ticks
    stage 0   m0   m1   m2   -    -
    stage 1   -    m0   m1   m2   -          a stage without a microbatch computes for nothing:
    stage 2   -    -    m0   m1   m2         (S - 1) / (A + S - 1) of the time

The schedule of GPipe (https://arxiv.org/abs/1811.06965), as one program: all stages are one
vectorized call whose first axis lies on `stage`, and passing on is a shift along that axis
(https://arxiv.org/abs/2105.04663), so that the backward pass follows by differentiation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.leaves import map_keys
from lmwright.core.param import Tree
from lmwright.core.sharding import batch_ways, constrain

AXIS = "stage"
Block = Callable[..., tuple[Array, dict[str, Array]]]


def num_stages() -> int:
    """Stages of the mesh of the program being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape[AXIS]


def interleaved(a: Array) -> Array:
    """[A, B, ...] to rows [B A, ...]: row j of microbatch a becomes row j A + a, so that
    rows stay on the devices that they are on."""
    return a.swapaxes(0, 1).reshape(a.shape[0] * a.shape[1], *a.shape[2:])


def microbatches(rows: Array, num: int) -> Array:
    """The inverse of `interleaved`."""
    return rows.reshape(rows.shape[0] // num, num, *rows.shape[1:]).swapaxes(0, 1)


def of_microbatch(w: Tree, number: Array) -> Tree:
    """Weights of which adapters drop inputs as in one microbatch of those computed at once."""
    return map_keys(lambda key: lax.dynamic_index_in_dim(key, number, -2), w)


def pipelined(
    block: Block, layers: Tree, x: Array, *side: Any, num_microbatches: int
) -> tuple[Array, dict[str, Array]]:
    """Applies `block(layers[i], x, *side)` for each i to x [R, T, D]; returns x and the sums of
    what else the blocks return. Leaves of `layers` are [L, ...], those of `side` [R, ...]. Fewer
    microbatches are used where R has not as many. Where L does not divide over the stages, each
    of them computes all layers, one microbatch after the other."""
    stages = num_stages()
    ways = batch_ways(jax.sharding.get_abstract_mesh())
    num = num_microbatches
    while x.shape[0] % (num * ways):
        num -= 1
    cut = partial(microbatches, num=num)
    summed = partial(jax.tree.map, lambda a: jnp.sum(a, axis=0))
    x, side = cut(x), jax.tree.map(cut, side)

    def run_stage(at: Array, layers: Tree, x: Array, side: tuple) -> tuple[Array, dict[str, Array]]:
        x, aux = lax.scan(lambda x, w: block(of_microbatch(w, at), x, *side), x, layers)
        return x, summed(aux)

    if jax.tree.leaves(layers)[0].shape[0] % stages:
        x, aux = lax.map(lambda a: run_stage(a[0], layers, *a[1:]), (jnp.arange(num), x, side))
        return interleaved(x), summed(aux)
    by_stage = jax.tree.map(lambda a: a.reshape(stages, -1, *a.shape[1:]), layers)
    run_stages = jax.vmap(run_stage, spmd_axis_name=AXIS)

    def tick(done: Array, now: tuple[Array, Array]) -> tuple[Array, tuple]:
        time, new = now
        x = jnp.roll(done, 1, axis=0).at[0].set(new)
        x = constrain(x, "stages batch stream embed")
        at = time - jnp.arange(stages)  # each stage's microbatch
        works = (at >= 0) & (at < num)
        at = jnp.clip(at, 0, num - 1)
        here = jax.tree.map(lambda a: jnp.take(a, at, axis=0), side)
        done, aux = run_stages(at, by_stage, x, here)
        done = constrain(done, "stages batch stream embed")
        aux = jax.tree.map(lambda a: jnp.tensordot(works.astype(a.dtype), a, 1), aux)
        return done, (done, aux)

    coming = jnp.pad(x, [(0, stages - 1), *[(0, 0)] * (x.ndim - 1)])
    start = jnp.zeros((stages, *x.shape[1:]), x.dtype)
    _, (done, aux) = lax.scan(tick, start, (jnp.arange(num + stages - 1), coming))
    return interleaved(done[stages - 1 :, -1]), summed(aux)
