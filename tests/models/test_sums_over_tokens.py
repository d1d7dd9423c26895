"""Gradients that are sums over many tokens have the digits of float32 where activations are
bfloat16, whatever adds them up on a platform."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from lmwright.core.compute import Compute
from lmwright.models.detector import Detector
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
