"""Leaves: what a weight may be besides an array.

    Int8(values, scale)            one scale for each output, over all inputs
    Int4(values, scale)            one scale for each output and block of inputs
    Lora(base, a, b, ...)          a frozen base of any kind plus a product of low rank
                                   (https://arxiv.org/abs/2106.09685); over Int8 or Int4 it is
                                   QLoRA (https://arxiv.org/abs/2305.14314)
    Ternary(latent)                trained, and computed with -1, 0 and 1 (`core.ternary`)
    Rounded(latent, scale, ...)    trained, and computed as its integers will be (`core.rounded`)
    Float8(latent)                 trained, and multiplied in 8 bits (`core.float8`)
    Gauged(weight, moments)        sums up what its inputs are (`core.gauged`)

All are pytrees of arrays with the weight's batch axes in front, so that scans, pipeline
stages and shardings treat them like plain arrays. How many axes are inputs and outputs
is counted from the right, which stays true when the axes in front are gone. In place of arrays
a leaf may hold Params (its spec), abstract arrays or shardings.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.config.registry import Registry
from lmwright.core.param import Tree

T = TypeVar("T")
Storage = Literal["fp32", "bf16", "int8", "int4", "mxfp4"]
LEAST = 1e-37  # of a squared norm that is divided by: an output may have no weights but zeros


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def _leaf(cls: type[T]) -> type[T]:
    return jax.tree_util.register_dataclass(dataclass(frozen=True)(cls))


@_leaf
class Int8:
    """Symmetric 8-bit integers: weight = values * scale.

    `values` int8 [*batch, *inputs, *outputs]; `scale` float32 [*batch, *outputs].
    """

    values: Any
    scale: Any
    inputs: int = field(metadata={"static": True})
    outputs: int = field(metadata={"static": True})


@_leaf
class Int4:
    """Symmetric 4-bit integers in blocks along the last input axis.

    `values` int4 [*batch, *inputs, *outputs], two in a byte on devices; `scale` bfloat16 of the
    same rank, with one place for each block of the last input axis. A scale has the sign that
    puts the largest magnitude at -8, so that all 16 levels serve (as in GGUF's Q4_0). With `mxfp4`
    values are the numbers of MXFP4's levels, with their sign, and scales are powers of two.
    """

    values: Any
    scale: Any
    inputs: int = field(metadata={"static": True})
    outputs: int = field(metadata={"static": True})
    mxfp4: bool = field(default=False, metadata={"static": True})


ADAPTER_AXIS = "adapters"  # JAX's name of the axis over which several are computed at once


@_leaf
class Lora:
    """base + a b, where the base takes no gradient.

    `a` [*batch, *inputs, R] and `b` [*batch, R, *outputs], with the scale alpha / R in `b`
    already. `magnitude` [*batch, *outputs] makes it DoRA (https://arxiv.org/abs/2402.09353):
    every output's column of base + a b has this norm. `key` uint32 [layers, A, 2], of the A
    microbatches that are computed at once, and `dropout` float32 [layers] drop inputs of `a`.
    """

    base: Any
    a: Any
    b: Any
    magnitude: Any = None
    key: Any = None
    dropout: Any = None
    inputs: int = field(default=1, metadata={"static": True})
    outputs: int = field(default=1, metadata={"static": True})


@_leaf
class Ternary:
    """-1, 0 and 1 times the mean magnitude, of a trained `latent` [*batch, *inputs, *outputs]."""

    latent: Any
    inputs: int = field(metadata={"static": True})
    outputs: int = field(metadata={"static": True})


@_leaf
class Rounded:
    """Integers times their scales, of a trained `latent`, which may be a Lora that is rounded
    with its base. `scale` is None, or trained; the grid is one of `core.rounding`."""

    latent: Any
    scale: Any = None
    grid: str = field(default="int4", metadata={"static": True})
    group: int = field(default=32, metadata={"static": True})
    activations: str = field(default="none", metadata={"static": True})
    inputs: int = field(default=1, metadata={"static": True})
    outputs: int = field(default=1, metadata={"static": True})


@_leaf
class Float8:
    """A trained `latent` that multiplies in 8-bit floats (`core.float8`)."""

    latent: Any


@_leaf
class Gauged:
    """A `weight`, and zeros [*batch, I, I] whose gradient are the second moments of its inputs."""

    weight: Any
    moments: Any
    inputs: int = field(metadata={"static": True})


Quantized = Int8 | Int4
Weight = Array | Int8 | Int4 | Lora | Ternary | Rounded | Float8 | Gauged
TYPED = (Int8, Int4, Lora, Ternary, Rounded, Float8, Gauged)
WIDENED = Registry(
    __package__,
    {
        "Ternary": "ternary.widened", "Rounded": "rounded.widened", "Float8": "float8.widened",
        "Int4": "four_bits.widened",
    },
)  # fmt: skip
"""Functions that return the float32 array that a trained leaf computes with, by leaf type; for Int4
in the dtype that is given."""


def is_typed(leaf: Any) -> bool:
    """True for a typed leaf of the weights: an `is_leaf` for jax.tree functions."""
    return isinstance(leaf, TYPED)


def has_adapters(w: Tree) -> bool:
    """True if any leaf is a base with an adapter."""
    return any(isinstance(leaf, Lora) for leaf in jax.tree.leaves(w, is_leaf=is_typed))


def trained_leaves(w: Tree) -> list[bool]:
    """True for each array of `jax.tree.leaves(w)` that may take a gradient: plain arrays, and the
    factors and magnitudes of adapters."""
    marks: list[bool] = []
    for leaf in jax.tree.leaves(w, is_leaf=is_typed):
        frozen = jax.tree.map(lambda _: False, leaf)
        if isinstance(leaf, Lora):
            magnitude = None if leaf.magnitude is None else True
            frozen = replace(frozen, a=True, b=True, magnitude=magnitude)
        if isinstance(leaf, Ternary | Rounded | Float8):
            own = jax.tree.map(lambda _: True, replace(leaf, latent=None))
            frozen = [*trained_leaves(leaf.latent), *jax.tree.leaves(own)]
        marks += jax.tree.leaves(frozen) if is_typed(leaf) else [True]
    return marks


def map_base(fn: Callable[[Array], Array], leaf: Any) -> Any:
    """`leaf` with `fn` of its array, or of the base of its adapter; quantized ones stay."""
    if isinstance(leaf, Lora):
        return replace(leaf, base=map_base(fn, leaf.base))
    return leaf if is_typed(leaf) else fn(leaf)


def map_keys(fn: Callable[[Array], Array], w: Tree) -> Tree:
    """`w` with `fn` of the keys by which its adapters drop inputs."""
    has_key = lambda leaf: isinstance(leaf, Lora) and leaf.key is not None  # noqa: E731
    map_one = lambda leaf: replace(leaf, key=fn(leaf.key)) if has_key(leaf) else leaf  # noqa: E731
    return jax.tree.map(map_one, w, is_leaf=is_typed)


def without_adapters(w: Tree) -> Tree:
    """The frozen base alone."""
    bare = lambda leaf: leaf.base if isinstance(leaf, Lora) else leaf  # noqa: E731
    return jax.tree.map(bare, w, is_leaf=is_typed)


def dequantize(w: Any, dtype: jnp.dtype) -> Array:
    """The array that an array, Int8 or Int4 stands for."""
    match w:
        case Int8():
            axes = range(-w.inputs - w.outputs, -w.outputs)
            scale = jnp.expand_dims(w.scale, tuple(axes))
            return (w.values.astype(jnp.float32) * scale).astype(dtype)
        case Int4():
            return WIDENED["Int4"](w, dtype)
        case Ternary() | Rounded() | Float8():
            return WIDENED[type(w).__name__](w).astype(dtype)
        case Gauged():
            w = w.weight
    return w.astype(dtype)


def merge(w: Any, *, constant_norm: bool = False) -> Array:
    """float32 weight that a leaf of any kind computes with; dropout is for training alone.
    With `constant_norm` no gradient runs through the norm of DoRA, as in training."""
    if not isinstance(w, Lora):
        return dequantize(w, jnp.float32)
    merged = dequantize(w.base, jnp.float32) + added(w)
    if w.magnitude is None:
        return merged
    axes = _input_axes(w)
    squares = jnp.sum(jnp.square(merged), axis=axes, keepdims=True)
    norm = jnp.sqrt(jnp.maximum(squares, LEAST))
    norm = jax.lax.stop_gradient(norm) if constant_norm else norm
    return merged * jnp.expand_dims(w.magnitude, axes) / norm


def cast(tree: Tree, dtype: jnp.dtype) -> Tree:
    """Arrays of a tree of weights in `dtype`; typed leaves stay as they are stored."""
    cast_leaf = lambda leaf: leaf if is_typed(leaf) else jnp.asarray(leaf, dtype)  # noqa: E731
    return jax.tree.map(cast_leaf, tree, is_leaf=is_typed)


def _input_axes(w: Any) -> tuple[int, ...]:
    return tuple(range(-w.inputs - w.outputs, -w.outputs))


def added(w: Lora) -> Array:
    """a b in float32, [*batch, *inputs, *outputs]."""
    a, b = (x.astype(jnp.float32) for x in (w.a, w.b))
    nb = a.ndim - w.inputs - 1
    batch, inner, outer = a.shape[:nb], a.shape[nb:-1], b.shape[nb + 1 :]
    flat = jnp.matmul(
        a.reshape(*batch, -1, a.shape[-1]), b.reshape(*batch, b.shape[nb], -1),
        precision=jax.lax.Precision.HIGHEST,
    )  # fmt: skip
    return flat.reshape(*batch, *inner, *outer)


def column_norms(w: Lora) -> Array:
    """Norm of each output's column of base + a b, [*batch, *outputs] float32, without the sum
    itself: |w|^2 + 2 w.(a b) + |a b|^2, column by column."""
    wide = dequantize(w.base, jnp.float32)
    a, b = (x.astype(jnp.float32) for x in (w.a, w.b))
    nb = a.ndim - w.inputs - 1
    batch, outer, rank = a.shape[:nb], b.shape[nb + 1 :], a.shape[-1]
    wide = wide.reshape(*batch, -1, math.prod(outer))
    a, b = a.reshape(*batch, -1, rank), b.reshape(*batch, rank, -1)
    across = jnp.matmul(a.mT, wide)  # [R, outputs]
    gram = jnp.matmul(a.mT, a)
    squares = jnp.sum(jnp.square(wide), axis=-2)
    squares += jnp.sum((2 * across + jnp.matmul(gram, b)) * b, axis=-2)
    return jnp.sqrt(jnp.maximum(squares, LEAST)).reshape(*batch, *outer)
