"""Gradients that are sums over many tokens have the digits of float32 where activations are
bfloat16, whatever adds them up on a platform."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.models.block import feed_forward, with_bias
from lmwright.models.detector import Detector
from lmwright.nn.causal_conv import causal_conv
from lmwright.nn.norm import rms_norm
from tests.parity.compare import make_batch

T, D = 1024, 16
ROUNDED = 2.0**-8  # of a sum in bfloat16


def cotangents(mean=0.5):
    """bfloat16 [2, T, D], most of one sign."""
    return jnp.asarray(np.random.default_rng(0).normal(mean, 1, (2, T, D)), jnp.bfloat16)


def exact(a):
    return np.asarray(a, np.float64)


def test_what_all_tokens_of_a_document_read_of_its_first():
    ones = np.ones((2, T), np.int32)
    detector = Detector(SimpleNamespace(hidden=lambda w, *_: (w, {})))
    batch, x, g = make_batch(ones), jnp.zeros((2, T, D), jnp.bfloat16), cotangents()
    (dx,) = jax.vjp(lambda x: detector.hidden(x, batch, Compute())[0], x)[1](g)
    wanted = exact(g).sum(1) + exact(g)[:, 0]
    np.testing.assert_allclose(exact(dx)[:, 0], wanted, rtol=2 * ROUNDED)
    np.testing.assert_array_equal(exact(dx)[:, 1:], exact(g)[:, 1:])


IDS = jnp.ones((2, T), jnp.int32)
EYE = {"up": jnp.eye(D), "down": jnp.eye(D), "up_bias": jnp.full(D, 9.0), "down_bias": jnp.ones(D)}


def in_chunks(name):
    """The bias of an mlp that takes 256 tokens of each row at a time."""
    return lambda x, w: feed_forward("relu", EYE | {name: w}, x, 256), (D,)


READ_BY_ALL = {
    "scale of a norm": (lambda x, w: rms_norm(x, w, 1e-6), (D,)),
    "scale of heads": (lambda x, w: rms_norm(x.reshape(2, T, 2, 8), w, 1e-6, dims=2), (2, 8)),
    "bias": (lambda x, w: with_bias(x, {"q_bias": w}, "q"), (D,)),
    "filters": (lambda x, w: causal_conv(x, w, jnp.zeros(D), IDS), (4, D)),
    "bias of an mlp in chunks": in_chunks("up_bias"),
    "last bias of an mlp in chunks": in_chunks("down_bias"),
    "bias of filters": (lambda x, w: causal_conv(x, jnp.ones((4, D)), w, IDS), (D,)),
}


@pytest.mark.parametrize("case", READ_BY_ALL)
def test_weights_that_all_tokens_read(case):
    """Against the same with float32 activations of the same values; a sum of numbers that are
    bfloat16 one by one is as good."""
    read, shape = READ_BY_ALL[case]
    x, w, g = cotangents(0.1), jnp.ones(shape), cotangents()

    def gradient(dtype):
        y, back = jax.vjp(lambda w: read(x.astype(dtype), w), w)
        return jax.jit(back)(g.reshape(y.shape).astype(dtype))[0]

    found, wanted = gradient(jnp.bfloat16), exact(gradient(jnp.float32))
    assert found.dtype == jnp.float32 == w.dtype
    apart = np.linalg.norm(exact(found) - wanted) / np.linalg.norm(wanted)
    assert apart < ROUNDED / 4
