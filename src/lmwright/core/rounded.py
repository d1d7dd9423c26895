"""Products with weights that are trained as floats and compute rounded (`core.rounding`).

    values = scale x codes of (w / scale)                   scale follows from w, step by step
    values = scale x codes of (base / scale0 + a b)         scale and a, b are trained, the base not
                                                            (https://arxiv.org/abs/2406.06385)

The gradient of what is rounded passes where the code is one of the grid's, and is zero where it was
clipped.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.leaves import Lora, Rounded, added, dequantize
from lmwright.core.param import letters
from lmwright.core.rounding import GRIDS, int8_shifted, straight
from lmwright.core.weight import untyped_dot


def product(eqn: str, x: Array, w: Rounded, narrow: None = None) -> Array:
    """Product with the weight's rounded values, in the dtype of `x`; they are rounded again in the
    backward pass, which keeps the floats alone."""
    return jax.checkpoint(partial(_product, eqn))(x, w)


def _product(eqn: str, x: Array, w: Rounded) -> Array:
    x_letters, w_letters, out = letters(eqn)
    batch = w_letters[: len(w_letters) - w.inputs - w.outputs]
    each = out + batch  # an expert's inputs have a scale of their own, wherever it is summed over
    x = met(x, w, tuple(i for i, letter in enumerate(x_letters) if letter not in each))
    return untyped_dot(eqn, x.dtype, x, widened(w).astype(x.dtype))


def met(x: Array, w: Rounded, axes: tuple[int, ...]) -> Array:
    """Activations as the weight reads them, in their dtype; a token's are along `axes`."""
    return int8_shifted(x, axes).astype(x.dtype) if w.activations == "int8" else x


def widened(w: Rounded) -> Array:
    """float32 values that the weight computes with."""
    blocks, codes, inside, scale = _codes(w)
    if isinstance(w.latent, Lora):
        values = straight(blocks, codes, inside) * scale
    else:
        values = straight(blocks, codes * scale, inside)
    return values.reshape(shape_of(w))


def stored(w: Rounded) -> tuple[Array, Array]:
    """int8 codes like the weight, and float32 scales [*batch, groups, *outputs]; their products are
    `widened`."""
    _, codes, _, scale = _codes(w)
    shape = shape_of(w)
    batch, outputs = shape[: -w.inputs - w.outputs], shape[len(shape) - w.outputs :]
    return codes.reshape(shape).astype(jnp.int8), scale.reshape(*batch, -1, *outputs)


def first_scale(base: Any, w: Rounded) -> Array:
    """Scales [*batch, groups, *outputs] that follow from a frozen weight, with which their training
    begins."""
    return stored(replace(w, latent=dequantize(base, jnp.float32), scale=None))[1]


def shape_of(w: Rounded) -> tuple[int, ...]:
    """Shape of the weight."""
    latent = w.latent.base if isinstance(w.latent, Lora) else w.latent
    return getattr(latent, "values", latent).shape


def _codes(w: Rounded) -> tuple[Array, Array, Array, Array]:
    """(what is rounded, its codes as floats, whether they are not clipped, scales), in blocks
    [*batch, groups, inputs, outputs]; only the scales of a Lora and what is rounded take a
    gradient."""
    grid = GRIDS[w.grid]
    if isinstance(w.latent, Lora):
        base = _blocks(lax.stop_gradient(dequantize(w.latent.base, jnp.float32)), w)
        x = base * grid.scale(base)[1] + _blocks(added(w.latent), w)
        scale = w.scale.reshape(*x.shape[:-2], 1, x.shape[-1])
        scale = straight(scale, grid.stored(scale), jnp.ones_like(scale, bool))
        near, blocks = lax.stop_gradient(x), x
    else:
        blocks = _blocks(w.latent.astype(jnp.float32), w)
        fixed = lax.stop_gradient(blocks)
        scale, inverse = grid.scale(fixed)
        near = fixed * inverse
    whole = grid.whole(near)
    codes = jnp.clip(whole, grid.low, grid.high)
    return blocks, codes, whole == codes, scale


def _blocks(w: Array, leaf: Rounded) -> Array:
    """[*batch, groups, inputs, outputs] of [*batch, *inputs, *outputs]."""
    batch = w.shape[: w.ndim - leaf.inputs - leaf.outputs]
    flat = w.reshape(*batch, -1, math.prod(w.shape[w.ndim - leaf.outputs :]))
    group = leaf.group or flat.shape[-2]
    return flat.reshape(*batch, -1, group, flat.shape[-1])
