"""The kernels of the gated delta rule, interpreted on CPU, against transformers' recurrence and the
plain chunks: values and gradients."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.kernels import tpu_delta_rule
from lmwright.kernels.delta_rule_by import delta_rule
from lmwright.nn import delta_rule as plain
from tests.kernels.test_tpu_intervals import mesh_of

KEYS, KEY, HEAD = 2, 16, 32
NEAR = 1e-5  # of the largest value


@cache
def problem(rows=1, length=128, times=2):
    """q, k, v, b and g, with strong writes and with decays from almost none to almost all, and
    weights of the result."""
    rng = np.random.default_rng(0)
    normal = lambda *dims: rng.standard_normal((rows, length, *dims)).astype("f4")  # noqa: E731
    alike = rng.standard_normal(KEY).astype("f4")  # keys of a head are, in real models
    q, k = (plain.unit(jnp.asarray(normal(KEYS, KEY) + alike)) for _ in "qk")
    heads = KEYS * times
    strength = 1 / (1 + np.exp(-normal(heads) - 2))
    return (q, k, normal(heads, HEAD), strength, -np.exp(2 * normal(heads) - 3)), normal(
        heads, HEAD
    )


def segment_ids():
    """Documents and padding, beginning and ending in all places of chunks."""
    ids = np.ones((2, 128), np.int32)
    ids[0, 45:], ids[0, 85:], ids[0, -20:] = 2, 3, 0
    ids[1, :7], ids[1, 40:50], ids[1, 64:] = 0, 0, 2
    return ids


def kernel(*arrays, size=64):
    return delta_rule(*arrays, size, kernels="tpu", interpret=True)


def chunks(*arrays, size=64):
    return plain.delta_rule(*arrays, size)


def result(rule, arrays, ids, weight):
    """What `rule` gives, with padding left out, and the gradients of its weighted sum."""
    real = jnp.asarray(ids > 0)

    def total(q, k, v, b, g):
        b, g = (jnp.where(real[..., None], a, 0.0) for a in (b, g))  # as `gates` has them
        o = jnp.where(real[..., None, None], rule(q, k, v, b, g, jnp.asarray(ids)), 0.0)
        return jnp.sum(o * weight), o

    grad = jax.grad(total, argnums=tuple(range(5)), has_aux=True)
    with jax.default_matmul_precision("highest"):
        gradients, o = jax.jit(grad)(*arrays)
    return [np.asarray(a) for a in (o, *gradients)]


def assert_near(mine, want, share=NEAR):
    for found, other in zip(mine, want, strict=True):
        assert np.abs(found - other).max() <= share * np.abs(other).max()


def assert_as_near_in_bfloat16(kernel, chunks, arrays, ids, weight):
    """`kernel` with bfloat16 arrays is no more than a fifth further than `chunks` from float32."""
    narrow = *(jnp.asarray(a, jnp.bfloat16) for a in arrays[:3]), *arrays[3:]
    wide = *(a.astype(jnp.float32) for a in narrow[:3]), *arrays[3:]
    want = result(chunks, wide, ids, weight)

    def off(rule):
        pairs = zip(result(rule, narrow, ids, weight), want, strict=True)
        return [np.linalg.norm(a.astype("f4") - b) / np.linalg.norm(b) for a, b in pairs]

    assert max(off(kernel)) < 1.2 * max(off(chunks)) < 0.05


@pytest.mark.parametrize("size", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_equal_to_the_recurrence(size):
    torch = pytest.importorskip("torch", reason="torch is the reference")
    theirs = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    arrays, weight = problem()
    q, k, v, b, g = leaves = [torch.tensor(np.asarray(a), requires_grad=True) for a in arrays]
    q, k = (a.repeat_interleave(2, 2) for a in (q, k))
    o, _ = theirs.torch_recurrent_gated_delta_rule(q, k, v, g=g, beta=b)
    (o * torch.tensor(weight)).sum().backward()
    want = [o.detach().numpy(), *(a.grad.numpy() for a in leaves)]
    ids = np.ones((1, 128), np.int32)
    assert_near(result(lambda *a: kernel(*a, size=size), arrays, ids, weight), want)


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_documents_and_padding_as_in_plain_chunks(times):
    arrays, weight = problem(rows=2, times=times)
    ids = segment_ids()
    assert_near(result(kernel, arrays, ids, weight), result(chunks, arrays, ids, weight))


@pytest.mark.slow
def test_bfloat16_is_as_near_as_in_plain_chunks():
    arrays, weight = problem(length=256)
    assert_as_near_in_bfloat16(kernel, chunks, arrays, np.ones((1, 256), np.int32), weight)


def test_nothing_of_a_document_reaches_another():
    """Not even with the largest writes before."""
    (q, k, v, b, g), _ = problem(rows=2)
    ids, v = segment_ids(), v.copy()
    run = jax.jit(lambda v: kernel(q, k, v, b, g, jnp.asarray(ids)))
    assert tpu_delta_rule.FORWARD in str(jax.make_jaxpr(run)(v))
    before = np.asarray(run(v))
    v[0, :45] *= -50
    after = np.asarray(run(v))
    np.testing.assert_array_equal(before[0, 45:], after[0, 45:])
    assert np.abs(before[0, :45] - after[0, :45]).max() > 1


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 2}, {"fsdp": 2, "tensor": 4}])
def test_equal_on_a_mesh(axes):
    """Rows and heads over devices, and more devices than heads of keys."""
    arrays, weight = problem(rows=2)
    ids = segment_ids()
    alone = result(kernel, arrays, ids, weight)
    with jax.set_mesh(mesh_of(**axes)):
        assert_near(result(kernel, arrays, ids, weight), alone)


def test_what_it_takes():
    """Chunks of 64 and 128 that divide the row; four heads in a step, or all of a key."""
    fits = tpu_delta_rule.fits
    assert all(fits(4096, size, 4, 128, 128, 2) for size in (64, 128))
    assert not any(fits(4096, size, 4, 128, 128, 2) for size in (32, 96, 256))
    assert not fits(1000, 64, 4, 128, 128, 2) and not fits(1024, 64, 4, 72, 128, 2)
    together = tpu_delta_rule.heads_together
    assert [together(*heads) for heads in [(16, 1), (16, 2), (16, 3), (3, 1), (2, 8)]] == [
        4, 4, 3, 3, 8,
    ]  # fmt: skip
    arrays, _ = problem()
    arrays = [a[:, :40] for a in arrays]
    ids = jnp.ones((1, 40), jnp.int32)
    run = jax.jit(delta_rule, static_argnums=6, static_argnames=("kernels", "interpret"))
    for kernels in ("tpu", "early tpu", "cpu", "reference"):
        mine = run(*arrays, ids, 16, kernels=kernels)
        assert np.array_equal(mine, jax.jit(plain.delta_rule, static_argnums=6)(*arrays, ids, 16))
