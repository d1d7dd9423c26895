"""The kernels of mLSTM, interpreted on CPU, against the recurrence of the papers in float64 and the
plain chunks: values and gradients."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.kernels import select, tpu_mlstm
from lmwright.nn import mlstm as plain
from tests.kernels.test_tpu_intervals import mesh_of

ROWS, LENGTH, HEADS, KEY, HEAD = 2, 128, 2, 16, 32
NEAR = 1e-5  # of the output's scale


@cache
def problem(rows=ROWS, length=LENGTH):
    """Inputs, segments of documents and padding in all places, and weights of the result."""
    rng = np.random.default_rng(0)
    normal = lambda *dims: rng.standard_normal((rows, length, HEADS, *dims)).astype("f4")  # noqa: E731
    arrays = normal(KEY), normal(KEY), normal(HEAD), 2 * normal() - 2, 4 + 2 * normal()
    ids = np.ones((rows, length), np.int32)
    ids[0, 45:], ids[0, 85:], ids[0, -20:] = 2, 3, 0
    ids[1, :7], ids[1, 40:50], ids[1, 64:] = 0, 0, 2
    return arrays, ids, normal(HEAD) * (ids > 0)[..., None, None]


def recurrence(q, k, v, i, f, ids):
    """The papers' equations by one token after the other, in the precision of the inputs."""

    def token(state, at):
        matrix, norm, scale = state
        q, k, v, i, f, begins, real = at
        fresh = lambda a: jnp.where(begins.reshape(-1, *(1,) * (a.ndim - 1)), 0, a)  # noqa: E731
        matrix, norm, scale = map(fresh, state)
        i = jnp.where(real[:, None], i, -jnp.inf)
        log_f = jnp.where(real[:, None], jax.nn.log_sigmoid(f), 0)
        last, scale = scale, jnp.maximum(log_f + scale, i)
        keep, write = jnp.exp(log_f + last - scale), jnp.exp(i - scale)
        matrix = keep[..., None, None] * matrix
        matrix += write[..., None, None] * k[..., :, None] * v[..., None, :]
        norm = keep[..., None] * norm + write[..., None] * k
        q = q * KEY**-0.5
        below = jnp.maximum(jnp.abs(jnp.sum(norm * q, -1)), jnp.exp(-scale)) + 1e-6
        return (matrix, norm, scale), jnp.einsum("bnk,bnkh->bnh", q, matrix) / below[..., None]

    docs = np.maximum(np.maximum.accumulate(ids, axis=1), 1)
    begins = np.diff(docs, axis=1, prepend=1) > 0
    rows, heads, dtype = len(q), q.shape[2], q.dtype
    first = [jnp.zeros((rows, heads, *dims), dtype) for dims in ((KEY, HEAD), (KEY,), ())]
    along = [jnp.moveaxis(jnp.asarray(a), 1, 0) for a in (q, k, v, i, f, begins, ids > 0)]
    return jnp.moveaxis(jax.lax.scan(token, tuple(first), tuple(along))[1], 0, 1)


def result(mix, arrays, ids, weight):
    """What `mix` gives, with padding left out, and the gradients of its weighted sum."""

    def total(*arrays):
        h = mix(*arrays, ids) * (ids > 0)[..., None, None]
        return jnp.sum(h * weight), h

    grad = jax.grad(total, argnums=tuple(range(5)), has_aux=True)
    with jax.default_matmul_precision("highest"):
        return jax.tree.leaves(jax.jit(grad)(*arrays))


@cache
def wanted(length=LENGTH):
    arrays, ids, weight = problem(length=length)
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, jnp.float64) for a in arrays]
        return [np.asarray(a) for a in result(recurrence, wide, ids, weight)]


def interpreted(size):
    return lambda *arrays: tpu_mlstm.mlstm(*arrays, size, interpret=True)


