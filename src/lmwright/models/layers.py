"""Layers of a decoder: their weights by span, and how they run, over whole rows or going on from
those in a cache.

    family: layer(kind, weights, x, tables, attend) -> (x, aux)
                                            |
    run_layers              attend = the platform's kernel, inside segments
    cached.extend_layers    attend = new keys and values put into the cache, all of it looked at

Kinds of layers and their order are the family's; see `core.stack`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from jax import Array

from lmwright.core.compute import BLOCK_INPUT, HEADS, Compute, Kernels
from lmwright.core.contract import Batch
from lmwright.core.param import Tree, stack
from lmwright.core.stack import Aux, Span, added, run_stack
from lmwright.core.weight import name_result
from lmwright.nn.attention import Scoring


@dataclass(frozen=True)
class Attend:
    """Attention of a layer, attend(q [B, T, N, H], k and v [B, T, K, H], scoring), and what a layer
    must know of its rows."""

    run: Callable[..., Array]
    ids: Array
    """int32 [B, T]: segments, 0 at padding; of whole rows, also where q, k and v are pieces."""
    mlp_chunk_tokens: int | None = None
    """Tokens of a row that an mlp takes at a time; all if unset."""
    state: Tree | None = None
    """State that the layer has carried from the tokens before; None for whole rows."""
    put: Callable[[Tree], None] | None = None
    """Takes the state after these tokens."""
    kernels: Kernels = "reference"
    """What computes mixers of other kinds than `run`."""

    @property
    def real(self) -> Array:
        """bool [B, T]: False at padding."""
        return self.ids > 0

    def __call__(self, q: Array, k: Array, v: Array, scoring: Scoring) -> Array:
        return self.run(q, k, v, scoring)

    def mix(self, q: Array, k: Array, v: Array, *more: Array, setting: Any) -> Array:
        """The result of a mixer that reads more arrays than attention, and takes a setting of its
        own."""
        return self.run(q, k, v, setting, *more)

    def carry(self, whole: Callable[[], Array], on: Callable[[Tree], tuple[Array, Tree]]) -> Array:
        """The result of a layer with a state of its own: `whole()` for whole rows, or `on(state)`,
        which also gives the state after these tokens."""
        if self.put is None:
            return whole()
        result, after = on(self.state)
        self.put(after)
        return result


Kernel = Callable[..., Array]
LayerResult = tuple[Array, Aux]
Layer = Callable[[str, Tree, Array, Tree, Attend], LayerResult]
Spans = tuple[Span, ...]


class LayerKind(Protocol):
    """A kind of layer as the stack sees it."""

    @property
    def kind(self) -> str:
        """Name of the family's kind."""

    def spec(self, spec_of: Callable[[str], Tree]) -> Tree:
        """The weights, from those of the family's kind."""

    def run(self, layer: Layer, w: Tree, x: Array, tables: Tree, attend: Attend) -> LayerResult:
        """x [B, T, D] after the family's `layer` and what the kind adds."""


@dataclass(frozen=True)
class Plain:
    """A kind of layer that adds nothing (`models.reasoning` has one that does)."""

    kind: str

    def spec(self, spec_of: Callable[[str], Tree]) -> Tree:
        return spec_of(self.kind)

    def run(self, layer: Layer, w: Tree, x: Array, tables: Tree, attend: Attend) -> LayerResult:
        return layer(self.kind, w, x, tables, attend)


def layers_spec(spans: Spans, spec_of: Callable[[str], Tree]) -> dict[str, Tree]:
    """The Params of all spans, `spec_of(kind)` stacked for each place."""
    spec: dict[str, Tree] = {}
    for span in spans:
        spec[span.name] = by_place([stack(k.spec(spec_of), span.repeats) for k in span.kinds])
    return spec


def by_place(trees: list[Tree]) -> Tree:
    """Trees of a span, one for each place in its pattern."""
    return trees[0] if len(trees) == 1 else {str(i): tree for i, tree in enumerate(trees)}


def run_layers(
    layer: Layer, spans: Spans, w: Tree, x: Array, tables: Tree, batch: Batch, compute: Compute,
    kernel: Kernel,
) -> tuple[Array, Aux]:  # fmt: skip
    """x [B, T, D] after all layers, and the sums of what they return beside it. `tables` are arrays
    [B, ...] that every layer sees, such as rotations; without rows if there are no stages. `kernel`
    takes q, k, v, what else a layer gives it, segment ids and the scoring."""
    chunk = compute.mlp_chunk_tokens

    def block(kind: LayerKind, w: Tree, x: Array, tables: Tree, ids: Array) -> LayerResult:
        def attend(q: Array, k: Array, v: Array, setting: Any, *more: Array) -> Array:
            q, k, v = (name_result(a, HEADS) for a in (q, k, v))
            return kernel(q, k, v, *more, ids, setting)

        x = name_result(x, BLOCK_INPUT)
        return kind.run(layer, w, x, tables, Attend(attend, ids, chunk, kernels=compute.kernels))

    total: Aux = {}
    for span in spans:
        x, aux = run_stack(
            [partial(block, kind) for kind in span.kinds],
            w[span.name], x, tables, batch.segment_ids,
            remat=compute.policy, unroll=compute.unroll, num_microbatches=compute.num_microbatches,
        )  # fmt: skip
        total = added(total, aux)
    return x, total
