"""State spaces in chunks and token by token equal those of transformers; documents and padding do
not reach each other."""

from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.nn import ssd as ours
from lmwright.nn.delta_rule import empty
from tests.nn.test_mlstm import LENGTH, ROWS, segment_ids

torch = pytest.importorskip("torch", reason="torch is the reference")
theirs = pytest.importorskip("transformers.models.granitemoehybrid.modeling_granitemoehybrid")

GROUPS, HEADS, STATE, HEAD = 2, 6, 8, 12
NEAR = 3e-5  # of the largest value: both round
ALONE = jnp.ones((ROWS, LENGTH), jnp.int32)


@cache
def inputs():
    """c, b, x, dt and rates, with decays from almost none to almost all."""
    rng = np.random.default_rng(0)
    normal = lambda *dims: rng.standard_normal((ROWS, LENGTH, *dims)).astype("f4")  # noqa: E731
    c, b, x = normal(GROUPS, STATE), normal(GROUPS, STATE), normal(HEADS, HEAD)
    return (
        c,
        b,
        x,
        np.exp(1.5 * normal(HEADS) - 2.5),
        -np.exp(rng.standard_normal(HEADS)).astype("f4"),
    )


def decays(arrays):
    *rest, rates = arrays
    return *rest, rates * rest[-1]


def weight():
    return np.random.default_rng(1).standard_normal((ROWS, LENGTH, HEADS, HEAD)).astype("f4")


@cache
def reference():
    """Results, the memory after them and the gradients of their sum times `weight`."""
    c, b, x, dt, rates = leaves = [torch.tensor(a, requires_grad=True) for a in inputs()]
    y, last = theirs.mamba2_chunk_scan(x, dt, rates, b, c, chunk_size=16, return_final_states=True)
    (y * torch.tensor(weight())).sum().backward()
    memory = last.detach().numpy().swapaxes(2, 3)  # [B, N, K, H]
    return y.detach().numpy(), memory, [a.grad.numpy() for a in leaves]


def assert_near(mine, other, share=NEAR):
    assert np.abs(np.asarray(mine) - other).max() <= share * np.abs(other).max()


@pytest.mark.parametrize("size", [1, 16, 50, 64, 256])
def test_chunks_equal_the_reference(size):
    run = jax.jit(lambda *a: ours.ssd(*decays(a), ALONE, size))
    y, _, grads = reference()
    assert_near(run(*inputs()), y)
    back = jax.jit(jax.grad(lambda *a: jnp.sum(run(*a) * weight()), argnums=range(5)))
    for mine, other in zip(back(*inputs()), grads, strict=True):
        assert_near(mine, other)


@pytest.mark.parametrize("lengths", [(1,) * 20, (33, 1, 1, 29, 40)])
def test_pieces_with_a_memory_are_the_row(lengths):
    arrays, (y, last, _) = decays(inputs()), reference()
    ends = np.cumsum([0, *lengths])
    memory, found = empty(ROWS, HEADS, STATE, HEAD), []
    for start, stop in pairwise(ends):
        piece = [jnp.asarray(a[:, start:stop]) for a in arrays]
        now, memory = ours.ssd_from(memory, *piece, ALONE[:, start:stop], chunk_tokens=16)
        found.append(now)
    assert_near(np.concatenate(found, axis=1), y[:, : ends[-1]])
    if ends[-1] == LENGTH:
        assert_near(memory, last)


def test_documents_and_padding_are_apart():
    """Each document of a packed row is what it is by itself."""
    ids, (c, b, x, dt, g) = segment_ids(), decays(inputs())
    real = (ids > 0)[..., None]
    dt, g = (np.where(real, a, 0.0).astype("f4") for a in (dt, g))
    run = jax.jit(lambda *a: ours.ssd(*a, 16))
    whole = np.asarray(run(c, b, x, dt, g, jnp.asarray(ids)))
    for row, of_row in enumerate(ids):
        for document in set(of_row.tolist()) - {0}:
            own = of_row == document
            first = np.argsort(~own, stable=True)  # it begins the row, and padding is behind it
            alone = [np.repeat(a[row : row + 1, first], ROWS, 0) for a in (c, b, x, dt, g)]
            y = run(*alone, jnp.asarray(np.repeat(own[None, first], ROWS, 0), jnp.int32))
            assert_near(whole[row, own], np.asarray(y[0, : own.sum()]))


def test_steps_and_decays_of_gates():
    dt, rate, bias = jnp.array([[[1.5], [-2.0], [3.0]]]), jnp.array([0.7]), jnp.array([0.3])
    step, decay = ours.gates(dt, rate, bias, jnp.array([[1, 1, 0]]))
    want = np.log1p(np.exp(np.array([1.8, -1.7])))
    np.testing.assert_allclose(step[0, :, 0], [*want, 0.0], rtol=1e-6)
    np.testing.assert_allclose(decay[0, :, 0], [*(-np.exp(0.7) * want), 0.0], rtol=1e-6)