@pytest.mark.parametrize(
    "length, size", [(128, 64), (128, 128), pytest.param(512, 256, marks=pytest.mark.slow)]
)
def test_equal_to_the_recurrence(length, size):
    """Gradients of q, k, v and of both gates, and the result; in chunks of 256, sums of the forget
    gates are so long that their own rounding is 1.4e-5 of a gradient, as in plain chunks."""
    assert tpu_mlstm.fits(length, size, KEY, HEAD, 4)
    mine = result(interpreted(size), *problem(length=length))
    near = NEAR if size < 256 else 2 * NEAR
    for found, want in zip(mine, wanted(length), strict=True):
        assert np.abs(found - want).max() <= near * np.abs(want).max()


@pytest.mark.slow
def test_large_gates_are_as_exact_as_in_plain_chunks():
    """With input gates so far open that the epsilon below counts; near zeros of the denominator
    rounding is large by any way."""
    (q, k, v, i, f), ids, weight = problem()
    arrays = q, k, v, i + 14, f
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, jnp.float64) for a in arrays]
        want = [np.asarray(a) for a in result(recurrence, wide, ids, weight)]

    def off(mix):
        pairs = zip(result(mix, arrays, ids, weight), want, strict=True)
        return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs]

    mine, theirs = off(interpreted(64)), off(lambda *a: plain.mlstm(*a, 64))
    assert max(mine) < 5e-3 and max(mine) < 2 * max(theirs)


def test_nothing_of_a_document_reaches_another():
    """Not even with the largest gates before and the smallest after."""
    (q, k, v, i, f), ids, _ = problem()
    i, k, v = i.copy(), k.copy(), v.copy()
    i[0, :45], i[0, 45:] = 15, -15
    run = jax.jit(lambda *arrays: interpreted(64)(*arrays, ids))
    before = np.array(run(q, k, v, i, f))
    k[0, :45], v[0, :45] = 100 * k[0, :45], -50 * v[0, :45]
    after = np.array(run(q, k, v, i, f))
    np.testing.assert_array_equal(before[0, 45:], after[0, 45:])
    assert np.abs(before[0, :45] - after[0, :45]).max() > 1

    later = lambda *a: jnp.sum(jnp.square(interpreted(64)(*a, ids)[0, 45:85]))  # noqa: E731
    for grad in jax.jit(jax.grad(later, tuple(range(5))))(q, k, v, i, f):
        assert np.isfinite(grad).all() and np.any(grad[0, 45:85])
        assert not np.any(grad[0, :45]) and not np.any(grad[0, 85:])


@pytest.mark.slow
def test_equal_on_a_mesh():
    """Rows and heads over devices; there and here the same numbers."""
    arrays, ids, weight = problem(rows=4, length=128)
    alone = result(interpreted(64), arrays, ids, weight)
    with jax.set_mesh(mesh_of(data=2, fsdp=2, tensor=2)):
        for found, want in zip(result(interpreted(64), arrays, ids, weight), alone, strict=True):
            assert np.abs(found - want).max() <= 1e-6 * np.abs(want).max()


def test_what_it_takes():
    """Heads of the presets in chunks that are searched; whole chunks and no short ones."""
    for key_dim, head_dim in ((256, 512), (96, 192), (32, 64)):
        assert all(tpu_mlstm.fits(2048, size, key_dim, head_dim, 2) for size in (64, 128, 256))
    assert not any(tpu_mlstm.fits(2048, size, 256, 512, 2) for size in (16, 96, 2048))
    assert not tpu_mlstm.fits(1000, 64, 256, 512, 2)
    (*arrays,), ids, _ = problem()
    arrays, ids = [a[:, :40] for a in arrays], ids[:, :40]
    assert np.array_equal(interpreted(16)(*arrays, ids), plain.mlstm(*arrays, ids, 16))
    assert select.mlstm(Compute(kernels="tpu")) is tpu_mlstm.mlstm
    for kernels in ("early tpu", "cpu", "reference"):
        assert select.mlstm(Compute(kernels=kernels)) is plain.mlstm
