"""Feed-forwards that take rows in chunks of tokens: no activation of an mlp's width is as long as a
row. The backward pass computes each chunk again, and each device sums gradients of the weights over
its own tokens before they are added up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.frozen import apart, drawn_for, together
from lmwright.core.leaves import map_base
from lmwright.core.param import Tree
from lmwright.core.sharding import (
    TokenShards,
    constrain,
    gathered,
    join_chunks,
    tensor_ways,
    token_chunks,
)


def by_chunks(
    run: Callable[[Tree, Array], Array],
    axes: Mapping[str, str],
    w: Tree,
    h: Array,
    chunk_tokens: int,
) -> Array:
    """`run(w, h)` of h [B, T, D], `chunk_tokens` of each row at a time: no array is then [B, T, F],
    and the backward pass computes each chunk again. Weights, with their `axes`, are cast and
    gathered once for all chunks; their gradients are summed in their own precision."""
    chunks = _Chunks(run, tuple(axes.items()), chunk_tokens, jax.tree.structure(w))
    return _chunked(chunks, *apart(w), constrain(h, "batch seq embed"))


@dataclass(frozen=True)
class _Chunks:
    """A function that takes a row in chunks, and how its weights are flattened."""

    function: Callable[[Tree, Array], Array]
    axes: tuple[tuple[str, str], ...]
    chunk_tokens: int
    tree: Any

    def join(self, trained: list[Array], frozen: list[Array]) -> Tree:
        """The weights: inverse of `apart`."""
        like = jax.tree.unflatten(self.tree, range(self.tree.num_leaves))
        return together(like, trained, frozen)

    def run(self, trained: list[Array], frozen: list[Array], h: Array, number: Array) -> Array:
        """The result [B, C, D] of chunk `number`, h [B, C, D]."""
        return self.function(drawn_for(number, self.join(trained, frozen)), h)

    def for_products(
        self, trained: list[Array], frozen: list[Array], dtype: jnp.dtype
    ) -> tuple[list[Array], list[Array]]:
        """The weights as every chunk reads them: cast and gathered once for all."""
        w = self.join(trained, frozen)
        for name, axes in self.axes:
            # what is no matrix stays as wide as the sums over tokens that are its gradient
            small = name.endswith(("_bias", "_norm")) or " " not in axes
            read = partial(_as_read, axes=axes, dtype=None if small else dtype)
            w |= {name: map_base(read, w[name])} if name in w else {}
        return apart(w)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(static: _Chunks, trained: list[Array], frozen: list[Array], h: Array) -> Array:
    pieces = token_chunks(h, static.chunk_tokens)
    run = partial(static.run, *static.for_products(trained, frozen, h.dtype))
    numbers = jnp.arange(pieces.shape[0])
    return join_chunks(jax.lax.map(lambda piece: run(*piece), (pieces, numbers)))


def _chunked_fwd(static: _Chunks, trained: list[Array], frozen: list[Array], h: Array) -> Any:
    return _chunked(static, trained, frozen, h), (trained, frozen, h)


def _chunked_bwd(static: _Chunks, residuals: Any, g: Array) -> Any:
    trained, frozen, h = residuals
    ours, theirs = static.for_products(trained, frozen, h.dtype)
    shards = TokenShards() if frozen or tensor_ways() > 1 else TokenShards.of(h)
    read = [shards.repeat(a) for a in ours]

    def body(sums: list[Array], piece: tuple[Array, Array, Array]) -> tuple[list[Array], Array]:
        h, g, number = piece
        run = lambda w, h: static.run(w, theirs, h, number)  # noqa: E731
        pull_back = shards.vjp(run, read, shards.split(h))[1]
        dw, dh = pull_back(shards.split(g))
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, dw), shards.join(dh)

    # of the weights' own precision
    zeros = [shards.repeat(jnp.zeros(a.shape, a.dtype)) for a in trained]
    pieces = token_chunks(h, static.chunk_tokens), token_chunks(g, static.chunk_tokens)
    numbers = jnp.arange(pieces[0].shape[0])
    dw, dh = jax.lax.scan(body, zeros, (*pieces, numbers))
    return [shards.total(a) for a in dw], None, join_chunks(dh)


_chunked.defvjp(_chunked_fwd, _chunked_bwd)


def _as_read(a: Array, axes: str, dtype: jnp.dtype | None) -> Array:
    return gathered(a.astype(dtype or a.dtype), axes)
