"""Attention in chunks equals a mask that says which keys a query sees, in rows of several
documents, also over `mesh.context`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.kernels.chunk_attention import attend_by
from lmwright.nn.attention import Scoring, causal_mask, masked_attention
from lmwright.nn.chunks import InChunks, chunk_ids, seen_in_chunk
from tests.kernels.test_context_attention import mesh_of

SIZE, LENGTH = 5, 32
IDS = np.array([[1] * 13 + [2] * 4 + [3] * 15, [1] * 20 + [0] * 12])
REAL = (IDS > 0)[:, :, None, None]


def problem():
    rng = np.random.default_rng(0)
    q, k, v, g = (rng.standard_normal((2, LENGTH, n, 16)).astype("f4") for n in (8, 4, 4, 8))
    return q, k, v, g * REAL


def wanted(q, k, v):
    """By positions in each document, one after the other."""
    place = np.array([[sum(row[:i] == row[i]) for i in range(LENGTH)] for row in IDS])
    same = place[:, :, None] // SIZE == place[:, None, :] // SIZE
    return masked_attention(q, k, v, causal_mask(jnp.asarray(IDS)) & same, Scoring(0.25))


def value_and_gradients(attend, q, k, v, g):
    def total(q, k, v):
        out = attend(q, k, v) * REAL
        return jnp.sum(out * g), out

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)


@pytest.mark.parametrize(
    ("compute", "axes"),
    [
        (Compute(), None),
        (Compute(kernels="cpu"), None),
        (Compute(context_attention="ring"), {"context": 4, "tensor": 2}),
        (Compute(context_attention="all-to-all"), {"context": 2, "tensor": 2, "fsdp": 2}),
    ],
)
def test_equals_a_mask(compute, axes):
    q, k, v, g = problem()
    want = value_and_gradients(wanted, q, k, v, g)

    def attend(q, k, v):
        return attend_by(compute)(q, k, v, jnp.asarray(IDS), InChunks(0.25, SIZE))

    if axes is None:
        found = value_and_gradients(attend, q, k, v, g)
    else:
        with jax.set_mesh(mesh_of(**axes)):
            found = value_and_gradients(attend, q, k, v, g)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, np.abs(b).max()))


def test_whole_rows_beside_chunks():
    """Layers without chunks, and chunks that no row fills."""
    q, k, v, _ = problem()
    whole = attend_by(Compute())
    ids = jnp.asarray(IDS)
    want = masked_attention(q, k, v, causal_mask(ids), Scoring(0.25))
    for scoring in (Scoring(0.25), InChunks(0.25, LENGTH)):
        np.testing.assert_array_equal(whole(q, k, v, ids, scoring), want)


def test_ids_of_chunks():
    ids = np.asarray(chunk_ids(jnp.asarray(IDS), SIZE))
    assert (ids[1, 20:] == 0).all() and len(set(ids[0])) == 3 + 1 + 3
    assert seen_in_chunk(jnp.arange(7), SIZE).tolist() == [1, 2, 3, 4, 5, 1, 2]
