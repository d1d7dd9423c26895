"""Matmuls as XLA's CPU compiler likes them, and the options it needs; see docs/speed.md.

Its own choices cost a third of a train step: it computes a value again inside every loop
that reads it, runs the transposed product of a weight gradient at half speed, and has no
fast bfloat16 product without AMX. All functions here work, slower, without the options.
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

OPTIONS = {
    # barriers survive until code is emitted, so that what is behind one is computed once
    "xla_disable_hlo_passes": "cse_barrier_expander",
    # each step's temporary memory is new to the process: less of it is less time, too
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}

WIDE = 8  # times the other side
NARROW = 128  # as the rank of an adapter

# A product's rows of a multiple of so many float32 share the sets of an AVX2 machine's caches, and
# where its sums take several rounds it is written at half speed; a few columns more cure that.
ALIASED = 512
PADDING = 16
ROUND = 256  # of the contracted axis
FEW_ROWS = 256  # for which a padded copy of the other side costs more than it brings

CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What the machine's instruction set has, as Linux names it; empty elsewhere."""
    text = CPUINFO.read_text(errors="replace") if CPUINFO.is_file() else ""
    lines = (line for line in text.splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").partition(":")[2].split())


def has_amx() -> bool:
    """Whether this machine multiplies bfloat16 tiles in hardware."""
    return "amx_bf16" in cpu_flags()


def padding_pays(num_rows: int, shared: int, columns: int) -> bool:
    """Whether a product of these sides is faster with a few columns more on this machine."""
    if "avx2" not in cpu_flags() or "avx512f" in cpu_flags():
        return False
    return columns % ALIASED == 0 and shared > ROUND and num_rows >= FEW_ROWS


def compiler_options() -> dict[str, str]:
    """What `jax.jit` should tell the compiler on this machine."""
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


def letters(eqn: str) -> tuple[str, str, str]:
    """Those of activations, weight and result in "activations,weight->result"."""
    inputs, out = eqn.split("->")
    x_letters, w_letters = inputs.split(",")
    return x_letters, w_letters, out


def product(a: Array, b: Array, a_axis: int, b_axis: int, *, apart: bool = False) -> Array:
    """float32 matrix of two matrices contracted over one axis of each.

    `apart`: what reads it must not change how the product itself is computed.
    """
    dims = (((a_axis,), (b_axis,)), ((), ()))
    columns = b.shape[1 - b_axis]
    if pays := padding_pays(a.shape[1 - a_axis], a.shape[a_axis], columns):
        b = lax.optimization_barrier(
            jnp.pad(b, [(0, 0 if i == b_axis else PADDING) for i in (0, 1)])
        )
    c = lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
    c = lax.optimization_barrier(c) if apart or pays else c
    return c[:, :columns]


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
        transposed = product(w, columns, 1, 0, apart=True)
        return jnp.moveaxis(transposed.reshape(w.shape[0], *x.shape[:-1]), 0, -1)
    if left and w_letters[0] == shared and out == rows + w_letters[1]:
        return product(_wide_first(x), w, 0, 0).reshape(*x.shape[:-1], w.shape[1])
    inner = "".join(a for a in x_letters if a in w_letters)
    rows, outer = x_letters.removesuffix(inner), "".join(a for a in w_letters if a not in inner)
    sizes = dict(zip(x_letters + w_letters, x.shape + w.shape, strict=True))
    num_rows, shared, columns = (_product_of(part, sizes) for part in (rows, inner, outer))
    if (
        (rows + inner, rows + outer) == (x_letters, out)
        and w_letters in (inner + outer, outer + inner)
        and padding_pays(num_rows, shared, columns)
    ):
        shape, axis = ((shared, -1), 0) if w_letters == inner + outer else ((-1, shared), 1)
        y = product(x.reshape(num_rows, shared), w.reshape(shape), 1, axis)
        return y.reshape([sizes[a] for a in out])
    return jnp.einsum(eqn, x, w, preferred_element_type=jnp.float32)


def _wide_first(a: Array) -> Array:
    """[..., V] to [V, rows]."""
    return jnp.moveaxis(a, -1, 0).reshape(a.shape[-1], -1)


def stands_left(w: Array) -> bool:
    """Whether a weight is a matrix that, contracted over its last axis, is the left one of its
    product."""
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
    num_rows = _product_of(rows, sizes)
    x, g = operands(x, g)
    x = x.reshape(num_rows, -1)
    if [*outer, *inner] == list(w_letters) and len(outer) == 1 and g.shape[-1] >= WIDE * x.shape[1]:
        return product(_wide_first(g), x, 1, 0).reshape([sizes[a] for a in w_letters])
    g = g.reshape(num_rows, -1)
    narrow_x = x.shape[1] <= g.shape[1]
    first = inner + outer if narrow_x else outer + inner
    # apart where it is transposed: folded back into the product, the transpose makes it slow, and
    # for bfloat16 fails at run time
    apart = first != list(w_letters)
    if narrow_x:
        dw = product(x, g, 0, 0, apart=apart)
    else:
        dw = product(_transposed(g), x, 1, 0, apart=apart)
    return jnp.einsum(f"{''.join(first)}->{w_letters}", dw.reshape([sizes[a] for a in first]))


def _transposed(a: Array) -> Array:
    """`a` the other way round beside `a` itself, whose other readers keep their order."""
    return lax.optimization_barrier(lax.optimization_barrier(a).T)


def _product_of(letters: Sequence[str], sizes: dict[str, int]) -> int:
    total = 1
    for letter in letters:
        total *= sizes[letter]
    return total


def over_rows(rows_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`rows_fn`, whose arrays all begin with rows that never see each other, such that a `vmap`
    around it takes the rows of all lanes at once: to the compiler it is one batch, of the same
    loops and products. Not to be differentiated; it belongs inside rules that are."""
    whole = jax.custom_batching.custom_vmap(rows_fn)

    @whole.def_vmap
    def lanes(num: int, mapped: list[bool], *arrays: Array) -> tuple[Any, Any]:
        arrays = tuple(
            a if is_mapped else jnp.broadcast_to(a, (num, *a.shape))
            for a, is_mapped in zip(arrays, mapped, strict=True)
        )
        out = whole(*(a.reshape(-1, *a.shape[2:]) for a in arrays))
        out = jax.tree.map(lambda a: a.reshape(num, -1, *a.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return whole


def unstacked(layers: jax.Array) -> list[Array]:
    """Slices [1, ...] of axis 0; their gradients are put together by one concatenation instead
    of a sum of padded arrays."""
    return lax.split(layers, [1] * layers.shape[0], axis=0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def layer_of(index: int, slot: Array, layers: Array) -> Array:
    """`layers[index]`, whose gradient goes to `slot`, one of `unstacked(layers)`.

    The slot's own value is never read: a backward pass that computes this again takes the
    slice from the stack, and no copy of the layer lives in between.
    """
    del slot
    return lax.index_in_dim(layers, index, keepdims=False)


def _layer_of_fwd(index: int, slot: Array, layers: Array) -> tuple[Array, None]:
    return layer_of(index, slot, layers), None


def _layer_of_bwd(index: int, kept: None, g: Array) -> tuple[Array, None]:
    return g[None], None


layer_of.defvjp(_layer_of_fwd, _layer_of_bwd)


@jax.custom_vjp
def once(x: Array) -> Array:
    """`x`, which the products of several shapes that read it do not compute again each."""
    return sealed(x)[0]


@jax.custom_vjp
def gradient_once(y: Array) -> Array:
    """`y`, the same for its gradient."""
    return y


def sealed(*arrays: Array) -> tuple[Array, ...]:
    """The arrays behind a barrier, on CPUs alone."""
    barrier = lambda *a: lax.optimization_barrier(a)  # noqa: E731
    return lax.platform_dependent(*arrays, cpu=barrier, default=lambda *a: a)


once.defvjp(lambda x: (*sealed(x), None), lambda _, g: (g,))
gradient_once.defvjp(lambda y: (y, None), lambda _, g: sealed(g))


@jax.custom_vjp
def together(*inputs: Array) -> tuple[Array, ...]:
    """The inputs of a block, whose gradients are taken all at once: left to itself the compiler
    puts off weight gradients to the end of the backward pass, and what they read lives on."""
    return inputs


def _together_fwd(*inputs: Any) -> tuple[tuple[Array, ...], tuple[Any, ...]]:
    trained = tuple(() if a.perturbed else None for a in inputs)  # a tree, so known in advance
    return tuple(a.value for a in inputs), trained


def _together_bwd(trained: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Array | None, ...]:
    # a frozen input's gradient is nobody's: in the barrier it would be computed all the same
    wanted = [t is not None and isinstance(g, Array) for t, g in zip(trained, grads, strict=True)]
    sealed = iter(lax.optimization_barrier([g for g, w in zip(grads, wanted, strict=True) if w]))
    return tuple(next(sealed) if w else None for w in wanted)


together.defvjp(_together_fwd, _together_bwd, symbolic_zeros=True)
