"""dot: the one place where activations meet a weight.

Sums run in float32 on a device whatever the operands are, and the result has the activations'
dtype (or `out_dtype`); so have the parts of it that devices along `tensor` add up. The form
of a matmul that is fast on a platform is chosen here alone, when a program is lowered, so that
compiling for another machine gives the program of that machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from lmwright.config.registry import Registry
from lmwright.core import cpu
from lmwright.core.compute import CAST, MATMUL, WIDE_MATMUL
from lmwright.core.leaves import TYPED, Int4, Int8, Lora, Weight, dequantize, merge
from lmwright.core.param import Tree, letters
from lmwright.core.sharding import batch_ways, by_platform, device_kind, platform

# where gradients are scattered by an all-to-all
TORUS = ("TPU v4", "TPU v5", "TPU v5p")  # whose links run one by themselves
MOST_SCATTERED = 16  # devices; beyond, its way is too long

PRODUCTS = Registry(
    __package__,
    {
        "Int8": "frozen.product", "Int4": "frozen.product", "Lora": "frozen.low_rank",
        "narrow": "frozen.narrow_products", "fan": "fan.fan", "Gauged": "gauged.product",
        "Ternary": "ternary.product", "Rounded": "rounded.product", "Float8": "float8.product",
    },
)  # fmt: skip
"""Product functions `(eqn, x, w, narrow)` by leaf type; "narrow" computes the part that Lora leaves
of one x share, "fan" several products under tensor parallelism. Imported when first used."""


def name_result(x: Array, name: str = MATMUL) -> Array:
    """`x`, named for rematerialization policies."""
    return checkpoint_name(x, name)


def dot(
    eqn: str,
    x: Array,
    w: Weight,
    *,
    out_dtype: jnp.dtype | None = None,
    name: str | None = None,
    narrow: Array | None = None,
) -> Array:
    """einsum of activations with a weight, e.g. `dot("btd,dnh->btnh", x, w)`.

    An array is cast to the dtype of `x`; quantized leaves, and the base of `Lora`, take no
    gradient. Letters as in `core.fan.NAMES`, and v for vocab. `name` is what rematerialization
    policies know the result by, if not by its width. `narrow` is a Lora's part of
    `narrow_products`.
    """
    name = name or name_of(eqn)
    if not isinstance(w, TYPED) and x.shape[1] > 1 and (flat := _heads_as_one(eqn)):
        out = dot(flat, x, w.reshape(w.shape[0], -1), out_dtype=out_dtype, name=name)
        return out.reshape(*out.shape[:-1], *w.shape[1:])
    if isinstance(w, TYPED):
        out = PRODUCTS[type(w).__name__](eqn, x, w, narrow)
    else:
        out = untyped_dot(eqn, out_dtype or x.dtype, x, _cast(w, x.dtype))
    return name_result(out.astype(out_dtype or x.dtype), name)


def _cast(w: Array, dtype: jnp.dtype) -> Array:
    return w if w.dtype == dtype else name_result(w.astype(dtype), CAST)


def _heads_as_one(eqn: str) -> str | None:
    """`eqn` for a weight [D, N, H] as a matrix, if that is what it takes: else TPUs store, gather
    and add it up padded to 128, and turn it for the product. One token's reads it as it is."""
    x_letters, w_letters, out = letters(eqn)
    inner, outer = w_letters[0], w_letters[1:]
    if len(outer) < 2 or x_letters[-1] != inner or out != x_letters[:-1] + outer:
        return None
    return f"{x_letters},{inner}{outer[-1]}->{x_letters[:-1]}{outer[-1]}"


def name_of(eqn: str) -> str:
    """Default name by which rematerialization policies know the result of `eqn`."""
    return WIDE_MATMUL if eqn.endswith("f") else MATMUL


def as_array(w: Weight, dtype: jnp.dtype) -> Array:
    """The weight as one array: typed leaves are dequantized or merged."""
    if isinstance(w, Lora):
        return merge(w)
    return dequantize(w, dtype) if isinstance(w, TYPED) else w


