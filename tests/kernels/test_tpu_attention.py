"""Attention kernels of TPUs, interpreted on CPU, against the reference; values and gradients."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from lmwright.core.sharding import AXES
from lmwright.kernels import tpu_attention, tpu_row_attention, tpu_spans, tpu_splash
from lmwright.nn import attention
from lmwright.nn.attention import Scoring
from tests.kernels.attention_problem import problem


def both(fn, q, k, v, ids, g, **choices):
    def run(q, k, v, g):
        out, back = jax.vjp(lambda *a: fn(*a, ids, Scoring(0.3, **choices)), q, k, v)
        return out, *back(g)

    return jax.jit(run)(q, k, v, g)


@cache
def reference(shape, **choices):
    """The result of the reference, which several kernels are compared with."""
    return both(attention.causal_attention, *problem(*shape), **choices)


def interpreted(q, k, v, ids, scoring):
    return tpu_attention.causal_attention(q, k, v, ids, scoring, interpret=True)


def take_splash(monkeypatch):
    """Neither of our own kernels."""
    monkeypatch.setattr(tpu_row_attention, "VECTOR_MEMORY", 0)
    monkeypatch.setattr(tpu_attention, "TILE", 1000)


@pytest.fixture(params=["whole rows", "whole rows in blocks", "long rows", "splash"])
def kernel(request, monkeypatch):
    """Each kernel in turn; three blocks of 128 in a row of 384."""
    if request.param == "splash":
        take_splash(monkeypatch)
    if request.param == "long rows":
        monkeypatch.setattr(tpu_row_attention, "VECTOR_MEMORY", 0)
        monkeypatch.setattr(tpu_spans, "SHAPES", ((128, 128, 128, 256),))
    if request.param == "whole rows in blocks":
        monkeypatch.setattr(tpu_row_attention, "BLOCK", 128)
    return request.param


@pytest.mark.parametrize(
    "shape", [(2, 256, 4, 2, 64), (1, 384, 3, 3, 96), (1, 128, 4, 1, 128), (2, 100, 2, 1, 16)]
)
def test_equal_to_the_reference(shape, kernel):
    got = both(interpreted, *problem(*shape))
    for a, b in zip(got, reference(shape), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()) + 1e-5)


CHOICES = pytest.mark.parametrize(
    "choices",
    [{"window": 70}, {"window": 1}, {"window": 999}, {"soft_cap": 3.0},
     {"window": 130, "soft_cap": 2.0}],
)  # fmt: skip


def check_choices(tokens, choices):
    shape = (1, tokens, 4, 2, 64)
    got = both(interpreted, *problem(*shape), **choices)
    for a, b in zip(got, reference(shape, **choices), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()) + 1e-5)


@CHOICES
def test_windows_and_soft_caps_equal_the_reference(choices, kernel):
    check_choices(384, choices)


@CHOICES
def test_windows_and_soft_caps_of_rows_that_are_padded(choices):
    """Of no multiple of 128: they take splash, whatever is set for whole rows."""
    check_choices(200, choices)


def test_the_separate_backward_kernels_of_splash(monkeypatch):
    take_splash(monkeypatch)
    args = problem(1, 384, 3, 3, 96)
    fused = both(interpreted, *args)
    monkeypatch.setattr(tpu_splash, "FUSED_LEN", 0)
    for a, b in zip(both(interpreted, *args), fused, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()) + 1e-5)


def test_bfloat16_is_as_near_to_the_reference_as_splash(monkeypatch):
    *arrays, ids, g = problem(1, 384, 4, 2, 64)
    exact = both(attention.causal_attention, *arrays, ids, g)
    narrow = [a.astype(jnp.bfloat16) for a in (*arrays, g)]

    def errors() -> list[float]:
        found = both(interpreted, *narrow[:3], ids, narrow[3])
        return [float(jnp.abs(a - b).mean()) for a, b in zip(found, exact, strict=True)]

    ours = errors()
    monkeypatch.setattr(tpu_row_attention, "VECTOR_MEMORY", 0)
    long = errors()
    take_splash(monkeypatch)
    for mine, longer, splash in zip(ours, long, errors(), strict=True):
        assert 0 < mine < 1.2 * splash and 0 < longer < 1.2 * splash


def test_rows_that_fit_the_vector_memory():
    assert tpu_row_attention.fits(2048, 128, 2) and not tpu_row_attention.fits(4096, 128, 2)
    assert not tpu_row_attention.fits(200, 64, 2)  # no multiple of 128
    assert not tpu_row_attention.fits(2048, 72, 2)  # of a half tile


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
