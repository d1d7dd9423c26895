"""Ragged products against a loop over the groups in numpy: values and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmwright.core import ragged
from lmwright.core.in_stack import InStack
from lmwright.core.ragged import dot_ragged

D, F = 12, 20


def plain(x, w, sizes):
    """Group by group; rows after the last group give zeros."""
    y, start = np.zeros((len(x), w.shape[2])), 0
    for matrix, size in zip(w, sizes, strict=True):
        y[start : start + size] = x[start : start + size] @ matrix
        start += size
    return y


def problem(num_rows, num_groups, seed=0):
    rng = np.random.default_rng(seed)
    x, g = (rng.standard_normal((num_rows, n)).astype("f4") for n in (D, F))
    return x, rng.standard_normal((num_groups, D, F)).astype("f4"), g


@settings(deadline=None, max_examples=15)
@given(st.lists(st.sampled_from([0, 0, 1, 7, 33, 80]), min_size=5, max_size=5), st.integers(0, 9))
def test_rows_meet_the_matrix_of_their_group(sizes, rest):
    num_rows = 5 * 80 + 9  # one program for all examples
    x, w, g = problem(num_rows, 5)
    y, pull = value_and_pull(x, w, jnp.asarray(sizes, jnp.int32), g)
    np.testing.assert_allclose(y, plain(x, w, sizes), rtol=1e-5, atol=1e-5)
    dx, dw = pull
    np.testing.assert_allclose(dx, plain(g, w.swapaxes(1, 2), sizes), rtol=1e-4, atol=1e-4)
    starts = np.cumsum([0, *sizes])
    for i, (start, size) in enumerate(zip(starts, sizes, strict=False)):
        want = x[start : start + size].T @ g[start : start + size]
        np.testing.assert_allclose(dw[i], want, rtol=1e-4, atol=1e-4)


@jax.jit
def value_and_pull(x, w, sizes, g):
    y, pull = jax.vjp(lambda x, w: dot_ragged("td,edf->tf", x, w, sizes), x, w)
    return y, pull(g)


def test_fewer_rows_than_a_block():
    x, w, _ = problem(3, 4)
    sizes = np.array([0, 2, 0, 1], np.int32)
    y = dot_ragged("td,edf->tf", jnp.asarray(x), jnp.asarray(w), jnp.asarray(sizes))
    np.testing.assert_allclose(y, plain(x, w, sizes), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_weight_is_summed_in_its_own_dtype():
    x = jnp.ones((512, 8), jnp.bfloat16)
    w = jnp.zeros((1, 8, 8), jnp.float32)
    g = jnp.ones((512, 8), jnp.bfloat16).at[1:].set(2**-8)  # sums no bfloat16 holds
    dw = jax.vjp(lambda w: dot_ragged("td,edf->tf", x, w, jnp.array([512])), w)[1](g)[0]
    assert dw.dtype == jnp.float32
    np.testing.assert_array_equal(dw, 1 + 511 * 2**-8)


@pytest.fixture
def kernels_step_by_step(monkeypatch):
    """Megablox on the CPU."""
    import importlib

    from jax.experimental.pallas.ops.tpu.megablox import gmm as _  # noqa: F401

    module = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    for name in ("gmm", "tgmm"):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, partial(real, interpret=True))


@pytest.mark.parametrize("sizes", [[300, 0, 77, 500], [1, 2, 3, 0]])
def test_the_kernel_equals_the_loop(sizes, kernels_step_by_step):
    """Also with rows that are no whole tiles."""
    x, w, g = problem(900, 4)
    sizes = jnp.asarray(sizes, jnp.int32)
    ours = jnp.arange(900)[:, None] < jnp.sum(sizes)
    want = ragged._by_blocks(x, w, sizes)
    for found in (
        ragged._by_kernel(x, w, sizes),
        ragged._by_kernel(x, w.swapaxes(1, 2), sizes, transposed=True),
    ):
        found = jnp.where(ours, found, 0)  # nobody's rows may be anything
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
    want = ragged._gradient_by_blocks(x, g, sizes)
    found = ragged._gradient_by_kernel(*(jnp.where(ours, a, jnp.nan) for a in (x, g)), sizes)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inputs, outputs", [(24, 40), (128, 40)])
@pytest.mark.parametrize("sizes", [[3, 0, 0, 2, 1], [0, 300, 0, 200, 0]])
def test_matrices_are_read_where_they_lie(inputs, outputs, sizes, kernels_step_by_step):
    """Of the middle layer in a stack, by the kernel and by loops; those with whole vectors of
    inputs and none of outputs are read the other way round."""
    dice, num_rows = np.random.default_rng(1), sum(sizes) + 2
    x = dice.standard_normal((num_rows, inputs)).astype("f4")
    stack = dice.standard_normal((3, len(sizes), inputs, outputs)).astype("f4")
    w, sizes = InStack(jnp.asarray(stack), jnp.int32(1)), jnp.asarray(sizes, jnp.int32)
    want = plain(x, stack[1], np.asarray(sizes))[:-2]
    by_kernel, by_loop = jax.jit(ragged._by_kernel)(x, w, sizes), ragged._by_blocks(x, w, sizes)
    np.testing.assert_allclose(by_kernel[:-2], want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(by_loop[:-2], want, rtol=1e-4, atol=1e-5)
    found = dot_ragged("td,edf->tf", jnp.asarray(x, jnp.bfloat16), w, sizes)  # another dtype
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found[:-2].astype("f4"), want, rtol=0.1, atol=0.5)
