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


@pytest.mark.parametrize("dtype, near", [("float32", 2e-6), ("bfloat16", 2**-8)])
def test_the_exact_gelu_is_torch(dtype, near):
    """In bfloat16 too, where 1 + erf has lost the digits of negative inputs."""
    x = np.linspace(-5, 5, 401, dtype="f4")
    rounded = jnp.asarray(x, dtype)
    wanted = torch.nn.functional.gelu(torch.tensor(np.asarray(rounded, "f8"))).numpy()
    found = np.asarray(activate("geglu_erf", rounded), "f8")
    np.testing.assert_allclose(found, wanted, rtol=near, atol=1e-6)
