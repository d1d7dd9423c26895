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

from lmwright.core.leaves import map_base, map_keys, trained_leaves
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
    leaves, tree = jax.tree.flatten(w)
    chunks = _Chunks(run, tuple(axes.items()), chunk_tokens, tree, tuple(trained_leaves(w)))
    return _chunked(chunks, *chunks.split(leaves), constrain(h, "batch seq embed"))


@dataclass(frozen=True)
class _Chunks:
    """A function that takes a row in chunks, and how its weights are flattened."""

    function: Callable[[Tree, Array], Array]
    axes: tuple[tuple[str, str], ...]
    chunk_tokens: int
    tree: Any
    marks: tuple[bool, ...]
    """True for each array that may take a gradient."""

    def split(self, leaves: list[Array]) -> tuple[list[Array], list[Array]]:
        """Arrays that may take a gradient, and the others."""
        pairs = list(zip(leaves, self.marks, strict=True))
        return [a for a, mark in pairs if mark], [a for a, mark in pairs if not mark]

    def join(self, trained: list[Array], frozen: list[Array]) -> Tree:
        """The weights: inverse of `split`."""
        first, second = iter(trained), iter(frozen)
        leaves = [next(first) if mark else next(second) for mark in self.marks]
        return jax.tree.unflatten(self.tree, leaves)

    def run(self, trained: list[Array], frozen: list[Array], h: Array, number: Array) -> Array:
        """The result [B, C, D] of chunk `number`, h [B, C, D]."""
        return self.function(map_keys(partial(_folded, number), self.join(trained, frozen)), h)

    def for_products(
        self, trained: list[Array], frozen: list[Array], dtype: jnp.dtype
    ) -> tuple[list[Array], list[Array]]:
        """The weights as every chunk reads them: cast and gathered once for all."""
        w = self.join(trained, frozen)
        for name, axes in self.axes:
            # what is no matrix stays as wide as the sums over tokens that are its gradient
            small = name.endswith(("_bias", "_norm"))
            read = partial(_as_read, axes=axes, dtype=None if small else dtype)
            w |= {name: map_base(read, w[name])} if name in w else {}
        return self.split(jax.tree.leaves(w))


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


def _folded(number: Array, keys: Array) -> Array:
    """Other keys [A, 2] for each number."""
    fold = lambda key: jax.random.fold_in(jax.random.wrap_key_data(key), number)  # noqa: E731
    return jax.random.key_data(jax.vmap(fold)(keys))


def _as_read(a: Array, axes: str, dtype: jnp.dtype | None) -> Array:
    return gathered(a.astype(dtype or a.dtype), axes)
