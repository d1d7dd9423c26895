"""Attention of block diffusion on each platform, against one dense mask over both rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.kernels import block_attention, tpu_row_attention, tpu_spans
from lmwright.nn.attention import Scoring, masked_attention
from tests.kernels.attention_problem import problem


def dense(views, size, q, k, v, ids, scoring):
    """Rows [B (views + 1), T] by a mask over the masked rows and the clean one."""
    b, t = ids.shape[0] // (views + 1), ids.shape[1]
    ids = np.asarray(ids).reshape(b, views + 1, t)[:, 0]
    begin = np.array([[row.tolist().index(i) for i in row] for row in ids])
    block = (np.arange(t) - begin) // size
    same = ids[:, :, None] == ids[:, None, :]
    own = same & (block[:, :, None] == block[:, None, :])
    before = same & (block[:, :, None] > block[:, None, :])
    mask = np.zeros((b, views + 1, t, views + 1, t), bool)
    for view in range(views):
        mask[:, view, :, view], mask[:, view, :, views] = own, before
    mask[:, views, :, views] = own | before
    whole = (a.reshape(b, -1, *a.shape[2:]) for a in (q, k, v))
    mask = jnp.asarray(mask.reshape(b, (views + 1) * t, -1))
    return masked_attention(*whole, mask, scoring).reshape(q.shape)


@pytest.mark.parametrize(
    "kernels, long, size, views",
    [
        ("reference", False, 48, 1),
        ("cpu", False, 1, 2),
        ("cpu", False, 48, 1),
        ("tpu", False, 48, 2),
        ("tpu", True, 32, 1),
        ("gpu", False, 48, 2),
    ],
)
def test_equal_to_a_dense_mask(kernels, long, size, views, monkeypatch):
    """Heads that share a kv head, a soft cap, several documents and padding; with gradients."""
    if long:
        monkeypatch.setattr(tpu_row_attention, "VECTOR_MEMORY", 0)
        monkeypatch.setattr(tpu_spans, "SHAPES", ((128, 128, 128, 256),))
    q, k, v, ids, g = problem(2, 256, 4, 2, 32)
    scoring = Scoring(0.3, soft_cap=2.0)
    dice = np.random.default_rng(4)
    rows = lambda a: jnp.asarray(dice.standard_normal((2 * (views + 1), *a.shape[1:])), a.dtype)  # noqa: E731
    arrays, ids = [rows(a) for a in (q, k, v)], jnp.repeat(ids, views + 1, axis=0)
    # the clean rows' attention of TPUs and GPUs has tests of its own
    compute = Compute(kernels="reference" if kernels in ("tpu", "gpu") else kernels)
    attend = block_attention.blocks_by(compute, size, views, kernel=kernels, interpret=True)
    results = []
    for run in (attend, lambda *a: dense(views, size, *a)):

        def both(q, k, v, g, run=run):
            out, back = jax.vjp(lambda *a: run(*a, ids, scoring), q, k, v)
            return out, *back(g)

        results.append(jax.jit(both)(*arrays, jnp.resize(g, arrays[0].shape)))
    for ours, theirs in zip(*results, strict=True):
        largest = float(jnp.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * largest + 1e-5)
