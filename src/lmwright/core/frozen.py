"""Products with leaves that take no gradient, and with adapters beside them."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.leaves import (
    ADAPTER_AXIS,
    Int8,
    Lora,
    Quantized,
    column_norms,
    dequantize,
    map_keys,
    merge,
    trained_leaves,
)
from lmwright.core.param import Tree, letters
from lmwright.core.pipeline import interleaved
from lmwright.core.sharding import platform
from lmwright.core.weight import (
    Weight,
    compute_once,
    gradient_once,
    name_result,
    untyped_dot,
    weight_gradient,
)
from lmwright.core.weight import product as matmul


def product(eqn: str, x: Array, w: Quantized, narrow: None = None) -> Array:
    """float32 product with integers and their scales."""
    return _frozen_dot(eqn, x.dtype.name, x, w)


def narrow_products(x: Array, weights: Sequence[Weight]) -> list[Array | None]:
    """`x a` [B, T, R] of each Lora among weights [D, ...] that meet the same x [B, T, D], by one
    product; None for other weights, and where inputs are dropped for each by itself."""
    fits = [isinstance(w, Lora) and w.key is None and w.a.ndim == 2 for w in weights]
    loras = (w for w, fit in zip(weights, fits, strict=True) if fit and isinstance(w, Lora))
    factors = [w.a.astype(x.dtype) for w in loras]
    if len(factors) < 2:
        return [None] * len(weights)
    whole = untyped_dot("btd,dr->btr", x.dtype, x, jnp.concatenate(factors, axis=1))
    ends = list(accumulate(a.shape[1] for a in factors))
    parts = iter(jnp.split(name_result(whole), ends[:-1], axis=2))
    return [next(parts) if fit else None for fit in fits]


def low_rank(eqn: str, x: Array, w: Lora, narrow: Array | None) -> Array:
    """float32 product with base + a b, the narrow way: (x a) b."""
    x_letters, w_letters, out = letters(eqn)
    outer = w_letters[len(w_letters) - w.outputs :]
    inner = w_letters[-w.inputs - w.outputs : len(w_letters) - w.outputs]
    batch = w_letters[: -w.inputs - w.outputs]
    first, second = (f"{batch}{inner}r", w.a), (f"{batch}r{outer}", w.b)
    if set(outer) <= set(x_letters):  # the other way round, as a tied head is
        if w.magnitude is not None:
            raise ValueError("a weight with a magnitude is not used in both directions")
        first, second = second, first
    if w.magnitude is not None and not set(batch + outer) <= set(out):
        whole = merge(w, constant_norm=True).astype(x.dtype)
        return untyped_dot(eqn, jnp.float32, dropped(x, w), whole)
    x = compute_once(x)
    y = None if joins(eqn, w) else _frozen_dot(eqn, x.dtype.name, x, w.base)
    rows = "".join(letter for letter in x_letters if letter not in first[0])
    middle = f"{rows}{batch}r"
    a, b = (factor.astype(x.dtype) for _, factor in (first, second))
    if narrow is None:
        narrow = name_result(
            untyped_dot(f"{x_letters},{first[0]}->{middle}", x.dtype, dropped(x, w), a)
        )
    if y is None:
        return joint_product(eqn, x, narrow, w.base, b)
    y += untyped_dot(f"{middle},{second[0]}->{out}", jnp.float32, narrow, b)
    y = gradient_once(y)
    if w.magnitude is None:
        return y
    norms = lax.stop_gradient(column_norms(w))  # as the paper does, to spare memory
    return y * aligned(w.magnitude / norms, batch + outer, out)


def joins(eqn: str, w: Lora) -> bool:
    """True where one product of both parts is faster: on a single GPU, which waits for memory,
    where the result is at least as wide as the inputs."""
    x_letters, w_letters, out = letters(eqn)
    inner, outer = w_letters[: w.inputs], w_letters[w.inputs :]
    rows = x_letters[: -len(inner)]
    plain = x_letters.endswith(inner) and out == rows + outer and len(rows) == 2
    if platform() != "gpu" or jax.sharding.get_abstract_mesh().size > 1 or not plain or in_lanes():
        return False
    late = isinstance(w.base, Int8) and _contracts_inputs(eqn, w.base)  # scales that come after
    narrow = math.prod(w.a.shape[:-1]) > math.prod(w.b.shape[1:])
    return not late and not narrow and w.magnitude is None and "v" not in w_letters


def in_lanes() -> bool:
    """True in a loss that is computed for several adapters at once."""
    try:
        return lax.axis_size(ADAPTER_AXIS) > 0
    except NameError:  # no such axis
        return False


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def joint_product(eqn: str, x: Array, narrow: Array, base: Array | Quantized, b: Array) -> Array:
    """`x base + narrow b` in the dtype of `x`, as the product of [x, narrow] with [base, b]: two
    products would be written in float32, and read again to be added."""
    wide = dequantize(base, x.dtype)
    inner = wide.ndim - b.ndim + 1
    rows = x.shape[: x.ndim - inner]
    x = jnp.concatenate([x.reshape(*rows, -1), narrow], axis=-1)
    w = jnp.concatenate([wide.reshape(x.shape[-1] - len(b), -1), b.reshape(len(b), -1)])
    return matmul("btd,df->btf", x, w, x.dtype).reshape(*rows, *b.shape[1:])


def _joint_fwd(eqn: str, x: Array, narrow: Array, base: Array | Quantized, b: Array) -> Any:
    return joint_product(eqn, x, narrow, base, b), (narrow, base, b)


def _joint_bwd(eqn: str, residuals: tuple[Array, Array | Quantized, Array], g: Array) -> Any:
    narrow, base, b = residuals
    dx, _ = _frozen_bwd(eqn, g.dtype.name, base, g)
    rows, outer = narrow.shape[:-1], math.prod(b.shape[1:])
    g, flat = g.reshape(*rows, outer), b.reshape(len(b), outer)
    dnarrow = untyped_dot("btf,rf->btr", g.dtype, g, flat)
    db = weight_gradient("btr,rf->btf", narrow, g, b.dtype)
    return dx, dnarrow, None, db.reshape(b.shape)


joint_product.defvjp(_joint_fwd, _joint_bwd)


def dropped(x: Array, w: Lora) -> Array:
    """Inputs of an adapter's first factor, some of them dropped where it has a key."""
    if w.key is None:
        return x
    shape = (len(x) // len(w.key), *x.shape[1:])  # of a microbatch
    draw = lambda key: jax.random.bernoulli(key, 1 - w.dropout, shape)  # noqa: E731
    keep = interleaved(jax.vmap(draw)(jax.random.wrap_key_data(w.key)))
    return jnp.where(keep, x / (1 - w.dropout).astype(x.dtype), 0)


def apart(w: Tree) -> tuple[list[Array], list[Array]]:
    """Arrays of weights w that take a gradient, and the others."""
    leaves, marks = jax.tree.leaves(w), trained_leaves(w)
    pairs = list(zip(leaves, marks, strict=True))
    return [a for a, mark in pairs if mark], [a for a, mark in pairs if not mark]


def together(like: Tree, trained: Sequence[Any], frozen: Sequence[Any]) -> Tree:
    """Weights of the kinds of `like` with these arrays."""
    both = {True: iter(trained), False: iter(frozen)}
    leaves = [next(both[mark]) for mark in trained_leaves(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def drawn_for(number: Array, w: Tree) -> Tree:
    """Weights whose adapters drop other inputs for each `number`, e.g. that of a device."""

    def one(key: Array) -> Array:
        keys = jax.random.wrap_key_data(key)
        return jax.random.key_data(jax.vmap(lambda key: jax.random.fold_in(key, number))(keys))

    return map_keys(one, w)


def aligned(a: Array, letters: str, out: str) -> Array:
    """`a` with axes `letters`, transposed and reshaped to broadcast against axes `out`."""
    order = [letter for letter in out if letter in letters]
    a = jnp.transpose(a, [letters.index(letter) for letter in order])
    sizes = iter(a.shape)
    return a.reshape([next(sizes) if letter in order else 1 for letter in out])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _frozen_dot(eqn: str, dtype: str, x: Array, w: Array | Quantized) -> Array:
    return _stored_product(eqn, x, w)


def _frozen_fwd(eqn: str, dtype: str, x: Array, w: Array | Quantized) -> tuple[Array, Any]:
    # the weight is kept as it is stored, and widened once more on the way back
    return _stored_product(eqn, x, w), w


def _frozen_bwd(eqn: str, dtype: str, w: Array | Quantized, g: Array) -> tuple[Array, None]:
    x_letters, w_letters, out = letters(eqn)
    if isinstance(w, Int8) and _contracts_inputs(eqn, w):
        g = g * aligned(w.scale, _scale_letters(w_letters, w), out)
        w = w.values
    back = f"{out},{w_letters}->{x_letters}"
    wide = jnp.dtype(dtype)
    return matmul(back, g.astype(wide), dequantize(w, wide), wide), None


_frozen_dot.defvjp(_frozen_fwd, _frozen_bwd)


def _stored_product(eqn: str, x: Array, w: Array | Quantized) -> Array:
    """float32 product; the scales of Int8 come after it where they can."""
    if isinstance(w, Int8) and _contracts_inputs(eqn, w):
        _, w_letters, out = letters(eqn)
        scale = aligned(w.scale, _scale_letters(w_letters, w), out)
        return matmul(eqn, x, w.values.astype(x.dtype)) * scale
    return matmul(eqn, x, dequantize(w, x.dtype))


def _contracts_inputs(eqn: str, w: Int8) -> bool:
    _, w_letters, out = letters(eqn)
    return set(_scale_letters(w_letters, w)) <= set(out)


def _scale_letters(w_letters: str, w: Int8) -> str:
    split = len(w_letters) - w.outputs
    return w_letters[: split - w.inputs] + w_letters[split:]
