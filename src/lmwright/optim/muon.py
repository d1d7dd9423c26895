"""Muon (https://kellerjordan.github.io/posts/muon/): orthogonalized momentum.

    momentum [batch, in, out] --Newton-Schulz--> close to U V^T, where momentum = U S V^T

Hidden matrices only, as its author found: weights with a vocabulary axis and weights that
are no matrices get AdamW. Each matrix of a stack (layers, experts) is treated by itself.
"""

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.param import Param
from lmwright.optim import adamw
from lmwright.optim.other_kinds import Muon
from lmwright.optim.rule import Slot, Slots, like

# quintic of the author: steep at zero rather than convergent at one
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_DTYPES = {"bf16": jnp.bfloat16, "fp32": jnp.float32}


def is_hidden(param: Param) -> bool:
    """True if a weight is a matrix between hidden states, by its arrow."""
    return param.is_matrix and not {"vocab", "distances"} & set(param.axes)


def slots(optim: Muon, param: Param) -> dict[str, Slot]:
    """Momentum; weights that are not hidden matrices have AdamW's two moments."""
    return {"mu": like(param)} if is_hidden(param) else adamw.slots(optim, param)


def direction(
    optim: Muon, param: Param, g: Array, w: Array, slots: Slots, t: Array
) -> tuple[Array, dict[str, Array]]:
    """Orthogonalized momentum, scaled by the shape of the matrix."""
    if not is_hidden(param):
        step, new_slots = adamw.direction(optim, param, g, w, slots, t)
        return optim.adamw_rate_ratio * step, new_slots
    beta = optim.momentum
    mu = beta * slots["mu"] + (1 - beta) * g
    mixed = beta * mu + (1 - beta) * g if optim.momentum_form == "nesterov" else mu
    fan_in, fan_out = param.matrix_shape
    x = mixed.reshape(-1, fan_in, fan_out)
    step = orthogonalize(x, optim.newton_schulz_steps, _DTYPES[optim.precision])
    if optim.scale == "rms":
        scale = 0.2 * max(fan_in, fan_out) ** 0.5
    else:
        scale = max(1, fan_out / fan_in) ** 0.5
    return scale * step.reshape(g.shape), {"mu": mu}


def orthogonalize(x: Array, steps: int, dtype: jnp.dtype) -> Array:
    """Matrices [batch, m, n] with their singular values moved close to one; float32 in and out.

    `dtype` is that of the products' operands; coefficients and sums are float32.
    Matrices go one after the other: the temporaries of one, not of the stack, exist at once.
    """
    return jax.lax.map(lambda matrix: _newton_schulz(matrix, steps, dtype), x)


def _newton_schulz(x: Array, steps: int, dtype: jnp.dtype) -> Array:
    a, b, c = _COEFFICIENTS
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x  # [m, n], m <= n: the Gram matrix is the small one
    x = (x / jnp.maximum(jnp.linalg.norm(x), 1e-7)).astype(dtype)

    def matmul(left: Array, right: Array) -> Array:
        return jnp.matmul(left, right, preferred_element_type=jnp.float32)

    for _ in range(steps):
        gram = matmul(x, x.T).astype(dtype)  # [m, m]
        poly = (b * gram.astype(jnp.float32) + c * matmul(gram, gram)).astype(dtype)
        total = a * x.astype(jnp.float32) + matmul(poly, x)
        x = total.astype(dtype)
    return total.T if tall else total
