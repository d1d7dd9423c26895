"""Moments: what the inputs of a model's matrices are on calibration rows.

    rows --> stream --> layer, every matrix a `Gauged` --> stream --> ...
                        sums of x x' over all tokens, by matrix

Layers are measured one after the other, so the moments of one layer are in memory at a time. Of
families whose layers read more than the stream (Gemma 4, xLSTM, some encoders) all are measured at
once, by differentiating the whole model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import getitem
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model
from lmwright.core.leaves import Gauged
from lmwright.core.param import Param, Tree, nest, walk
from lmwright.models.cached import attention_of
from lmwright.models.chunks import Chunked
from lmwright.models.decoder import Decoder
from lmwright.models.layers import Attend, Kernel, LayerKind
from lmwright.models.sinks import Sinks

Moments = dict[str, Array]
"""float32 [*batch, I, I] by path, for a weight [*batch, *inputs, *outputs] of I inputs."""
OWN_WAY = ("hidden_by", "with_inputs", "tables_after")
"""Methods of `Decoder` by which a family's layers may read more than the stream."""


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
    model: Model, w: Tree, rows: Sequence[Batch], params: Mapping[str, Param], compute: Compute
) -> Iterator[Measured]:
    """The moments of the weights at the paths of `params` over `rows`, batches of one shape, layer
    after layer."""
    if isinstance(model, Decoder) and goes_by_layers(model):
        yield from _by_layers(model, w, rows, params, compute)
        return
    for path, moments in at_once(model, w, rows, params, compute).items():
        for layer in range(params[path].shape[0]):
            yield Measured(path, layer, moments[layer])


def goes_by_layers(model: Decoder) -> bool:
    """True if a layer reads the stream and the rotations alone, so that one can be run after the
    other."""
    own = any(getattr(type(model), name) is not getattr(Decoder, name) for name in OWN_WAY)
    known = [each.hidden for each in (Decoder, Sinks, Chunked)]
    return not own and not model.both_ways and type(model).hidden in known


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
    model: Decoder, w: Tree, rows: Sequence[Batch], params: Mapping[str, Param], compute: Compute
) -> Iterator[Measured]:
    kernel = attention_of(model, compute)
    begin = jax.jit(lambda w, b: model.placed(w, model.embedded(w, b.tokens, compute), b.positions))
    outer = {name: leaf for name, leaf in w.items() if name not in {s.name for s in model.spans}}
    stream = [begin(outer, batch) for batch in rows]
    programs: dict[Any, tuple[Any, Any]] = {}
    for span in model.spans:
        places = list(span.places())
        for number in range(span.repeats):
            for path, kind, _ in places:
                stack = reduce(getitem, path.split("."), w)
                layer = jax.tree.map(lambda a, n=number: a[n], stack)
                inside = {
                    name: params[f"{path}.{name}"].unstacked()
                    for name, _ in walk(layer) if f"{path}.{name}" in params
                }  # fmt: skip
                if kind not in programs:
                    run = partial(_run, model, kind, kernel, compute)
                    add = jax.jit(partial(_added, run, inside), donate_argnums=0)
                    programs[kind] = jax.jit(run), add
                run, add = programs[kind]
                total = _zeros(inside)
                for x, batch in zip(stream, rows, strict=True):
                    total = add(total, layer, x, batch)
                for name in inside:
                    yield Measured(f"{path}.{name}", number, total.pop(name))
                stream = [run(layer, x, batch) for x, batch in zip(stream, rows, strict=True)]


def _run(
    model: Decoder, kind: LayerKind, kernel: Kernel, compute: Compute, w: Tree, x: Array,
    batch: Batch,
) -> Array:  # fmt: skip
    """x [B, T, D] after a layer."""

    def attend(q: Array, k: Array, v: Array, setting: Any, *more: Array) -> Array:
        return kernel(q, k, v, *more, batch.segment_ids, setting)

    tables = model.tables(batch.positions, batch.tokens.shape[1])
    own = Attend(attend, batch.segment_ids, kernels=compute.kernels)
    return kind.run(model.layer, w, x, tables, own)[0]


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
