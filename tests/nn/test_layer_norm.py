"""Layer norm and the exact GELU against torch, values and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.nn.layer_norm import layer_norm
from lmwright.nn.mlp import activate

torch = pytest.importorskip("torch", reason="torch is the reference")


@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm_is_torch(biased):
    draws = np.random.default_rng(0)
    x, g = (draws.standard_normal((3, 5, 24)).astype("f4") * 3 + 2 for _ in range(2))
    scale, bias = draws.standard_normal((2, 24)).astype("f4")
    given = [x, scale, *([bias] if biased else [])]
    ours = lambda x, s, b=None: layer_norm(x, s, b, 1e-3)  # noqa: E731
    y, pull_back = jax.vjp(ours, *given)
    theirs = [torch.tensor(a, requires_grad=True) for a in given]
    out = torch.nn.functional.layer_norm(theirs[0], (24,), *theirs[1:], eps=1e-3)
    out.backward(torch.tensor(g))
    np.testing.assert_allclose(y, out.detach(), rtol=1e-5, atol=1e-5)
    for found, wanted in zip(pull_back(jnp.asarray(g)), theirs, strict=True):
        np.testing.assert_allclose(found, wanted.grad, rtol=1e-4, atol=2e-5)


def test_a_norm_without_weights_is_one_of_ones():
    x, g = np.random.default_rng(0).standard_normal((2, 3, 5, 24)).astype("f4") + 2
    bare, pull_bare = jax.vjp(lambda x: layer_norm(x, None, None, 1e-3), x)
    ones, pull_ones = jax.vjp(lambda x: layer_norm(x, jnp.ones(24), None, 1e-3), x)
    np.testing.assert_array_equal(bare, ones)
    np.testing.assert_array_equal(pull_bare(jnp.asarray(g))[0], pull_ones(jnp.asarray(g))[0])


def test_heads_have_weights_of_their_own():
    draws = np.random.default_rng(0)
    x, g = draws.standard_normal((2, 3, 5, 4, 8)).astype("f4")  # [B, T, N, H]
    scale, bias = draws.standard_normal((2, 4, 8)).astype("f4")
    norm = lambda *given: layer_norm(*given, 1e-3)  # noqa: E731
    y, pull_back = jax.vjp(norm, x, scale, bias)
    found = pull_back(jnp.asarray(g))
    for n in range(4):
        alone, pull_alone = jax.vjp(norm, x[:, :, n], scale[n], bias[n])
        np.testing.assert_allclose(y[:, :, n], alone, rtol=1e-6, atol=1e-6)
        dx, dscale, dbias = pull_alone(jnp.asarray(g[:, :, n]))
        np.testing.assert_allclose(found[0][:, :, n], dx, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[1][n], dscale, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[2][n], dbias, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype, near", [("float32", 2e-6), ("bfloat16", 2**-8)])
def test_the_exact_gelu_is_torch(dtype, near):
    """In bfloat16 too, where 1 + erf has lost the digits of negative inputs."""
    x = np.linspace(-5, 5, 401, dtype="f4")
    rounded = jnp.asarray(x, dtype)
    wanted = torch.nn.functional.gelu(torch.tensor(np.asarray(rounded, "f8"))).numpy()
    found = np.asarray(activate("geglu_erf", rounded), "f8")
    np.testing.assert_allclose(found, wanted, rtol=near, atol=1e-6)
