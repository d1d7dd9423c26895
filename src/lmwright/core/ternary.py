"""Products with ternary weights and 8-bit activations (BitNet b1.58,
https://arxiv.org/abs/2402.17764).

    s = mean |w|, of a matrix          codes of w  -1, 0, 1
    a = 127 / max |x|, of a token      codes of x  -128 ... 127
    y = (codes of x . codes of w) s / a

Both codes are exact in bfloat16 and their sums in float32, so that the product of floats is that of
integers to the bit; devices with units for int8 take it as such. Rounding passes gradients on as
they are (straight-through).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.frozen import aligned
from lmwright.core.leaves import Ternary, cast, is_typed, merge
from lmwright.core.param import Param, Tree, letters, nest, walk
from lmwright.core.rounding import int8_tokens, ternary
from lmwright.core.sharding import device_kind
from lmwright.core.weight import product as matmul
from lmwright.core.weight import weight_gradient
from lmwright.hardware.devices import chip_of


def in_codes(spec: Tree, w: Tree) -> Tree:
    """Weights of a layer, whose ternary ones are leaves that compute with their codes; an adapter
    is rounded with its base."""

    def wrap(name: str, leaf: Any) -> Any:
        param = spec.get(name)
        if param is None or not param.ternary:
            return leaf
        return Ternary(leaf, inputs=len(param.inputs), outputs=len(param.outputs))

    return {name: wrap(name, leaf) for name, leaf in w.items()}


def cast_as_trained(spec: Tree, w: Tree, dtype: jnp.dtype) -> Tree:
    """`cast`, after which the model chooses as it did. Ternary weights keep their codes: near a
    threshold, floats that are rounded to `dtype` would have others. Biases that balance experts
    stay wide."""
    params = dict(walk(spec))
    wide = {p.rpartition(".")[2] for p, param in params.items() if param.balance_rate is not None}
    w = nest((path, _in_fewer(params.get(path), a, dtype)) for path, a in walk(w))

    def cast_leaf(keys: tuple[Any, ...], a: Any) -> Any:
        kept = getattr(keys[-1], "key", "") in wide
        return cast(a, jnp.promote_types(a.dtype, dtype) if kept else dtype)

    return jax.tree.map_with_path(cast_leaf, w, is_leaf=is_typed)


def _in_fewer(param: Param | None, a: Any, dtype: jnp.dtype) -> Any:
    if param is None or not param.ternary or is_typed(a) or dtype in (a.dtype, jnp.float32):
        return a
    dims = len(param.inputs) + len(param.outputs)
    codes, scale = ternary(a, dims)
    share = jnp.mean(codes != 0, axis=tuple(range(-dims, 0)), keepdims=True, dtype=jnp.float32)
    # the mean magnitude of these is the scale
    return codes * (scale / jnp.maximum(share, 1 / a.size))


def product(eqn: str, x: Array, w: Ternary, narrow: None = None) -> Array:
    """float32 product with the weight's ternary values."""
    return _product(eqn, w.inputs + w.outputs, x, merge(w.latent, constant_norm=True))


def widened(w: Ternary) -> Array:
    """float32 values that the weight stands for."""
    codes, scale = ternary(merge(w.latent), w.inputs + w.outputs)
    return codes.astype(jnp.float32) * scale


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(eqn: str, dims: int, x: Array, w: Array) -> Array:
    return _forward(eqn, dims, x, w)[0]


def _forward(eqn: str, dims: int, x: Array, w: Array) -> tuple[Array, Any]:
    x_letters, w_letters, out = letters(eqn)
    contracted = [i for i, letter in enumerate(x_letters) if letter not in out]
    xs, a = int8_tokens(x, tuple(contracted))
    ws, s = ternary(w, dims)
    kept = "".join(letter for letter in x_letters if letter in out)
    over_a = aligned(jnp.squeeze(1 / a, tuple(contracted)), kept, out)
    own = w_letters[: w.ndim - dims]
    over_a = over_a * aligned(jnp.squeeze(s, tuple(range(-dims, 0))), own, out)
    return _integers(eqn, xs, ws, x.dtype) * over_a, (xs, a, ws, s)


def _fwd(eqn: str, dims: int, x: Array, w: Array) -> tuple[Array, Any]:
    y, saved = _forward(eqn, dims, x, w)
    return y, (*saved, jnp.zeros((), x.dtype), jnp.zeros((), w.dtype))


def _bwd(eqn: str, dims: int, saved: Any, g: Array) -> tuple[Array, Array]:
    xs, a, ws, s, x_like, w_like = saved
    x_letters, w_letters, out = letters(eqn)
    dtype = x_like.dtype
    contracted = tuple(i for i, letter in enumerate(x_letters) if letter not in out)
    kept = "".join(letter for letter in x_letters if letter in out)
    own = w_letters[: ws.ndim - dims]
    scaled = g * aligned(jnp.squeeze(s, tuple(range(-dims, 0))), own, out)
    dx = matmul(f"{out},{w_letters}->{x_letters}", scaled.astype(dtype), ws.astype(dtype), dtype)
    over_a = aligned(jnp.squeeze(1 / a, contracted), kept, out)
    dw = weight_gradient(eqn, xs.astype(dtype), (g * over_a).astype(dtype))
    return dx.astype(dtype), dw.astype(w_like.dtype)


_product.defvjp(_fwd, _bwd)


def _integers(eqn: str, xs: Array, ws: Array, dtype: Any) -> Array:
    """float32 product of int8 codes."""
    if (chip := chip_of(device_kind())) and chip.int8_units:
        sums = jnp.einsum(eqn, xs, ws, preferred_element_type=jnp.int32)
        return sums.astype(jnp.float32)
    return matmul(eqn, xs.astype(dtype), ws.astype(dtype))
