"""Attention with sinks on each platform, and over rows that are cut over devices, against a softmax
over the scores of all keys and the sink."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.kernels import online_softmax, sink_attention, tpu_row_attention, tpu_spans
from lmwright.nn import attention
from lmwright.nn.attention import Scoring
from lmwright.nn.cached_attention import cached_attention
from tests.kernels.attention_problem import problem
from tests.kernels.test_context_attention import mesh_of

SINKS = np.array([-3.0, 0.5, 2.0, 4.0, 0.0, 1.0, -1.0, 3.0], "f4")


def with_gradients(attend, ids, scoring, q, k, v, sinks, g):
    out, back = jax.vjp(lambda *a: attend(*a, ids, scoring), q, k, v, sinks)
    return out, *back(g)


def dense(q, k, v, sinks, ids, scoring):
    """By the probabilities of all keys and of one more of each head, which has no value."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a, group, axis=2) for a in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * scoring.scale
    mask = attention.causal_mask(ids, scoring.window)[:, None]
    seen = jnp.exp(jnp.where(mask, scores, -jnp.inf))
    total = jnp.sum(seen, axis=-1, keepdims=True) + jnp.exp(sinks)[:, None, None]
    return jnp.einsum("bnts,bsnh->btnh", seen / total, v)


def compare(attend, shape, window, mesh=None):
    q, k, v, ids, g = problem(*shape)
    arrays = q, k, v, jnp.asarray(SINKS[: shape[2]]), g
    scoring = Scoring(0.3, window)
    run = lambda fn: jax.jit(partial(with_gradients, fn, ids, scoring))(*arrays)  # noqa: E731
    expected = run(dense)
    with jax.set_mesh(mesh) if mesh else jax.default_device(None):
        found = run(attend)
    for name, ours, theirs in zip(("out", "q", "k", "v", "sinks"), found, expected, strict=True):
        largest = float(jnp.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * largest + 1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("kernel", "long", "window"),
    [
        ("reference", False, 9),
        ("cpu", False, None),
        ("cpu", False, 40),
        ("tpu", False, None),
        ("tpu", False, 40),
        ("tpu", True, None),
        ("tpu", True, 150),
        ("gpu", False, 40),
        ("early tpu", False, None),
    ],
)
def test_equal_to_a_dense_softmax(kernel, long, window, monkeypatch):
    """Heads that share a kv head, several documents and padding; with gradients, of the sinks
    too."""
    if long:
        monkeypatch.setattr(tpu_row_attention, "VECTOR_MEMORY", 0)
        monkeypatch.setattr(tpu_spans, "SHAPES", ((128, 128, 128, 256),))
    attend = sink_attention.attend_by(Compute(), kernel=kernel, interpret=True)
    compare(attend, (2, 256, 4, 2, 32), window)


@pytest.mark.parametrize(
    ("sizes", "around", "window"),
    [
        ({"context": 4}, "ring", None),
        ({"context": 2, "fsdp": 2, "tensor": 2}, "ring", 9),
        ({"context": 2, "fsdp": 2, "tensor": 2}, "ring", 20),
        ({"context": 2, "fsdp": 2, "tensor": 2}, "all_to_all", 9),
        ({"context": 4}, "all_to_all", None),
    ],
)
def test_rows_over_devices(sizes, around, window, monkeypatch):
    monkeypatch.setattr(online_softmax, "QUERIES", 5)
    attend = sink_attention.attend_by(Compute(context_attention=around))
    compare(attend, (4, 32, 8, 4, 6), window, mesh_of(**sizes))


@pytest.mark.parametrize("queries", [1, 3])
def test_of_a_cache(queries):
    """The last queries of a row see what they see in the whole row."""
    q, k, v, _, _ = problem(2, 17, 4, 2, 10)
    scoring, ids = Scoring(0.4), jnp.ones((2, 17), jnp.int32)
    expected = dense(q, k, v, SINKS[:4], ids, scoring)[:, -queries:]
    mask = attention.causal_mask(ids)[:, -queries:]
    run = jax.jit(cached_attention, static_argnums=4)
    found = run(q[:, -queries:], k, v, mask, scoring, SINKS[:4])
    np.testing.assert_allclose(found, expected, atol=2e-6)
