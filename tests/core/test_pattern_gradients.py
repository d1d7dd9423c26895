"""A scanned pattern of layers: gradients are those of the layers one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import REMATS
from lmwright.core.stack import run_stack

PLACES, REPEATS, D = 3, 2, 4


def block(w, x):
    return jnp.tanh(x @ w["kernel"]) + w["codes"].sum() * 0.01, {"sum": jnp.sum(x)}


def in_a_row(kernels, codes, x):
    total = 0.0
    for repeat in range(REPEATS):
        for place in map(str, range(PLACES)):
            layer = {"kernel": kernels[place][repeat], "codes": codes[place][repeat]}
            x, aux = block(layer, x)
            total += aux["sum"]
    return jnp.sum(jnp.sin(x)) + 0.1 * total


def scanned(kernels, codes, x, remat):
    layers = {p: {"kernel": kernels[p], "codes": codes[p]} for p in kernels}
    x, aux = run_stack([block] * PLACES, layers, x, remat=REMATS[remat])
    return jnp.sum(jnp.sin(x)) + 0.1 * aux["sum"]


@pytest.mark.parametrize("remat", ["none", "block"])
def test_gradients_beside_frozen_integers(remat):
    rng, names = np.random.default_rng(0), [str(p) for p in range(PLACES)]
    kernels = {p: jnp.asarray(rng.normal(size=(REPEATS, D, D)), jnp.float32) for p in names}
    codes = {p: jnp.asarray(rng.integers(0, 9, (REPEATS, 5)), jnp.int8) for p in names}
    x = jnp.asarray(rng.normal(size=(2, D)), jnp.float32)
    ours = jax.jit(jax.grad(scanned, argnums=(0, 2)), static_argnums=3)(kernels, codes, x, remat)
    wanted = jax.grad(in_a_row, argnums=(0, 2))(kernels, codes, x)
    for a, b in zip(*map(jax.tree.leaves, (ours, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
