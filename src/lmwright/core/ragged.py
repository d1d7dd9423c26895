"""Products of rows that come in groups, each group with a matrix of its own.

    rows  x [T, D]   0 0 0 | 1 | 3 3 3 3 | - -      sizes [3, 1, 0, 4]; the last rows are nobody's
    w     [E, D, F]  w0      w1  w3                 and may come out as anything

The work is that of the rows: no group is filled up to the largest one. On TPUs this is
megablox (https://arxiv.org/abs/2211.15841), whose grid follows the sizes; XLA's own
`ragged_dot` takes twice the cycles of the plain product there, and for the weight's gradient
as many times as there are groups. GPUs from Ampere on have kernels of our own for bfloat16
(`core.gpu_ragged`). Elsewhere a loop goes over blocks of each group's rows; of a few rows, each
reads its own matrix.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.config.registry import Registry
from lmwright.core import cpu
from lmwright.core.compute import EARLY, LANES
from lmwright.core.frozen import dropped
from lmwright.core.in_stack import InStack, as_copied
from lmwright.core.leaves import Gauged, Lora, Rounded, dequantize, merge
from lmwright.core.rounded import met, widened
from lmwright.core.sharding import by_platform, device_kind
from lmwright.core.weight import Weight, as_array, name_of, name_result

TILE = 512  # rows of a TPU kernel's step, at most
WIDEST = 1024  # inputs or outputs of it
MEASURED = Registry(__package__, {"rows": "gauged.product_of_rows"})
MOST_GRADIENTS = 1024 * 768  # of a step: three float32 copies must fit a TPU's 16 MB of VMEM

Read = Callable[[Any], Array]
"""Makes the matrices of groups [E, D, F] of what a weight is kept as, e.g. gathers its parts."""


class Turned(NamedTuple):
    """A `Read` that makes them the other way round, [E, F, D], as products read them then."""

    read: Read

    def __call__(self, w: Any) -> Array:
        return self.read(w)


class Parts(NamedTuple):
    """Reads of a `Lora` of which a device holds parts; None for what it holds whole."""

    base: Read | None
    a: Read | None
    b: Read | None


def dot_ragged(
    eqn: str,
    x: Array,
    w: Weight | InStack,
    sizes: Array,
    *,
    name: str | None = None,
    read: Read | Parts | None = None,
    own: Array | None = None,
) -> Array:
    """Rows times the matrix of their group, e.g. `dot_ragged("td,edf->tf", x, w, sizes)`.

    Groups lie one after the other, int32 `sizes` [E] rows each. Rows after the last group give
    zeros or, on TPUs, what memory held, NaN too. dtype of `x`, and `name` as in `dot`. `read` makes
    the matrices of a plain or an integer `w`, for the product and again for its gradient; `Parts`
    those of a `Lora`. Where factors of L of them lie side by side, `own` bool [T, L] says which one
    a row has.
    """
    if isinstance(w, InStack) and w.stack.dtype != x.dtype:  # a kernel would need both alike
        w = w.copied()
    if isinstance(w, Lora) and w.magnitude is None:
        parts = read if isinstance(read, Parts) else Parts(None, None, None)
        base = lax.stop_gradient(w.base if parts.base else dequantize(w.base, x.dtype))
        # TPUs would fill up its rows of few numbers to 128
        first = Turned(partial(_other_way, parts.a))
        narrow = ragged_product(dropped(x, w), w.a, sizes, x.dtype, first)
        if own is not None:
            rank = narrow.shape[1] // own.shape[1]
            narrow = jnp.where(jnp.repeat(own, rank, axis=1), narrow, 0)
        out = ragged_product(x, base, sizes, x.dtype, parts.base).astype(jnp.float32)
        out += ragged_product(narrow, w.b, sizes, x.dtype, parts.b)
    elif isinstance(w, Lora):
        out = ragged_product(x, merge(w, constant_norm=True), sizes)
    elif isinstance(w, Rounded):
        out = jax.checkpoint(_rounded)(x, w, sizes)
    elif isinstance(w, Gauged):
        out = MEASURED["rows"](x, w, sizes)
    elif isinstance(w, InStack):
        out = _product(x, w, sizes, x.dtype)
    else:
        out = ragged_product(x, w if read else as_array(w, x.dtype), sizes, x.dtype, read)
    out = out.astype(x.dtype)
    return name_result(out, name or name_of(eqn))


def _other_way(read: Read | None, w: Array) -> Array:
    return (read(w) if read else w).swapaxes(1, 2)


def _rounded(x: Array, w: Rounded, sizes: Array) -> Array:
    return ragged_product(met(x, w, (1,)), widened(w), sizes)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def ragged_product(
    x: Array, w: Any, sizes: Array, dtype: jnp.dtype = jnp.float32, read: Read | None = None
) -> Array:
    """`dtype` [T, F]: rows x [T, D] times the matrix of their group, w [E, D, F], summed in
    float32; groups lie one after the other, int32 `sizes` [E] rows each. `w`, or what `read` makes
    of it, is read in the dtype of `x`; its gradient is summed in float32."""
    whole = (read(w) if read else w).astype(x.dtype)
    return _product(x, whole, sizes, dtype, isinstance(read, Turned))


def _product(
    x: Array, w: Array | InStack, sizes: Array, dtype: jnp.dtype, transposed: bool = False
) -> Array:
    def plain(by: Callable[..., Array], *args: Array) -> Array:
        x, w, sizes = args
        return by(x, w.swapaxes(1, 2) if transposed else w, sizes).astype(dtype)

    branches = {"tpu": partial(_by_kernel, dtype=dtype, transposed=transposed)}
    if x.dtype == jnp.bfloat16:
        branches["gpu"] = partial(_on_gpu, dtype=dtype, transposed=transposed)
    args: Any = x, w, sizes
    return by_platform(*args, default=partial(plain, _by_blocks), **branches)


def _fwd(
    x: Array, w: Any, sizes: Array, dtype: jnp.dtype, read: Read | None
) -> tuple[Array, tuple[Array, Any, Array]]:
    return ragged_product(x, w, sizes, dtype, read), (x, w, sizes)


def _bwd(
    dtype: jnp.dtype, read: Read | None, saved: tuple[Array, Any, Array], g: Array
) -> tuple[Array, Any, None]:
    x, w, sizes = saved
    whole, back = jax.vjp(read, w) if read else (w, None)
    g = g.astype(x.dtype)
    turned = isinstance(read, Turned)
    dx = _product(g, whole.astype(x.dtype), sizes, x.dtype, not turned)
    branches = {"tpu": _gradient_by_kernel}
    if x.dtype == jnp.bfloat16:
        branches["gpu"] = _gradient_on_gpu
    pair = (g, x) if turned else (x, g)
    dw = by_platform(*pair, sizes, default=_gradient_by_blocks, **branches).astype(whole.dtype)
    return dx, back(dw)[0] if back else dw, None


ragged_product.defvjp(_fwd, _bwd)


def _block_of(num_rows: int, num_groups: int) -> int:
    """Rows of a block: half of an even share, so that what the last one lacks is little."""
    return min(max(num_rows // (2 * num_groups) // 8 * 8, 16), 256, num_rows)


def _walk(
    body: Callable[[Array, Array], Array], carry: Array, start: Array, end: Array, size: int
) -> Array:
    """Runs `body(carry, first row)` for each block of the rows from `start` to `end`; returns the
    last carry."""
    count = (end - start + size - 1) // size
    return lax.fori_loop(0, count, lambda i, carry: body(carry, start + i * size), carry)


def _by_rows(x: Array, w: Array | InStack, sizes: Array) -> Array:
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(x.shape[0]), side="right")
    own = w.stack[w.layer, group] if isinstance(w, InStack) else w[group]
    return jnp.einsum("td,tdf->tf", *cpu.operands(x, own), preferred_element_type=jnp.float32)


def _by_blocks(x: Array, w: Array | InStack, sizes: Array) -> Array:
    if x.shape[0] <= sizes.shape[0]:  # a loop would read all matrices
        return _by_rows(x, w, sizes)
    x, w = cpu.operands(x, as_copied(w))
    num, size = x.shape[0], _block_of(x.shape[0], w.shape[0])
    ends = jnp.cumsum(sizes)

    def group(y: Array, each: tuple[Array, Array, Array]) -> tuple[Array, None]:
        matrix, start, end = each

        def block(y: Array, first: Array) -> Array:
            at = jnp.minimum(first, num - size)
            new = cpu.product(lax.dynamic_slice_in_dim(x, at, size), matrix, 1, 0)
            ours = _between(at, size, first, end)
            old = lax.dynamic_slice_in_dim(y, at, size)
            return lax.dynamic_update_slice_in_dim(y, jnp.where(ours, new, old), at, 0)

        return _walk(block, y, start, end, size), None

    y = jnp.zeros((num, w.shape[2]), jnp.float32)
    return lax.scan(group, y, (w, ends - sizes, ends))[0]


def _gradient_by_blocks(x: Array, g: Array, sizes: Array) -> Array:
    x, g = cpu.operands(x, g)
    num, size = x.shape[0], _block_of(x.shape[0], sizes.shape[0])
    ends = jnp.cumsum(sizes)

    def group(_: None, each: tuple[Array, Array]) -> tuple[None, Array]:
        start, end = each

        def block(dw: Array, first: Array) -> Array:
            at = jnp.minimum(first, num - size)
            rows = lax.dynamic_slice_in_dim(x, at, size)
            rows = jnp.where(_between(at, size, first, end), rows, 0)
            return dw + cpu.product(rows, lax.dynamic_slice_in_dim(g, at, size), 0, 0)

        zeros = jnp.zeros((x.shape[1], g.shape[1]), jnp.float32)
        return None, _walk(block, zeros, start, end, size)

    return lax.scan(group, None, (ends - sizes, ends))[1]


def _between(at: Array, size: int, first: Array, end: Array) -> Array:
    """bool [size, 1]: rows from `at` on that are not before `first` and before `end`."""
    rows = at + jnp.arange(size)[:, None]
    return (rows >= first) & (rows < end)


def _on_gpu(
    x: Array, w: Array | InStack, sizes: Array, *, dtype: jnp.dtype, transposed: bool
) -> Array:
    from lmwright.core import gpu_ragged

    return gpu_ragged.product(x, as_copied(w), sizes, dtype, transposed=transposed)


def _gradient_on_gpu(x: Array, g: Array, sizes: Array) -> Array:
    from lmwright.core import gpu_ragged

    return gpu_ragged.gradient(x, g, sizes)


def _by_kernel(
    x: Array,
    w: Array | InStack,
    sizes: Array,
    dtype: jnp.dtype = jnp.float32,
    transposed: bool = False,
) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    if device_kind() in EARLY:
        w = as_copied(w).swapaxes(1, 2) if transposed else as_copied(w)
        return lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32).astype(dtype)
    offset = None
    if isinstance(w, InStack):  # the first group is one that many matrices are before
        offset = -sizes.shape[0] * w.layer
        w = w.stack.reshape(-1, *w.stack.shape[2:])
        if _filled_up(w.shape[2]) > _filled_up(w.shape[1]):  # in memory inputs are innermost
            w, transposed = w.swapaxes(1, 2), True
    num, outputs = x.shape[0], w.shape[1 if transposed else 2]
    x = _whole_tiles(x)
    tiling = _tiling(x, outputs)
    return gmm(x, w, sizes, dtype, tiling, offset, transpose_rhs=transposed)[:num]


def _gradient_by_kernel(x: Array, g: Array, sizes: Array) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    if device_kind() in EARLY:
        return _gradient_by_blocks(x, g, sizes)
    x, g = _whole_tiles(x), _whole_tiles(g)
    tiling = _tiling(x, g.shape[1], MOST_GRADIENTS)
    return tgmm(x.T, g, sizes, jnp.float32, tiling)


def _whole_tiles(rows: Array) -> Array:
    """Rows filled up with zeros to whole tiles."""
    step = TILE if rows.shape[0] > TILE else LANES
    return jnp.pad(rows, [(0, -rows.shape[0] % step), (0, 0)])


def _tiling(x: Array, outputs: int, most: int = WIDEST**2) -> tuple[int, int, int]:
    """Rows, inputs and outputs of the kernel's steps for rows x, at most `most` inputs times
    outputs."""
    first = _tile(x.shape[1], WIDEST)
    return min(TILE, x.shape[0]), first, _tile(outputs, min(WIDEST, most // first))


def _filled_up(size: int) -> float:
    """Numbers in memory for each of an innermost axis of this size."""
    return -(-size // LANES) * LANES / size


def _tile(size: int, most: int) -> int:
    whole = [tile for tile in range(LANES, most + 1, LANES) if size % tile == 0]
    return max(whole, default=min(TILE, -(-size // LANES) * LANES))
