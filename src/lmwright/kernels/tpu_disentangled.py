"""Disentangled attention for TPUs whose rows fit the vector memory: one Pallas kernel each way.

A score has two terms beside q k': that of the query with the distance to the key, and that of the
key with the distance to the query (`nn.disentangled`). A strip of 128 keys and a block of queries
have distances of one window of a table, so that their term is one product, each row of which is
then rotated one lane further than the one above:

    m [keys, distances] = k [keys, H] table [H, distances]
    term[key, query] = m[key, query - key]

The term of the queries is made the other way round and transposed. A TPU rotates further from
row to row, not less far, so the backward pass rotates derivatives back with every eight rows in
reverse. Layout, softmax and the rest are as in `tpu_row_attention`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lmwright.core.compute import ATTENTION, LANES
from lmwright.core.sharding import device_kind
from lmwright.hardware.devices import chip_of
from lmwright.kernels.tpu_row_attention import VECTOR_MEMORY, Ref, Sums, block_of, dot
from lmwright.nn.attention import MASKED
from lmwright.nn.disentangled import Disentangled, rows_of

SUBLANES = 8
FORWARD, BACKWARD = "disentangled_fwd", "disentangled_bwd"


def fits(seq_len: int, head_dim: int, itemsize: int) -> bool:
    """True if the backward pass has room for a whole head, of dimensions that fill tiles."""
    whole = seq_len % LANES == 0 and head_dim % 16 == 0
    return whole and _vector_memory(seq_len, head_dim, itemsize) <= VECTOR_MEMORY


def _vector_memory(seq_len: int, head_dim: int, itemsize: int) -> int:
    """Bytes of vector memory that the backward kernel needs: double-buffered inputs (4), outputs
    (3) and tables (2); transposed and reordered copies; five accumulators; gradients of the tables;
    ids; and one block's scores, their derivatives, and gradients by distance."""
    turned = 3 * -(-head_dim // LANES) * LANES + 2 * head_dim
    head = seq_len * (head_dim * (14 * itemsize + 5 * 4) + turned * itemsize)
    tables = 2 * 2 * seq_len * head_dim * 2 * (itemsize + 4)
    size = block_of(seq_len)
    return head + tables + 2 * 4 * seq_len * LANES + (3 * 4 + 2 * itemsize) * size**2


@dataclass(frozen=True)
class Row:
    """A row of `count` blocks of `size` tokens, and what its scores are made of."""

    size: int
    count: int
    q_ids: Ref
    """Segment ids of queries, [1, T]."""
    k_ids: Ref
    """Segment ids of keys, [T, LANES], the same in every lane."""
    of_queries: Ref
    """PK by distance s - t, scaled, [H, 2 T]: the distance -T is at place 0."""
    of_keys: Ref
    """PQ by distance t - s, [H, 2 T]."""
    strided: bool
    """True if a rotation may grow from row to row."""

    def at(self, block: Array) -> Any:
        """The tokens of a block."""
        return pl.ds(pl.multiple_of(block * self.size, self.size), self.size)

    def part(self, block: Array, strip: int) -> Any:
        """The tokens of a strip of a block."""
        return pl.ds(pl.multiple_of(block * self.size + strip * LANES, LANES), LANES)

    def window(self, there: Array, here: Array, strip: int) -> Any:
        """Places in a table of the distances from a strip of the block `here` to those `there`."""
        first = (self.count + there - here) * self.size - (strip + 1) * LANES
        return pl.ds(pl.multiple_of(first, LANES), LANES + self.size)

    def all_windows(self, there: Array, here: Array) -> Any:
        """Places in a table of the distances from the block `here` to the block `there`."""
        first = (self.count + there - here - 1) * self.size
        return pl.ds(pl.multiple_of(first, self.size), 2 * self.size)

    def query_terms(self, q: Ref, keys: Array, queries: Array, terms: Ref) -> None:
        """Writes the products of queries q [T, H] with distances to `terms` [keys, queries]"""
        for strip, some in strips(self.size):
            table = self.of_queries[:, self.window(keys, queries, strip)]
            terms[:, some] = skewed(dot(q[self.part(queries, strip), :], table), self.strided).T

    def scores(
        self, k: Array, q: Array, keys: Array, queries: Array, strip: int, terms: Array
    ) -> Array:
        """Masked float32 [LANES, queries] of a strip of scaled k [LANES, H], q [H, queries]."""
        table = self.of_keys[:, self.window(queries, keys, strip)]
        scores = dot(k, q) + terms + skewed(dot(k, table), self.strided)
        ids = jnp.tile(self.k_ids[self.part(keys, strip), :], (1, self.size // LANES))
        return jnp.where(ids == self.q_ids[:, self.at(queries)], scores, MASKED)


def strips(size: int) -> list[tuple[int, slice]]:
    """Strips of a block of `size` tokens, with their numbers."""
    return [(i, slice(i * LANES, (i + 1) * LANES)) for i in range(size // LANES)]


def skewed(m: Array, strided: bool) -> Array:
    """The window of each row of m [LANES, LANES + size] that begins at place LANES - r in row r, as
    [LANES, size]."""
    turned = pltpu.roll(m, 0, 1, stride=1, stride_axis=0) if strided else rotated(m, 1)
    return turned[:, LANES:]


def skewed_back(d: Array, strided: bool) -> Array:
    """Puts row r of d [LANES, size] at place LANES - r of [LANES, LANES + size], zeros elsewhere:
    the derivative of `skewed` by its argument. If `strided`, every SUBLANES rows are in reverse."""
    width = LANES + d.shape[1]
    if not strided:
        return rotated(jnp.concatenate([jnp.zeros((LANES, LANES), d.dtype), d], axis=1), -1)
    order = SUBLANES - 1 - lax.broadcasted_iota(jnp.int32, (SUBLANES, d.shape[1]), 0)
    zeros = jnp.zeros((SUBLANES, LANES), d.dtype)
    groups = []
    for first in range(0, LANES, SUBLANES):
        some = jnp.take_along_axis(d[first : first + SUBLANES], order, axis=0)
        some = jnp.concatenate([zeros, some], axis=1)
        shift = width - first - SUBLANES + 1
        groups.append(pltpu.roll(some, shift, 1, stride=1, stride_axis=0))
    return jnp.concatenate(groups, axis=0)


def rotated(x: Array, way: int) -> Array:
    """Rotates row r of x [LANES, .] by r lanes to the right, or to the left if `way` is -1, for
    TPUs that rotate all rows alike: by the bits of r that differ among SUBLANES rows, then by the
    first of these rows."""
    width, row = x.shape[1], lax.broadcasted_iota(jnp.int32, x.shape, 0)
    for bit in (1, 2, 4):
        x = jnp.where((row & bit) != 0, pltpu.roll(x, way * bit % width, 1), x)
    firsts = range(0, LANES, SUBLANES)
    groups = [pltpu.roll(x[r : r + SUBLANES], way * r % width, 1) for r in firsts]
    return jnp.concatenate(groups, axis=0)


def places(strip: int, size: int) -> slice:
    """The window of a strip among those of all strips of a block."""
    first = size - (strip + 1) * LANES
    return slice(first, first + LANES + size)


def add_by_distance(total: Ref, there: Any, x: Array, back: Ref) -> None:
    """Adds the product of x [H, size] and `back` [size, 2 size] to `total[:, there]`. Each strip of
    `back` is set within its own window (`places`) alone; tiles outside are skipped."""
    size = x.shape[1]
    sums = []
    for tile in range(2 * size // LANES):
        inside = [n for n, _ in strips(size) if 0 <= tile * LANES - places(n, size).start <= size]
        rows = slice(inside[0] * LANES, (inside[-1] + 1) * LANES)
        sums.append(dot(x[:, rows], back[rows, tile * LANES : (tile + 1) * LANES]))
    total[:, there] += jnp.concatenate(sums, axis=1)


def in_order(x: Array, strided: bool) -> Array:
    """Permutes the lanes of x [H, LANES] between natural order and the row order of `skewed_back`;
    the permutation is its own inverse, and the identity unless `strided`."""
    if not strided:
        return x
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    opposite = lane + SUBLANES - 1 - 2 * lax.rem(lane, SUBLANES)
    return jnp.take_along_axis(x.astype(jnp.float32), opposite, axis=1)


def _forward_kernel(call: "Call", size: int, *refs: Ref) -> None:
    *marks, q, k, v, out, log_sums, keys, turned_q, parts = refs
    row = Row(size, q.shape[1] // size, *marks, call.strided)
    keys[...], turned_q[...] = k[...].T, q[...].T

    def queries(i: Array, _: None) -> None:
        block = q[:, row.at(i)]

        def some(j: Array, sums: Sums) -> Sums:
            top, total, out = sums
            row.query_terms(turned_q, j, i, parts)
            scores = jnp.concatenate(
                [
                    row.scores(keys[row.part(j, strip), :], block, j, i, strip, parts[part])
                    for strip, part in strips(size)
                ]
            )
            new_top = jnp.maximum(top, jnp.max(scores, axis=0, keepdims=True))
            probs, keep = jnp.exp(scores - new_top), jnp.exp(top - new_top)
            total = total * keep + jnp.sum(probs, axis=0, keepdims=True)
            return new_top, total, out * keep + dot(v[:, row.at(j)], probs.astype(v.dtype))

        zero_row = jnp.zeros((1, size), jnp.float32)
        none = (zero_row + MASKED, zero_row, jnp.zeros(block.shape, jnp.float32))
        top, total, sums = lax.fori_loop(0, row.count, some, none)
        out[:, row.at(i)] = (sums / total).astype(out.dtype)
        log_sums[:, row.at(i)] = top + jnp.log(total)

    lax.fori_loop(0, row.count, queries, None)


def _backward_kernel(call: "Call", size: int, *refs: Ref) -> None:
    *marks, q, k, v, g, log_sums, inner, dq, dk, dv, dpk, dpq = refs[:-12]
    turned_q, turned_k, turned_v, ordered_q, ordered_k, parts, back, *sums = refs[-12:]
    dq_sum, dk_sum, dv_sum, dq_back, dk_back = sums
    row, dtype = Row(size, q.shape[1] // size, *marks, call.strided), q.dtype
    turned_q[...], turned_k[...], turned_v[...] = q[...].T, k[...].T, v[...].T
    for _, some in strips(q.shape[1]):
        ordered_q[:, some] = in_order(q[:, some], row.strided).astype(dtype)
        ordered_k[:, some] = in_order(k[:, some], row.strided).astype(dtype)
    for each in sums:
        each[...] = jnp.zeros_like(each)

    @pl.when(pl.program_id(1) == 0)
    def _():
        dpk[...], dpq[...] = jnp.zeros_like(dpk), jnp.zeros_like(dpq)

    def keys(j: Array, _: None) -> None:
        def some(i: Array, _: None) -> None:
            at = row.at(i)
            row.query_terms(turned_q, j, i, parts)
            for strip, part in strips(size):
                mine, here = row.part(j, strip), row.window(i, j, strip)
                scores = row.scores(turned_k[mine, :], q[:, at], j, i, strip, parts[part])
                probs = jnp.exp(scores - log_sums[:, at])
                dv_sum[:, mine] += dot(g[:, at], probs.astype(dtype), over=(1, 1))
                ds = probs * (dot(turned_v[mine, :], g[:, at]) - inner[:, at])
                parts[part] = ds
                dk_sum[:, mine] += dot(q[:, at], ds.astype(dtype), over=(1, 1))
                back[part, places(strip, size)] = skewed_back(ds, row.strided).astype(dtype)
                wide = back[part, places(strip, size)]
                dk_back[:, mine] += dot(row.of_keys[:, here], wide, over=(1, 1))
            add_by_distance(dpq, row.all_windows(i, j), ordered_k[:, row.at(j)], back)
            dq_sum[:, at] += dot(k[:, row.at(j)], parts[...].astype(dtype))
            for strip, part in strips(size):
                mine, here = row.part(i, strip), row.window(j, i, strip)
                back[part, places(strip, size)] = skewed_back(parts[:, part].T, row.strided).astype(
                    dtype
                )
                wide = back[part, places(strip, size)]
                dq_back[:, mine] += dot(row.of_queries[:, here], wide, over=(1, 1))
            add_by_distance(dpk, row.all_windows(j, i), ordered_q[:, at], back)

        lax.fori_loop(0, row.count, some, None)

    lax.fori_loop(0, row.count, keys, None)
    for _, some in strips(q.shape[1]):
        dq[:, some] = (dq_sum[:, some] + in_order(dq_back[:, some], row.strided)).astype(dtype)
        dk[:, some] = (dk_sum[:, some] + in_order(dk_back[:, some], row.strided)).astype(dtype)
    dv[...] = dv_sum[...].astype(dv.dtype)


@dataclass(frozen=True)
class Call:
    """A call of one of the kernels."""

    strided: bool
    interpret: Any = False

    def __call__(
        self,
        kernel: Callable[..., None],
        name: str,
        ids: Array,
        tables: tuple[Array, Array],
        arrays: tuple[Array, ...],
        out: list[jax.ShapeDtypeStruct],
        scratch: list[Any],
    ) -> list[Array]:
        """`kernel(call, size, *marks, *tables, *arrays, *out, *scratch)`; `arrays` and `out` are
        [B, N, ., T], or [N, ., 2 T] where they are the same of all rows."""
        b, n, _, t = arrays[0].shape
        size = block_of(t)
        wide = jnp.broadcast_to(ids[:, :, None], (b, t, LANES))
        marks = [pl.BlockSpec((None, 1, t), lambda _, b: (b, 0, 0))]
        marks += [pl.BlockSpec((None, t, LANES), lambda _, b: (b, 0, 0))]

        def whole(array: Any) -> pl.BlockSpec:
            if len(array.shape) == 3:
                return pl.BlockSpec((None, *array.shape[1:]), lambda n, _: (n, 0, 0))
            return pl.BlockSpec((None, None, *array.shape[2:]), lambda n, b: (b, n, 0, 0))

        with jax.named_scope(name):
            return pl.pallas_call(
                partial(kernel, self, size),
                name=name,
                grid=(n, b),
                in_specs=[*marks, *map(whole, tables), *map(whole, arrays)],
                out_specs=[whole(a) for a in out],
                out_shape=out,
                scratch_shapes=scratch,
                compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
                interpret=self.interpret,
                metadata={"xprof_metadata": json.dumps({"block_q": size, "block_kv": size})},
            )(ids[:, None], wide, *tables, *arrays)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(call: Call, q: Array, k: Array, v: Array, pk: Array, pq: Array, ids: Array) -> Array:
    """Disentangled attention of q, scaled k, and v [B, N, H, T]; pk, scaled, and pq [N, H, 2 T] by
    distance; ids [B, T]."""
    return _forward(call, q, k, v, pk, pq, ids)[0]


def _forward(call: Call, q: Array, k: Array, v: Array, pk: Array, pq: Array, ids: Array):
    b, n, h, t = q.shape
    out = [_like(q), jax.ShapeDtypeStruct((b, n, 1, t), jnp.float32)]
    scratch = [*[pltpu.VMEM((t, h), k.dtype)] * 2, _parts(t)]
    out, log_sums = call(_forward_kernel, FORWARD, ids, (pk, pq), (q, k, v), out, scratch)
    out, log_sums = (checkpoint_name(a, ATTENTION) for a in (out, log_sums))
    return out, (q, k, v, pk, pq, ids, out, log_sums)


def _backward(call: Call, residuals: tuple, g: Array):
    q, k, v, pk, pq, ids, out, log_sums = residuals
    inner = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=2, keepdims=True)
    h, t = q.shape[2:]
    turned, reverse = pltpu.VMEM((t, h), k.dtype), pltpu.VMEM((h, t), k.dtype)
    back = pltpu.VMEM((block_of(t), 2 * block_of(t)), k.dtype)
    scratch = [
        turned,
        turned,
        turned,
        reverse,
        reverse,
        _parts(t),
        back,
        *[pltpu.VMEM((h, t), jnp.float32)] * 5,
    ]
    arrays = (q, k, v, g.astype(q.dtype), log_sums, inner)
    out = [*(_like(a) for a in (q, k, v)), *(_like(a, jnp.float32) for a in (pk, pq))]
    *mine, dpk, dpq = call(_backward_kernel, BACKWARD, ids, (pk, pq), arrays, out, scratch)
    return *mine, dpk.astype(pk.dtype), dpq.astype(pq.dtype), None


attend.defvjp(_forward, _backward)


def _parts(t: int) -> Any:
    return pltpu.VMEM((block_of(t), block_of(t)), jnp.float32)


def _like(array: Array, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, dtype or array.dtype)


def attention(
    q: Array, k: Array, v: Array, position_keys: Array, position_queries: Array,
    segment_ids: Array, scoring: Disentangled,
    *, strided: bool | None = None, interpret: Any = False,
) -> Array:  # fmt: skip
    """Disentangled attention, as `nn.disentangled.attention`, of one device's own rows, for which
    `fits` holds. `strided`: True if rotations may grow from row to row; unset, the devices of the
    mesh decide."""
    t, num_rows = q.shape[1], position_keys.shape[0]
    distances = np.arange(-t, t)

    def table(rows: Array, distances: np.ndarray, scale: float = 1.0) -> Array:
        some = rows[rows_of(distances, num_rows, scoring.max_distance)]  # [2 T, N, H]
        return (some * scale).transpose(1, 2, 0).astype(q.dtype)

    pk = table(position_keys, -distances, scoring.scale)
    pq = table(position_queries, distances)
    q, k, v = (a.transpose(0, 2, 3, 1) for a in (q, k, v))  # [B, N, H, T]
    k = (k.astype(jnp.float32) * scoring.scale).astype(k.dtype)
    if strided is None:
        chip = chip_of(device_kind())
        strided = chip is None or chip.strided_rotation
    out = attend(Call(strided, interpret), q, k, v, pk, pq, segment_ids).transpose(0, 3, 1, 2)
    return jnp.where((segment_ids > 0)[..., None, None], out, 0)
