"""A layer's array where it lies in the stack of all layers.

    scan over layers   cuts each layer out of its stacks, and puts new stacks together
    `InStack`          the stack [L, ...] and the number of a layer: products read their part of it,
                       and a few new keys and values are written into it

For programs that take no gradient, since that of a stack would be as large as the stack.
"""

from dataclasses import dataclass
from typing import Self

import jax
from jax import Array, lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InStack:
    """An array [...] of one layer."""

    stack: Array  # [L, ...]
    layer: Array  # int32 []

    def copied(self) -> Array:
        """The array by itself; what reads it once may read it in the stack."""
        return lax.dynamic_index_in_dim(self.stack, self.layer, keepdims=False)

    def put(self, part: Array, start: tuple[int | Array, ...]) -> Self:
        """The layer with `part` in it from `start` on, in a new stack."""
        new = lax.dynamic_update_slice(self.stack, part[None], (self.layer, *start))
        return type(self)(new, self.layer)


def as_copied(a: Array | InStack) -> Array:
    """The array, or the copy of one in a stack."""
    return a.copied() if isinstance(a, InStack) else a
