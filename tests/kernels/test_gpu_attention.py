"""The attention of GPUs equals the reference, in value and gradient, and never holds all scores."""

import re

import jax
import jax.numpy as jnp
import pytest

from lmwright.core.compute import Compute
from lmwright.kernels import gpu_attention, select
from lmwright.nn import attention, intervals
from lmwright.nn.attention import Scoring
from tests.kernels.attention_problem import WAYS_TO_SEE, problem, seen_by
from tests.kernels.test_cpu import near
from tests.kernels.test_tpu_intervals import mesh_of


def both(fn, q, k, v, g, *rest):
    """Result and gradients."""

    def run(q, k, v):
        out, back = jax.vjp(lambda *a: fn(*a, *rest), q, k, v)
        return out, *back(g)

    return jax.jit(run)(q, k, v)


@pytest.mark.parametrize("masks", [{}, {"window": 40, "soft_cap": 1.5}, {"window": 200}])
def test_causal(masks, monkeypatch):
    monkeypatch.setattr(gpu_attention, "MIN_CHUNK", 64)  # several, the last one shorter
    q, k, v, ids, g = problem(2, 301, 6, 2, 10)
    scoring = Scoring(0.37, **masks)
    got = both(gpu_attention.causal_attention, q, k, v, g, ids, scoring)
    near(got, both(attention.causal_attention, q, k, v, g, ids, scoring), share=5e-6)


@pytest.mark.parametrize("kind", WAYS_TO_SEE)
def test_intervals(kind, monkeypatch):
    """Also where queries see no key: zeros, and no gradient."""
    monkeypatch.setattr(gpu_attention, "MIN_CHUNK", 32)
    q, k, v, ids, g = problem(2, 130, 4, 2, 6)
    seen, reach = seen_by(kind, ids)
    scoring = Scoring(0.37)
    got = both(gpu_attention.attention, q, k, v, g, seen, scoring, reach)
    near(got, both(intervals.attention, q, k, v, g, seen, scoring), share=5e-6)


def test_on_a_mesh():
    q, k, v, ids, g = problem(4, 64, 4, 2, 8)
    scoring = Scoring(0.37)
    alone = both(gpu_attention.causal_attention, q, k, v, g, ids, scoring)
    with jax.set_mesh(mesh_of(data=2, fsdp=2, tensor=2)):
        near(both(gpu_attention.causal_attention, q, k, v, g, ids, scoring), alone)


def compiled_bytes(tokens):
    """Temporary memory of result and gradients."""
    row = lambda heads: jax.ShapeDtypeStruct((1, tokens, heads, 8), jnp.bfloat16)  # noqa: E731
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    attend = select.causal_attention(Compute(kernels="gpu"))

    def run(q, k, v, g, ids):
        out, back = jax.vjp(lambda *a: attend(*a, ids, Scoring(0.3)), q, k, v)
        return out, *back(g)

    compiled = jax.jit(run).lower(row(4), row(2), row(2), row(4), ids).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_tokens():
    few, many = compiled_bytes(2048), compiled_bytes(8192)
    assert many < 5 * few  # 16 times as many scores
    assert many < 4 * 4 * 8192**2  # less than those of one head and layer, kept in float32


def test_gpus_get_it(monkeypatch):
    """Its program for CUDA has no array of all scores of a row."""
    tokens = 2048
    attend = select.causal_attention(Compute(kernels="gpu"))
    row = jax.ShapeDtypeStruct((1, tokens, 2, 8), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    grads = jax.grad(lambda q, k, v, ids: jnp.sum(attend(q, k, v, ids, Scoring(0.3))), (0, 1, 2))
    text = jax.export.export(jax.jit(grads), platforms=["cuda"])(row, row, row, ids).mlir_module()
    assert f"{tokens}x{tokens}" not in text and re.search(rf"512x{tokens}xf32", text)
