"""Moments: what the inputs of a model's matrices are on calibration rows.

    rows --> stream --> layer, every matrix a `Gauged` --> stream --> ...
                        sums of x x' over all tokens, by matrix

Layers are measured one after the other, so the moments of one layer are in memory at a time. Of
families whose layers read more than the stream (Gemma 4, xLSTM, some encoders) all are measured at
once, by differentiating the whole model.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model
from lmwright.core.leaves import Gauged
from lmwright.core.param import Param, Tree, nest, walk
from lmwright.models.decoder import Decoder
from lmwright.quantize.layers import Runner, Weights, goes_by_layers, layers_of

Moments = dict[str, Array]
"""float32 [*batch, I, I] by path, for a weight [*batch, *inputs, *outputs] of I inputs."""
Done = Collection[tuple[str, int]]
"""Weights, by path and layer, that need no measuring."""


class Measured(NamedTuple):
    """The moments of a weight of one layer."""

    path: str
    layer: int
    """Its number in the stack of the weight."""
    moments: Array
    """float32 [*batch, I, I], without the axis of layers."""


def moments_shape(param: Param) -> tuple[int, ...]:
    """Shape of a weight's moments."""
    inputs = param.matrix_shape[0]
    return (*param.shape[: len(param.batch)], inputs, inputs)


def measured(
    model: Model,
    weights: Weights,
    rows: Sequence[Batch],
    params: Mapping[str, Param],
    compute: Compute,
    done: Done = (),
) -> Iterator[Measured]:
    """The moments of the weights at the paths of `params` over `rows`, batches of one shape, layer
    after layer, but for those that are `done`."""
    wanted = {(path, layer) for path, param in params.items() for layer in range(param.shape[0])}
    if not (wanted := wanted - set(done)):
        return
    if goes_by_layers(model):
        yield from _by_layers(model, weights, rows, params, compute, wanted)
        return
    for path, moments in at_once(model, weights.tree(), rows, params, compute).items():
        for layer in range(params[path].shape[0]):
            if (path, layer) in wanted:
                yield Measured(path, layer, moments[layer])


def at_once(
    model: Model, w: Tree, rows: Sequence[Batch], params: Mapping[str, Param], compute: Compute
) -> Moments:
    """The moments of all weights of any model. The backward pass by which they come out computes a
    layer again, so one layer's activations are in memory at a time."""
    compute = replace(compute, remat="block", unroll=False)

    def result(w: Tree, batch: Batch) -> Array:
        return model.hidden(w, batch, compute)[0]

    add = jax.jit(partial(_added, result, params), donate_argnums=0)
    total = _zeros(params)
    for batch in rows:
        total = jax.block_until_ready(add(total, w, batch))
    return total


def _by_layers(
    model: Decoder,
    weights: Weights,
    rows: Sequence[Batch],
    params: Mapping[str, Param],
    compute: Compute,
    wanted: set[tuple[str, int]],
) -> Iterator[Measured]:
    runner, outer = Runner(model, compute), weights.outer()
    stream = [runner.begin(outer, batch) for batch in rows]
    del outer
    programs: dict[Any, Any] = {}
    for stack, number, kind in layers_of(model):
        layer = weights.layer(stack, number)
        inside = {name: params[path].unstacked() for name in layer
                  if (path := f"{stack}.{name}") in params}  # fmt: skip
        own = {(f"{stack}.{name}", number) for name in inside}
        if own & wanted:
            if kind not in programs:
                run = partial(runner.traced, kind)
                programs[kind] = jax.jit(partial(_added, run, inside), donate_argnums=0)
            total = _zeros(inside)
            for x, batch in zip(stream, rows, strict=True):
                total = programs[kind](total, layer, x, batch)
            for name in inside:
                moments = total.pop(name)
                if (f"{stack}.{name}", number) in wanted:
                    yield Measured(f"{stack}.{name}", number, moments)
            if not (wanted := wanted - own):
                return
        stream = [runner.run(kind, layer, x, b) for x, b in zip(stream, rows, strict=True)]


def _zeros(params: Mapping[str, Param]) -> Moments:
    return {path: jnp.zeros(moments_shape(param), jnp.float32) for path, param in params.items()}


def _added(
    run: Callable[..., Array], params: Mapping[str, Param], total: Moments, w: Tree, *inputs: Any
) -> Moments:
    """`total` and the moments of `run(w, *inputs)`."""

    def result(moments: Moments) -> Array:
        leaves = (
            (p, Gauged(a, moments[p], len(params[p].inputs)) if p in moments else a)
            for p, a in walk(w)
        )
        return jnp.sum(run(nest(leaves), *inputs), dtype=jnp.float32)

    new: Moments = jax.grad(result)(_zeros(params))
    return {path: total[path] + new[path] for path in total}
