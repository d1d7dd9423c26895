"""The kernel of disentangled attention, interpreted on CPU, against the plain reference: values and
gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.kernels import disentangled_attention, select, tpu_disentangled, tpu_row_attention
from lmwright.nn import disentangled
from lmwright.nn.disentangled import Disentangled
from tests.kernels.test_tpu_intervals import mesh_of


def problem(b, t, n, h, rows):
    """Arrays of rows of two documents and padding, and a weight of the result."""
    draw = np.random.default_rng(0)
    q, k, v, g = (jnp.asarray(a, jnp.float32) for a in draw.standard_normal((4, b, t, n, h)))
    pk, pq = (jnp.asarray(a, jnp.float32) for a in draw.standard_normal((2, rows, n, h)))
    ids = np.ones((b, t), np.int32)
    ids[0, t // 3 :], ids[0, -20:] = 2, 0
    return (q, k, v, pk, pq), jnp.asarray(ids), g


def check(attend, arrays, ids, g):
    scoring = Disentangled((3 * g.shape[-1]) ** -0.5, 100)

    def run(attend):
        total = lambda *a: (jnp.sum(attend(*a, ids, scoring) * g), attend(*a, ids, scoring))  # noqa: E731
        grad = jax.grad(total, argnums=(0, 1, 2, 3, 4), has_aux=True)
        with jax.default_matmul_precision("highest"):
            return jax.jit(grad)(*arrays)

    got, want = (jax.tree.leaves(run(way)) for way in (attend, disentangled.attention))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 * float(jnp.abs(b).max()))


@pytest.mark.parametrize(
    "strided, tokens, block",
    [
        (True, 256, 256),
        (False, 256, 128),
        pytest.param(True, 512, 256, marks=pytest.mark.slow),
        pytest.param(False, 512, 256, marks=pytest.mark.slow),
    ],
)
def test_equal_to_the_reference(strided, tokens, block, monkeypatch):
    """Rows of several strips, of several blocks, or both, by either way to rotate them."""
    monkeypatch.setattr(tpu_row_attention, "BLOCK", block)
    attend = partial(tpu_disentangled.attention, interpret=True, strided=strided)
    check(attend, *problem(2, tokens, 2, 16, 48))


def test_equal_on_a_mesh():
    attend = partial(disentangled_attention.on_tpu, interpret=True)
    with jax.set_mesh(mesh_of(data=2, fsdp=2, tensor=2)):
        check(attend, *problem(4, 128, 2, 16, 48))


def test_what_it_takes():
    """Heads and rows of DeBERTa, twice as long, and no row of another length."""
    assert all(tpu_disentangled.fits(t, 64, 2) for t in (128, 512, 1024))
    assert not any(tpu_disentangled.fits(t, 64, 2) for t in (100, 4096))
    check(partial(disentangled_attention.on_tpu, interpret=True), *problem(1, 100, 2, 16, 48))
    assert select.disentangled_attention(Compute(kernels="tpu")) is disentangled_attention.on_tpu
    for kernels in ("early tpu", "reference"):
        attend = select.disentangled_attention(Compute(kernels=kernels))
        assert attend is disentangled.attention
