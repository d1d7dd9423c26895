"""Splash attention, interpreted on CPU, against the reference; values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problem import problem
from jax.sharding import AxisType, Mesh

from podsmith.core.sharding import AXES
from podsmith.kernels import tpu_attention
from podsmith.nn import attention


def both(fn, q, k, v, ids, g, **choices):
    def run(q, k, v, g):
        out, back = jax.vjp(lambda *a: fn(*a, ids, 0.3, **choices), q, k, v)
        return out, *back(g)

    return jax.jit(run)(q, k, v, g)


def interpreted(q, k, v, ids, scale, **choices):
    return tpu_attention.causal_attention(q, k, v, ids, scale, interpret=True, **choices)


@pytest.mark.parametrize(
    "shape", [(2, 256, 4, 2, 64), (1, 384, 3, 3, 96), (1, 128, 4, 1, 128), (2, 100, 2, 1, 16)]
)
def test_equal_to_the_reference(shape):
    args = problem(*shape)
    got, want = both(interpreted, *args), both(attention.causal_attention, *args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()) + 1e-5)


@pytest.mark.parametrize(
    "choices",
    [{"window": 70}, {"window": 1}, {"window": 999}, {"soft_cap": 3.0},
     {"window": 130, "soft_cap": 2.0}],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [256, 200])
def test_windows_and_soft_caps_equal_the_reference(tokens, choices):
    args = problem(1, tokens, 4, 2, 64)
    got = both(interpreted, *args, **choices)
    want = both(attention.causal_attention, *args, **choices)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()) + 1e-5)


def test_the_separate_backward_kernels_of_long_rows(monkeypatch):
    args = problem(1, 384, 3, 3, 96)
    fused = both(interpreted, *args)
    monkeypatch.setattr(tpu_attention, "FUSED_LEN", 0)
    for a, b in zip(both(interpreted, *args), fused, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()) + 1e-5)


def test_equal_on_a_mesh():
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    devices = np.array(jax.devices()).reshape([sizes.get(axis, 1) for axis in AXES])
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    args = problem(4, 128, 4, 2, 64)
    want = both(attention.causal_attention, *args)
    with jax.set_mesh(mesh):
        got = both(interpreted, *args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()) + 1e-5)
