"""Param: a weight before it exists, declared once by an arrow.

    "[layers experts] embed heads -> head_dim"
      batch axes      inputs         outputs        (no arrow: not a matmul)

Everything that depends on what the axes mean is derived from the arrow: sharding, init
fan-in, weight decay, Muon's matrix view, quantization scales, the Hugging Face layout.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Tree = Any  # nested dict of leaves of one type

_ARROW = re.compile(r"^(?:\[(?P<batch>[^\]]*)\]\s*)?(?P<rest>.*)$")


@dataclass(frozen=True)
class Param:
    """Shape, meaning and initialization of one weight.

    Matrices start as a normal of `std` (one over the square root of the fan-in if unset), drawn
    anew beyond `cut` of these; `fill` makes a constant, or with `fill_to` even steps along the last
    axis from one to the other. A weight with a `balance_rate` moves by
    that much against the sign of its gradient, which is a count and not a gradient of the loss: no
    optimizer, no clipping. A `ternary` one is trained in floats, computed as -1, 0 and 1.
    Raises ValueError if arrow and shape disagree.
    """

    arrow: str
    shape: tuple[int, ...]
    std: float | None = None
    fill: float | None = None
    fill_to: float | None = None
    balance_rate: float | None = None
    cut: float | None = None
    ternary: bool = False

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{self.arrow!r} names {len(self.axes)} axes, shape is {self.shape}")
        if not self.is_matrix and self.fill is None and self.std is None:
            raise ValueError(f"{self.arrow!r} has no arrow, so it needs fill or std")

    @property
    def batch(self) -> tuple[str, ...]:
        """Axes over which independent weights are stacked."""
        return _parts(self.arrow)[0]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Contracted axes."""
        return _parts(self.arrow)[1]

    @property
    def outputs(self) -> tuple[str, ...]:
        """Axes the matmul produces."""
        return _parts(self.arrow)[2]

    @property
    def axes(self) -> tuple[str, ...]:
        """One name for each dimension of `shape`."""
        return sum(_parts(self.arrow), ())

    @property
    def is_matrix(self) -> bool:
        return bool(self.inputs)

    def _sizes(self, start: int, count: int) -> tuple[int, ...]:
        return self.shape[start : start + count]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(fan-in, fan-out) of one matrix, batch axes left out."""
        nb, ni = len(self.batch), len(self.inputs)
        return math.prod(self._sizes(nb, ni)), math.prod(self.shape[nb + ni :])

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def stacked(self, axis: str, count: int) -> "Param":
        """Param of `count` such weights, stacked in front as a batch axis."""
        batch = " ".join((axis, *self.batch))
        rest = self.arrow.rpartition("]")[2].lstrip()
        return replace(self, arrow=f"[{batch}] {rest}", shape=(count, *self.shape))

    def unstacked(self) -> "Param":
        """Param of one of the weights that are stacked along its first axis."""
        batch = " ".join(self.batch[1:])
        rest = self.arrow.rpartition("]")[2].lstrip()
        return replace(self, arrow=f"[{batch}] {rest}" if batch else rest, shape=self.shape[1:])

    def make(self, key: Array, dtype: jnp.dtype = jnp.float32) -> Array:
        """A fresh array of `shape`."""
        if self.fill is not None and self.fill_to is not None:
            steps = jnp.linspace(self.fill, self.fill_to, self.shape[-1], dtype=dtype)
            return jnp.broadcast_to(steps, self.shape)
        if self.fill is not None:
            return jnp.full(self.shape, self.fill, dtype)
        std = self.std if self.std is not None else self.matrix_shape[0] ** -0.5
        if self.cut is not None:
            return std * jax.random.truncated_normal(key, -self.cut, self.cut, self.shape, dtype)
        return std * jax.random.normal(key, self.shape, dtype)


@cache
def _parts(arrow: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    match = _ARROW.fullmatch(arrow)
    assert match is not None  # it matches any line
    batch = tuple((match["batch"] or "").split())
    left, is_matrix, right = match["rest"].partition("->")
    if is_matrix:
        return batch, tuple(left.split()), tuple(right.split()), ()
    return batch, (), (), tuple(left.split())


def is_param(leaf: Any) -> bool:
    """True for a Param: the `is_leaf` of jax.tree functions over a spec."""
    return isinstance(leaf, Param)


def map_params(fn: Callable[[Param], Any], spec: Tree, *rest: Tree) -> Tree:
    """`jax.tree.map` over a tree of Params."""
    return jax.tree.map(fn, spec, *rest, is_leaf=is_param)


def stack(spec: Tree, count: int, axis: str = "layers") -> Tree:
    """Every Param of `spec` stacked `count` times along a new first axis."""
    return map_params(lambda p: p.stacked(axis, count), spec)


def first_difference(
    ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]
) -> tuple[str, tuple[int, ...] | str, tuple[int, ...] | str] | None:
    """The first name whose shapes are not equal, with both ("absent" where it has none)."""
    for name in sorted(ours.keys() | theirs.keys()):
        both = ours.get(name, "absent"), theirs.get(name, "absent")
        if both[0] != both[1]:
            return name, *both
    return None


def walk(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, leaf) pairs of a nested dict, in sorted order."""
    for name in sorted(tree):
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(tree[name], Mapping):
            yield from walk(tree[name], path)
        else:
            yield path, tree[name]


def nest(leaves: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Nested dict of (dotted path, leaf) pairs: the inverse of `walk`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves:
        *above, name = path.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = leaf
    return tree


def at(tree: Mapping[str, Any], path: str) -> Any:
    """The leaf or subtree at a dotted path."""
    node: Any = tree
    for name in path.split("."):
        node = node[name]
    return node


def init_weights(spec: Tree, key: Array) -> Tree:
    """Fresh float32 weights; a leaf depends on its path and the key alone, so adding a
    weight leaves the others as they were."""

    def make(path: Any, param: Param) -> Array:
        return param.make(path_key(key, jax.tree_util.keystr(path)))

    return jax.tree_util.tree_map_with_path(make, spec, is_leaf=is_param)


def path_key(key: Array, path: str) -> Array:
    """A key of its own for a name (FNV-1a of the name folded in)."""
    digest = 2166136261
    for byte in path.encode():
        digest = ((digest ^ byte) * 16777619) & 0xFFFFFFFF
    return jax.random.fold_in(key, digest)


def count_params(spec: Tree) -> int:
    """Number of weights in a spec."""
    return sum(param.size for _, param in walk(spec))


def letters(eqn: str) -> tuple[str, str, str]:
    """The letters of activations, weight and result in "activations,weight->result"."""
    inputs, out = eqn.split("->")
    x_letters, w_letters = inputs.split(",")
    return x_letters, w_letters, out
