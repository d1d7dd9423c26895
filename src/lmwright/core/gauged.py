"""Products with weights that are being measured: each adds up the second moments of its inputs,
which say how much an error of the weight changes the result.

    moments = sum over tokens of x x'        |x (W - Q)|^2 = trace of (W - Q)' moments (W - Q)

They come out as the gradient of `Gauged.moments`, so any model is measured by differentiating
anything that depends on its last layer; the values of gradients play no part.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.leaves import Gauged
from lmwright.core.param import letters
from lmwright.core.ragged import ragged_product
from lmwright.core.weight import dot

Saved = tuple[Array, ...]


def product(eqn: str, x: Array, w: Gauged, narrow: None = None) -> Array:
    """The product of `eqn` with the weight, in the dtype of `x`."""
    return dot(eqn, _gauge(eqn, w.inputs, x, w.moments), w.weight)


def product_of_rows(x: Array, w: Gauged, sizes: Array) -> Array:
    """Rows x [T, D] times the matrix of their group, as `ragged.dot_ragged` has it."""
    return ragged_product(_gauge_rows(x, w.moments, sizes), w.weight, sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gauge(eqn: str, num_inputs: int, x: Array, moments: Array) -> Array:
    return x


def _gauge_fwd(eqn: str, num_inputs: int, x: Array, moments: Array) -> tuple[Array, Saved]:
    return x, (x, moments)


def _gauge_bwd(eqn: str, num_inputs: int, saved: Saved, g: Array) -> tuple[Array, Array]:
    x, moments = saved
    return g, jnp.broadcast_to(moments_of(eqn, num_inputs, x), moments.shape)


_gauge.defvjp(_gauge_fwd, _gauge_bwd)


def moments_of(eqn: str, num_inputs: int, x: Array) -> Array:
    """float32 [*batch, I, I]: sums of x x' over the tokens of x, for the weight of `eqn`, whose
    inputs are the last `num_inputs` letters that x shares and the result lacks."""
    x_letters, w_letters, out = letters(eqn)
    inputs = [letter for letter in w_letters if letter in x_letters and letter not in out]
    inputs = inputs[-num_inputs:]
    batch = w_letters[: w_letters.index(inputs[0])]
    tokens = [letter for letter in x_letters if letter not in (*batch, *inputs)]
    seen = [letter for letter in batch if letter in x_letters]  # another's are the same for all
    size = dict(zip(x_letters, x.shape, strict=True))
    order = [x_letters.index(letter) for letter in (*seen, *tokens, *inputs)]
    width = math.prod(size[letter] for letter in inputs)
    rows = x.transpose(order).reshape(*(size[letter] for letter in seen), -1, width)
    rows = rows.astype(jnp.float32)
    return jnp.matmul(rows.mT, rows, precision=lax.Precision.HIGHEST)


@jax.custom_vjp
def _gauge_rows(x: Array, moments: Array, sizes: Array) -> Array:
    return x


def _gauge_rows_fwd(x: Array, moments: Array, sizes: Array) -> tuple[Array, Saved]:
    return x, (x, moments, sizes)


def _gauge_rows_bwd(saved: Saved, g: Array) -> tuple[Array, Array, None]:
    x, moments, sizes = saved
    rows = x.astype(jnp.float32)  # their product with themselves is a gradient of a product
    sums = jax.vjp(lambda w: ragged_product(rows, w, sizes), jnp.zeros_like(moments))[1](rows)[0]
    return g, sums, None


_gauge_rows.defvjp(_gauge_rows_fwd, _gauge_rows_bwd)
