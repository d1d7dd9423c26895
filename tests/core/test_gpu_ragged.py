"""Kernels of ragged products for GPUs, interpreted on the CPU, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core import gpu_ragged

# rows of the groups, nobody's rows, inputs, outputs: blocks of 16 to 128 rows, one that is not
# whole on each side, and sides below the least
CASES = [
    ([5, 0, 33, 1, 0], 9, 40, 24),
    ([0, 0, 0], 7, 16, 16),
    ([300, 0, 77], 3, 72, 136),
    ([2, 1], 0, 8, 200),
    ([17, 64, 128, 47], 0, 128, 8),
]


def problem(sizes, rest, inputs, outputs, dtype):
    rng = np.random.default_rng(0)
    num = sum(sizes) + rest
    shapes = [(num, inputs), (len(sizes), inputs, outputs), (num, outputs)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def plain(x, w, sizes):
    """Group by group in float64; rows after the last group give zeros."""
    x, w = np.float64(x), np.float64(w)
    y, start = np.zeros((len(x), w.shape[2])), 0
    for matrix, size in zip(w, sizes, strict=True):
        y[start : start + size] = x[start : start + size] @ matrix
        start += size
    return y


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("sizes, rest, inputs, outputs", CASES)
def test_rows_meet_the_matrix_of_their_group(sizes, rest, inputs, outputs, dtype):
    x, w, g = problem(sizes, rest, inputs, outputs, dtype)
    counts, close = jnp.asarray(sizes, jnp.int32), dict(rtol=2e-5, atol=2e-5)
    run = dict(dtype=jnp.float32, interpret=True)
    y = gpu_ragged.product(x, w, counts, **run)
    np.testing.assert_allclose(y, plain(x, w, sizes), **close)
    dx = gpu_ragged.product(g, w, counts, transposed=True, **run)
    np.testing.assert_allclose(dx, plain(g, np.swapaxes(w, 1, 2), sizes), **close)
    dw = gpu_ragged.gradient(x, g, counts, interpret=True)
    ends = np.cumsum(sizes)
    for matrix, start, end in zip(dw, ends - sizes, ends, strict=True):
        want = np.float64(x)[start:end].T @ np.float64(g)[start:end]
        np.testing.assert_allclose(matrix, want, **close)


def test_neither_a_neighbors_rows_nor_nobodys_leak():
    """NaNs in the rows of one group stay there."""
    sizes = jnp.array([20, 7, 30], jnp.int32)
    x, w, g = problem([20, 7, 30], 10, 24, 24, jnp.float32)
    x, g = (a.at[20:27].set(jnp.nan).at[57:].set(jnp.nan) for a in (x, g))
    y = gpu_ragged.product(x, w, sizes, jnp.float32, interpret=True)
    assert np.isnan(y[20:27]).all()
    assert np.isfinite(y[:20]).all() and np.isfinite(y[27:57]).all() and (y[57:] == 0).all()
    dw = gpu_ragged.gradient(x, g, sizes, interpret=True)
    assert np.isnan(dw[1]).all() and np.isfinite(dw[0]).all() and np.isfinite(dw[2]).all()


@pytest.mark.parametrize("rows", [16, 128])
def test_tiles_cover_each_row_once_within_its_group(rows):
    sizes = [0, 200, 1, 0, 128, 15]
    tiles = gpu_ragged.Tiles.of(jnp.asarray(sizes, jnp.int32), 400, rows)
    groups = np.repeat(np.arange(7), [*sizes, 400 - sum(sizes)])
    seen = []
    for group, first, end in zip(*map(np.asarray, tiles), strict=True):
        inside = range(first, min(first + rows, end))
        assert all(groups[row] == group for row in inside)
        seen += inside
    assert sorted(seen) == list(range(400))


def test_no_kernel_adds_in_an_order_of_its_own():
    """The same bits each time: no atomic sums, and a grid that writes each result once."""
    x, w, g = problem([40, 0, 80], 0, 32, 48, jnp.bfloat16)
    sizes = jnp.array([40, 0, 80], jnp.int32)
    for call in (
        lambda: gpu_ragged.product(x, w, sizes, jnp.bfloat16, interpret=True),
        lambda: gpu_ragged.gradient(x, g, sizes, interpret=True),
    ):
        assert "atomic" not in str(jax.make_jaxpr(call)())
