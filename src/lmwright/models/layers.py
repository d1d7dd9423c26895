"""Layers of a decoder: their weights by span, and how they run, over whole rows or going on from
those in a cache.

    family: layer(kind, weights, x, tables, attend) -> (x, aux)
                                            |
    run_layers              attend = the platform's kernel, inside segments
    cached.extend_layers    attend = new keys and values put into the cache, all of it looked at

Kinds of layers and their order are the family's; see `core.stack`. A kind that is no string adds
something to a layer of another kind (`models.reasoning`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax import Array

from lmwright.core.compute import BLOCK_INPUT, HEADS, Compute
from lmwright.core.contract import Batch
from lmwright.core.param import Tree, stack
from lmwright.core.stack import Aux, Span, added, run_stack
from lmwright.core.weight import name_result


@dataclass(frozen=True)
class Attend:
    """attend(q [B, T, N, H], k and v [B, T, K, H], scoring)."""

    run: Callable[..., Array]
    ids: Array
    """int32 [B, T]: segments; 0 at padding."""
    mlp_chunk_tokens: int | None = None
    """Tokens of a row that an mlp takes at a time; all if unset."""
    state: Tree | None = None
    """State that the layer has carried from the tokens before; None for whole rows."""
    put: Callable[[Tree], None] | None = None
    """Takes the state after these tokens."""

    @property
    def real(self) -> Array:
        """bool [B, T]: False at padding."""
        return self.ids > 0

    def __call__(self, *args: Any, **masks: Any) -> Array:
        return self.run(*args, **masks)

    def carry(self, whole: Callable[[], Array], on: Callable[[Tree], tuple[Array, Tree]]) -> Array:
        """The result of a layer with a state of its own: `whole()` for whole rows, or `on(state)`,
        which also gives the state after these tokens."""
        if self.put is None:
            return whole()
        result, after = on(self.state)
        self.put(after)
        return result


Kernel = Callable[..., Array]
Layer = Callable[[str, Tree, Array, Tree, Attend], tuple[Array, Aux]]
Spans = tuple[Span, ...]


def layers_spec(spans: Spans, spec_of: Callable[[str], Tree]) -> dict[str, Tree]:
    """The Params of all spans, `spec_of(kind)` stacked for each place."""
    spec: dict[str, Tree] = {}
    for span in spans:
        whole = [
            spec_of(kind) if isinstance(kind, str) else kind.spec(spec_of) for kind in span.kinds
        ]
        spec[span.name] = by_place([stack(layer, span.repeats) for layer in whole])
    return spec


def applied(layer: Layer, kind: Any, *args: Any) -> tuple[Array, Aux]:
    """The result of `layer`, and what its kind adds to it."""
    return layer(kind, *args) if isinstance(kind, str) else kind.run(layer, *args)


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

    def block(kind: str, w: Tree, x: Array, tables: Tree, ids: Array) -> tuple[Array, Aux]:
        def attend(q: Array, k: Array, v: Array, *more: Any) -> Array:
            q, k, v = (name_result(a, HEADS) for a in (q, k, v))
            return kernel(q, k, v, *more[:-1], ids, more[-1])

        x = name_result(x, BLOCK_INPUT)
        return applied(layer, kind, w, x, tables, Attend(attend, ids, chunk))

    total: Aux = {}
    for span in spans:
        x, aux = run_stack(
            [partial(block, kind) for kind in span.kinds],
            w[span.name], x, tables, batch.segment_ids,
            remat=compute.policy, unroll=compute.unroll, num_microbatches=compute.num_microbatches,
        )  # fmt: skip
        total = added(total, aux)
    return x, total
