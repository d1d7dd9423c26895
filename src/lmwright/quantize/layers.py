"""A model whose weights stay in its files: a layer is read, run over all rows, and let go.

    files --a layer--> run over the streams [B, T, D] of all batches --> the next layer

So a model is measured and compared that does not fit into memory, if one of its layers does.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, HfModel
from lmwright.core.param import Tree, nest
from lmwright.formats.hf_layout import Slot, slots
from lmwright.formats.hf_stream import from_hf, on_devices, part_of, stored_kind
from lmwright.models.cached import attention_of
from lmwright.models.chunks import Chunked
from lmwright.models.decoder import Decoder
from lmwright.models.layers import Attend, LayerKind
from lmwright.models.sinks import Sinks

OWN_WAY = ("hidden_by", "with_inputs", "tables_after")
"""Methods of `Decoder` by which a family's layers may read more than the stream."""


class Place(NamedTuple):
    """A layer: where its weights are stacked, their number there, and its kind."""

    stack: str
    number: int
    kind: LayerKind


def goes_by_layers(model: Any) -> bool:
    """True if a layer reads the stream and the rotations alone, so that one can be run after the
    other."""
    if not isinstance(model, Decoder) or model.both_ways:
        return False
    own = any(getattr(type(model), name) is not getattr(Decoder, name) for name in OWN_WAY)
    return not own and type(model).hidden in [each.hidden for each in (Decoder, Sinks, Chunked)]


def layers_of(model: Decoder) -> Iterator[Place]:
    """The layers from the first to the last."""
    for span in model.spans:
        for number in range(span.repeats):
            for stack, kind, _ in span.places():
                yield Place(stack, number, kind)


class Weights:
    """The weights of a model, read from tensors by Hugging Face name when they are asked for, in
    the dtype in which they are stored."""

    def __init__(self, model: HfModel, tensors: Mapping[str, Any]):
        self._model, self._tensors = model, tensors
        self._parts: dict[tuple[str, int | None], list[Slot]] = {}
        self._names: dict[str, list[str]] = {}
        for slot in slots(model):
            layer = slot.at[0] if slot.at else None
            self._parts.setdefault((slot.path, layer), []).append(slot)
        for path, layer in self._parts:
            stack = "" if layer is None else path.rpartition(".")[0]
            names = self._names.setdefault(stack, [])
            names += [path] if path not in names else []

    def tree(self) -> Tree:
        """All weights."""
        return from_hf(self._model, self._tensors)

    def outer(self) -> Tree:
        """The weights that are of no layer: tables, the last norm, the head."""
        return nest((path, self.weight(path, None)) for path in self._names[""])

    def layer(self, stack: str, number: int) -> Tree:
        """The weights of a layer, without the axis of layers."""
        paths = self._names[stack]
        return {path.rpartition(".")[2]: self.weight(path, number) for path in paths}

    def weight(self, path: str, layer: int | None) -> Array:
        """A weight, of a layer without the axis of layers."""
        parts = self._parts[path, layer]
        if layer is None:
            return on_devices(part_of(parts[0], self._tensors), None)
        array = np.empty(parts[0].param.shape[1:], stored_kind(parts, self._tensors))
        for slot in parts:
            array[slot.at[1:]] = part_of(slot, self._tensors)
        return on_devices(array, None)


class Runner:
    """Runs a decoder over rows layer after layer; each kind of layer is compiled once."""

    def __init__(self, model: Decoder, compute: Compute):
        self.model, self.compute = model, compute
        self._kernel = attention_of(model, compute)
        self._programs: dict[LayerKind, Any] = {}
        self._begin = jax.jit(self._embed)

    def begin(self, outer: Tree, batch: Batch) -> Array:
        """x [B, T, D] before the first layer."""
        return self._begin(outer, batch)

    def run(self, kind: LayerKind, w: Tree, x: Array, batch: Batch) -> Array:
        """x [B, T, D] after a layer."""
        if kind not in self._programs:
            self._programs[kind] = jax.jit(partial(self.traced, kind))
        return self._programs[kind](w, x, batch)

    def traced(self, kind: LayerKind, w: Tree, x: Array, batch: Batch) -> Array:
        """`run` without compiling, to be differentiated."""

        def attend(q: Array, k: Array, v: Array, setting: Any, *more: Array) -> Array:
            return self._kernel(q, k, v, *more, batch.segment_ids, setting)

        tables = self.model.tables(batch.positions, batch.tokens.shape[1])
        own = Attend(attend, batch.segment_ids, kernels=self.compute.kernels)
        return kind.run(self.model.layer, w, x, tables, own)[0]

    def _embed(self, outer: Tree, batch: Batch) -> Array:
        x = self.model.embedded(outer, batch.tokens, self.compute)
        return self.model.placed(outer, x, batch.positions)
