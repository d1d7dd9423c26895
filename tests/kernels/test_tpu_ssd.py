"""The kernels of state spaces, interpreted on CPU, against the plain chunks, which equal those of
transformers: values and gradients."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.kernels import tpu_ssd
from lmwright.kernels.ssd_by import ssd
from lmwright.nn import ssd as plain
from tests.kernels.test_tpu_delta_rule import (
    assert_as_near_in_bfloat16,
    assert_near,
    result,
    segment_ids,
)
from tests.kernels.test_tpu_intervals import mesh_of

GROUPS, KEY, HEAD = 2, 128, 64
SLOW = pytest.mark.slow


@cache
def problem(rows=2, length=128, heads=4, groups=GROUPS):
    """c, b, x, steps and log decays, with decays from almost none to almost all, and weights of
    the result."""
    rng = np.random.default_rng(0)
    normal = lambda *dims: rng.standard_normal((rows, length, *dims)).astype("f4")  # noqa: E731
    steps, rates = np.exp(normal(heads) - 1), np.exp(rng.standard_normal(heads) - 1).astype("f4")
    arrays = normal(groups, KEY), normal(groups, KEY), normal(heads, HEAD), steps, -rates * steps
    return arrays, normal(heads, HEAD)


def kernel(*arrays, size=64):
    return ssd(*arrays, size, kernels="tpu", interpret=True)


def chunks(*arrays, size=64):
    return plain.ssd(*arrays, size)


@pytest.mark.parametrize(
    ("heads", "groups", "size"),
    [(4, 2, 64), *(pytest.param(*case, marks=SLOW) for case in ((2, 2, 64), (10, 1, 128)))],
)
def test_equal_to_the_plain_chunks(heads, groups, size):
    """Documents and padding that begin and end in all places of chunks; heads of one step, of
    several that share a group, and of a group each."""
    arrays, weight = problem(heads=heads, groups=groups)
    ids = segment_ids()
    found = result(lambda *a: kernel(*a, size=size), arrays, ids, weight)
    assert_near(found, result(chunks, arrays, ids, weight), 2e-5)


@pytest.mark.slow
def test_bfloat16_is_as_near_as_in_plain_chunks():
    arrays, weight = problem(length=256)
    assert_as_near_in_bfloat16(kernel, chunks, arrays, np.ones((2, 256), np.int32), weight)


def test_nothing_of_a_document_reaches_another():
    """Not even with the largest writes before."""
    (c, b, x, dt, g), _ = problem()
    ids, x = segment_ids(), x.copy()
    run = jax.jit(lambda x: kernel(c, b, x, dt, g, jnp.asarray(ids)))
    assert tpu_ssd.FORWARD in str(jax.make_jaxpr(run)(x))
    before = np.asarray(run(x))
    x[0, :45] *= -50
    after = np.asarray(run(x))
    np.testing.assert_array_equal(before[0, 45:], after[0, 45:])
    assert np.abs(before[0, :45] - after[0, :45]).max() > 1


@pytest.mark.parametrize(
    ("axes", "kernels"),
    [
        ({"context": 4, "data": 2}, "cpu"),
        pytest.param({"context": 2, "tensor": 4}, "cpu", marks=SLOW),
        pytest.param({"data": 2, "tensor": 4}, "tpu", marks=SLOW),
        pytest.param({"context": 2, "data": 2}, "tpu", marks=SLOW),
    ],
)
@pytest.mark.parametrize("ids", [segment_ids(), np.ones((2, 128), np.int32)], ids=["many", "one"])
def test_equal_on_a_mesh(axes, kernels, ids):
    """Rows, pieces of rows and heads over devices, also more devices than groups; documents that
    begin and end on all devices, and one that is on several."""
    arrays, weight = problem()
    size = 64 if kernels == "tpu" else 16
    want = result(lambda *a: chunks(*a, size=size), arrays, ids, weight)
    rule = lambda *a: ssd(*a, size, kernels=kernels, interpret=True)  # noqa: E731
    with jax.set_mesh(mesh_of(**axes)):
        if kernels == "tpu":
            assert tpu_ssd.FORWARD in str(jax.make_jaxpr(rule)(*arrays, ids))
        assert_near(result(rule, arrays, ids, weight), want, 2e-5)


def test_what_it_takes():
    """Chunks of 64, 128 and 256 that divide the row; up to eight heads of a group in a step."""
    fits = lambda size, *dims, heads=48: tpu_ssd.Call(size, heads, 1).fits(*dims, 2)  # noqa: E731
    assert all(fits(size, 4096, 128, 64) for size in (64, 128, 256))
    assert not any(fits(size, 4096, 128, 64) for size in (32, 96, 512))
    assert not fits(64, 1000, 128, 64) and not fits(64, 1024, 64, 64) and fits(64, 1024, 128, 32)
    assert fits(64, 1024, 64, 16, heads=7) and not fits(64, 1024, 128, 8)
    together = [tpu_ssd.Call(64, n, 1).heads for n in (1, 6, 7, 12, 48, 64)]
    assert together == [1, 6, 7, 6, 8, 8] and tpu_ssd.Call(64, 48, 8).heads == 6
    arrays, _ = problem()
    arrays = [a[:, :40] for a in arrays]
    ids = jnp.ones((2, 40), jnp.int32)
    run = jax.jit(ssd, static_argnums=6, static_argnames=("kernels", "interpret"))
    for kernels in ("tpu", "early tpu", "cpu", "reference"):
        mine = run(*arrays, ids, 16, kernels=kernels)
        assert np.array_equal(mine, jax.jit(plain.ssd, static_argnums=6)(*arrays, ids, 16))
