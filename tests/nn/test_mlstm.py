"""mLSTM in chunks and token by token equals the recurrence of the paper, in float64; documents and
padding do not reach each other."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.nn import mlstm as ours

ROWS, LENGTH, HEADS, KEY, HEAD = 2, 150, 2, 8, 12
NEAR = 1e-5  # of the output's scale


def segment_ids():
    """A row that ends in padding, one that begins with it and has some inside; documents begin
    inside chunks and with them."""
    ids = np.ones((ROWS, LENGTH), np.int32)
    ids[0, 50:], ids[0, 128:], ids[0, 140:] = 2, 3, 0
    ids[1, :7], ids[1, 20:30], ids[1, 64:] = 0, 0, 2
    return ids


@cache
def inputs():
    rng = np.random.default_rng(0)
    normal = lambda *dims: rng.standard_normal((ROWS, LENGTH, HEADS, *dims)).astype("f4")  # noqa: E731
    return normal(KEY), normal(KEY), normal(HEAD), 2 * normal() - 2, 2 + 3 * normal()


@cache
def reference():
    """The papers' equations, a token at a time."""
    q, k, v, i, f = (a.astype(np.float64) for a in inputs())
    out, ids = np.zeros(v.shape), segment_ids()
    for b, n in np.ndindex(ROWS, HEADS):
        document = 0
        for t in np.flatnonzero(ids[b]):
            if ids[b, t] != document:
                document, m = ids[b, t], 0.0
                matrix, norm = np.zeros((KEY, HEAD)), np.zeros(KEY)
            log_f = -np.logaddexp(0.0, -f[b, t, n])
            last, m = m, max(log_f + m, i[b, t, n])
            keep, write = np.exp(log_f + last - m), np.exp(i[b, t, n] - m)
            matrix = keep * matrix + write * np.outer(k[b, t, n], v[b, t, n])
            norm = keep * norm + write * k[b, t, n]
            query = q[b, t, n] / np.sqrt(KEY)
            below = max(abs(norm @ query), np.exp(-m)) + 1e-6
            out[b, t, n] = query @ matrix / below
    return out


def in_chunks(size):
    return jax.jit(lambda *a: ours.mlstm(*a, segment_ids(), size))


def one_by_one(q, k, v, i, f):
    """Rows by `step`, whose documents are told apart by fresh memories."""
    ids, fresh = segment_ids(), ours.empty(ROWS, HEADS, KEY, HEAD)
    seen = np.maximum(np.maximum.accumulate(ids, axis=1), 1)
    begins = np.diff(seen, axis=1, prepend=1) > 0

    def token(memory, at):
        begins, *arrays = at
        rows = lambda a: begins.reshape(-1, *(1,) * (a.ndim - 1))  # noqa: E731
        memory = jax.tree.map(lambda new, old: jnp.where(rows(old), new, old), fresh, memory)
        h, memory = ours.step(memory, *(a[:, None] for a in arrays))
        return memory, h[:, 0]

    along = [jnp.moveaxis(jnp.asarray(a), 1, 0) for a in (begins, q, k, v, i, f, ids)]
    return jnp.moveaxis(jax.lax.scan(token, fresh, tuple(along))[1], 0, 1)


@pytest.mark.parametrize("size", [16, 64, 256, 50])
def test_chunks_equal_the_recurrence(size):
    real = (segment_ids() > 0)[..., None, None]
    off = np.abs((in_chunks(size)(*inputs()) - reference()) * real).max()
    assert off <= NEAR * np.abs(reference()).max()


def test_steps_equal_the_recurrence():
    real = (segment_ids() > 0)[..., None, None]
    off = np.abs((jax.jit(one_by_one)(*inputs()) - reference()) * real).max()
    assert off <= NEAR * np.abs(reference()).max()


def test_gradients_are_those_of_the_recurrence():
    real = (segment_ids() > 0)[..., None, None]
    pull = np.random.default_rng(1).standard_normal(reference().shape).astype("f4") * real
    every = tuple(range(5))
    by = lambda run: jax.jit(jax.grad(lambda *a: jnp.sum(run(*a) * pull), every))(*inputs())  # noqa: E731
    for mine, theirs in zip(by(in_chunks(16)), by(one_by_one), strict=True):
        assert np.isfinite(mine).all()
        assert np.abs(mine - theirs).max() <= NEAR * np.abs(theirs).max()


def test_nothing_of_a_document_reaches_another():
    """Not even with the largest gates before and the smallest after."""
    q, k, v, i, f = (np.array(a) for a in inputs())
    i[0, :50], i[0, 50:] = 15, -15
    before = np.array(in_chunks(16)(q, k, v, i, f))
    k[0, :50], v[0, :50] = 100 * v[0, :50, :, :KEY], -50 * v[0, :50]
    after = np.array(in_chunks(16)(q, k, v, i, f))
    np.testing.assert_array_equal(before[0, 50:], after[0, 50:])
    assert np.abs(before[0, :50] - after[0, :50]).max() > 1

    later = lambda *a: jnp.sum(jnp.square(in_chunks(16)(*a)[0, 50:128]))  # noqa: E731
    for grad in jax.jit(jax.grad(later, tuple(range(5))))(q, k, v, i, f):
        assert not np.any(grad[0, :50]) and not np.any(grad[0, 128:]) and np.any(grad[0, 50:128])


def test_a_memory_goes_on():
    """A row in two parts, the second of which begins with padding, is the row."""
    arrays = [np.asarray(a)[1:, 64:] for a in inputs()]  # of one document
    ids = np.ones((1, arrays[0].shape[1]), np.int32)
    whole = jax.jit(lambda *a: ours.mlstm(*a, 16))(*arrays, ids)
    first = [a[:, :40] for a in arrays]
    empty = ours.empty(1, HEADS, KEY, HEAD)
    go_on = jax.jit(partial(ours.mlstm_from, chunk_tokens=16))
    h, memory = go_on(empty, *first, ids[:, :40])
    padded = [np.concatenate([a[:, :9], a[:, 40:]], axis=1) for a in arrays]
    real = np.concatenate([np.zeros((1, 9), np.int32), ids[:, 40:]], axis=1)
    rest, _ = go_on(memory, *padded, real)
    joined = np.concatenate([h, rest[:, 9:]], axis=1)
    assert np.abs(joined - whole).max() <= NEAR * np.abs(whole).max()
