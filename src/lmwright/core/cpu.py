"""Matmuls in the layouts that XLA's CPU compiler runs fast, and its options.

See docs/internals/cpu-training.md.

XLA's own choices cost a third of a train step: it computes a value again inside every loop
that reads it, runs the transposed product of a weight gradient at half speed, and has no
fast bfloat16 product without AMX. All functions here work, slower, without the options.
"""

import functools
import math
from pathlib import Path

import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.param import letters

OPTIONS = {
    # barriers survive until code is emitted, so that what is behind one is computed once
    "xla_disable_hlo_passes": "cse_barrier_expander",
    # each step's temporary memory is new to the process: less of it is less time, too
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}

WIDE = 8  # times the other side
NARROW = 128  # as the rank of an adapter
MATVEC = 64  # rows of a product that is bound by reading its weight

CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def has_amx() -> bool:
    """True if this machine multiplies bfloat16 tiles in hardware."""
    return CPUINFO.is_file() and "amx_bf16" in CPUINFO.read_text(errors="replace")


def compiler_options() -> dict[str, str]:
    """Compiler options for `jax.jit` on this machine."""
    if has_amx():
        return OPTIONS
    # float32 products of its newer library (YNN) take up to twice the time of Eigen
    return OPTIONS | {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}


def operands(*arrays: Array) -> tuple[Array, ...]:
    """The arrays as a matmul should read them: bfloat16 only where that is the faster one.

    Widening is exact, and sums are float32 in both cases.
    """
    if has_amx():
        return arrays
    return tuple(a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in arrays)


def product(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """float32 matrix of two matrices contracted over one axis of each."""
    dims = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def einsum(eqn: str, x: Array, w: Array) -> Array:
    """The float32 einsum of activations and a weight.

    A wide weight that is contracted over its last axis, such as a tied head, stands on the
    left of its product: the other way round it would be transposed piece by piece. What lies
    along its wide side is in memory as the product leaves it, wide side first.
    """
    x, w = operands(x, w)
    x_letters, w_letters, out = letters(eqn)
    rows, shared = x_letters[:-1], x_letters[-1]
    left = stands_left(w)
    if left and w_letters[1] == shared and out == rows + w_letters[0]:
        columns = lax.optimization_barrier(x.reshape(-1, x.shape[-1]).T)
        transposed = lax.optimization_barrier(product(w, columns, 1, 0))
        return jnp.moveaxis(transposed.reshape(w.shape[0], *x.shape[:-1]), 0, -1)
    if left and w_letters[0] == shared and out == rows + w_letters[1]:
        return product(_wide_first(x), w, 0, 0).reshape(*x.shape[:-1], w.shape[1])
    summed = len(w_letters) - 1  # axes
    sums_all = x_letters.endswith(w_letters[:-1]) and out == x_letters[:-summed] + w_letters[-1]
    if summed > 1 and sums_all and x.size <= MATVEC * w[..., 0].size:
        # as a matrix: otherwise the weight is turned around for each token
        x = x.reshape(*x.shape[:-summed], -1)
        w = w.reshape(-1, w.shape[-1])
        eqn = f"{x_letters[:-summed]}{x_letters[-1]},{w_letters[-2:]}->{out}"
    return jnp.einsum(eqn, x, w, preferred_element_type=jnp.float32)


def _wide_first(a: Array) -> Array:
    """[..., V] to [V, rows]."""
    return jnp.moveaxis(a, -1, 0).reshape(a.shape[-1], -1)


def stands_left(w: Array) -> bool:
    """True if a weight is a matrix that should be the left operand of its product, contracted over
    its last axis."""
    return w.ndim == 2 and w.shape[0] >= WIDE * w.shape[1] and w.shape[1] >= NARROW


def weight_gradient(eqn: str, x: Array, g: Array) -> Array:
    """float32 gradient of the weight of `eqn` ("rows inputs, weight -> rows outputs").

    The narrower side is the one that is transposed, by itself, before the product.
    """
    x_letters, w_letters, out = letters(eqn)
    rows = [a for a in x_letters if a not in w_letters]
    inner = [a for a in x_letters if a in w_letters]
    outer = [a for a in out if a in w_letters]
    sizes = dict(zip(x_letters + out, x.shape + g.shape, strict=True))
    fits = [*rows, *inner] == list(x_letters) and [*rows, *outer] == list(out)
    if not fits or sorted(inner + outer) != sorted(w_letters):
        return jnp.einsum(f"{x_letters},{out}->{w_letters}", *operands(x, g),
                          preferred_element_type=jnp.float32)  # fmt: skip
    num_rows = math.prod(sizes[a] for a in rows)
    x, g = operands(x, g)
    x = x.reshape(num_rows, -1)
    if [*outer, *inner] == list(w_letters) and len(outer) == 1 and g.shape[-1] >= WIDE * x.shape[1]:
        return product(_wide_first(g), x, 1, 0).reshape([sizes[a] for a in w_letters])
    g = g.reshape(num_rows, -1)
    if x.shape[1] <= g.shape[1]:
        first, dw = inner + outer, product(x, g, 0, 0)
    else:
        first, dw = outer + inner, product(_transposed(g), x, 1, 0)
    dw = dw.reshape([sizes[a] for a in first])
    if first != list(w_letters):
        # behind a barrier: folded back into the product, the transpose makes it slow, and
        # for bfloat16 fails at run time
        dw = jnp.einsum(f"{''.join(first)}->{w_letters}", lax.optimization_barrier(dw))
    return dw


def _transposed(a: Array) -> Array:
    """Transposed copy of `a`, so that the other readers of `a` keep its layout."""
    return lax.optimization_barrier(lax.optimization_barrier(a).T)