def product(eqn: str, x: Array, w: Array, dtype: jnp.dtype = jnp.float32) -> Array:
    """The product in `dtype` or, on CPUs, float32."""
    default = partial(_einsum, eqn, dtype=dtype)
    return by_platform(
        x, w, cpu=lambda *both: cpu.einsum(eqn, *both).astype(dtype), default=default
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def untyped_dot(eqn: str, dtype: jnp.dtype, x: Array, w: Array) -> Array:
    """`dot` of an array in the activations' dtype, with a result in `dtype` and no name."""
    return product(eqn, x, w, dtype)


def _dot_fwd(eqn: str, dtype: jnp.dtype, x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return untyped_dot(eqn, dtype, x, w), (x, w)


def _dot_bwd(
    eqn: str, dtype: jnp.dtype, residuals: tuple[Array, Array], g: Array
) -> tuple[Array, Array]:
    x, w = residuals
    wide, g = g.dtype != x.dtype, g.astype(x.dtype)
    g = lax.optimization_barrier(g) if wide else g  # narrowed once for both products
    x_letters, w_letters, out = letters(eqn)
    dx = untyped_dot(f"{out},{w_letters}->{x_letters}", x.dtype, g, w)
    return dx, weight_gradient(eqn, x, g, w.dtype)


untyped_dot.defvjp(_dot_fwd, _dot_bwd)


def _einsum(eqn: str, x: Array, w: Array, *, dtype: jnp.dtype = jnp.float32) -> Array:
    return jnp.einsum(eqn, x, w, preferred_element_type=dtype)


def weight_gradient(eqn: str, x: Array, g: Array, dtype: jnp.dtype = jnp.float32) -> Array:
    """Gradient of the weight of `eqn`, for activations and the gradient of the result: a sum in
    float32, rounded to `dtype`."""
    on_cpu, default = partial(cpu.weight_gradient, eqn), partial(_weight_gradient, eqn, dtype)
    return by_platform(x, g, cpu=on_cpu, default=default).astype(dtype)


def _weight_gradient(eqn: str, dtype: jnp.dtype, x: Array, g: Array) -> Array:
    x_letters, w_letters, out = letters(eqn)
    mesh, equation = jax.sharding.get_abstract_mesh(), f"{x_letters},{out}->{w_letters}"
    if platform() == "gpu" and mesh.size == 1:  # XLA would round it in a pass of its own
        return _einsum(equation, x, g, dtype=dtype)
    if not mesh.empty and mesh.size > 1 and x_letters[0] == "b" and "d" in w_letters:
        if scatters(device_kind(), mesh.shape, batch_ways(mesh)):
            return scattered_gradient(eqn, x, g, mesh.shape["fsdp"])
    return _einsum(equation, x, g)


def scatters(device_kind: str, sizes: Mapping[str, int], batch_ways: int) -> bool:
    """True if gradients go to their shards by `scattered_gradient` on a mesh of these sizes: rows
    are sharded over `fsdp` alone and the all-to-all is short."""
    alone = sizes["fsdp"] == batch_ways and sizes["context"] == 1
    return device_kind in TORUS and alone and 1 < sizes["fsdp"] <= MOST_SCATTERED


def scattered_gradient(eqn: str, x: Array, g: Array, ways: int) -> Array:
    """Gradient of the weight of `eqn` for activations whose rows are cut `ways` over `fsdp`.

    Each device's part of the sum goes to the devices that hold the shards (all-to-all), which
    add up in float32. An all-reduce, which is what TPU compilers make of it, moves twice the
    bytes and stops the arithmetic meanwhile.
    """
    x_letters, w_letters, out = letters(eqn)
    pin, rest = jax.lax.with_sharding_constraint, PartitionSpec.UNCONSTRAINED
    parts = [a.reshape(ways, -1, *a.shape[1:]) for a in (x, g)]  # [ways, B/ways, T, ...]
    parts = [pin(a, PartitionSpec("fsdp", *[rest] * (a.ndim - 1))) for a in parts]
    sums = _einsum(f"y{x_letters},y{out}->y{w_letters}", *parts).astype(x.dtype)
    sums = pin(sums, PartitionSpec("fsdp", *[rest] * len(w_letters)))
    held = ["fsdp" if letter == "d" else rest for letter in w_letters]
    sums = pin(sums, PartitionSpec(None, *held))
    return added_up(sums)


def added_up(sums: Array) -> Array:
    """float32 sum over axis 0. For matrices it is written out as additions, which the compiler does
    in the same pass that writes the stack of layers."""
    if sums.ndim > 3:
        return jnp.sum(sums.astype(jnp.float32), axis=0)
    return sum(part.astype(jnp.float32) for part in sums)


def before_products(x: Array) -> Array:
    """Returns `x` in memory as TPUs need it, and its gradient likewise: otherwise a normalization
    is recomputed for every tile of every matmul that reads it."""
    barrier = lax.optimization_barrier
    return by_platform(x, tpu=barrier, default=lambda x: x)


@jax.custom_vjp
def compute_once(x: Array) -> Array:
    """Puts x behind a barrier on CPUs, so that XLA does not recompute it for each matmul of it."""
    return cpu_barrier(x)[0]


@jax.custom_vjp
def gradient_once(y: Array) -> Array:
    """Returns `y` unchanged and computes its gradient only once."""
    return y


def cpu_barrier(*arrays: Array) -> tuple[Array, ...]:
    """Optimization barrier on CPUs; identity elsewhere."""
    barrier = lambda *a: lax.optimization_barrier(a)  # noqa: E731
    return by_platform(*arrays, cpu=barrier, default=lambda *a: a)


compute_once.defvjp(lambda x: (cpu_barrier(x)[0], None), lambda _, g: (g,))
gradient_once.defvjp(lambda y: (y, None), lambda _, g: cpu_barrier(g))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Noisy:
    """An embedding table whose rows are looked up with noise on them; no matmul takes it."""

    table: Weight  # [V, D]
    noise: Array  # [B, T, D]


def lookup(table: Weight | Noisy, ids: Array, dtype: jnp.dtype) -> Array:
    """Rows of an embedding table [V, D] for int ids [...]: [..., D] in `dtype`."""
    if isinstance(table, Noisy):
        return lookup(table.table, ids, dtype) + table.noise.astype(dtype)
    if isinstance(table, Lora):
        narrow = jnp.take(table.a, ids, axis=0).astype(dtype)
        added = jnp.matmul(narrow, table.b.astype(dtype), preferred_element_type=jnp.float32)
        return lookup(lax.stop_gradient(table.base), ids, dtype) + added.astype(dtype)
    if isinstance(table, Int8):
        return (jnp.take(table.values, ids, axis=0) * table.scale).astype(dtype)
    if isinstance(table, Int4):
        block = table.values.shape[0] // table.scale.shape[0]
        scale = jnp.take(table.scale, ids // block, axis=0).astype(jnp.float32)
        return (jnp.take(table.values, ids, axis=0).astype(jnp.float32) * scale).astype(dtype)
    return jnp.take(as_array(table, jnp.float32), ids, axis=0).astype(dtype)


def nbytes(tree: Tree) -> int:
    """Bytes of all leaves, abstract or real, as devices hold them: int4 is packed."""
    leaves = jax.tree.leaves(tree)
    return sum(a.size // 2 if a.dtype == jnp.int4 else a.size * a.dtype.itemsize for a in leaves)
