"""Products of one input on a mesh: equal to numpy's, and one sum for the input's gradient."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.fanout import dots
from lmwright.core.sharding import AXES, constrain, make_mesh

PRODUCTS = {"q": ("btd,dnh->btnh", (6, 8, 5)), "k": ("btd,dkh->btkh", (6, 4, 5)),
            "v": ("btd,dkh->btkh", (6, 4, 5)), "e": ("btd,edf->btef", (3, 6, 4))}  # fmt: skip
MESHES = [
    {"tensor": 4},
    {"fsdp": 2, "context": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_values_and_gradients_and_one_reduce_scatter(axes, dtype):
    rng = np.random.default_rng(0)
    normal = lambda *shape: np.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    x = normal(8, 16, 6)
    weights = {name: normal(*shape) for name, (_, shape) in PRODUCTS.items()}
    mesh = make_mesh(dict.fromkeys(AXES, 1) | axes, jax.devices()[: math.prod(axes.values())])

    def both(x, weights, gs):
        def run(x, weights):
            x = constrain(x, "batch stream embed")
            found = dots(x, *((eqn, weights[name]) for name, (eqn, _) in PRODUCTS.items()))
            return dict(zip(PRODUCTS, found, strict=True))

        out, back = jax.vjp(run, x, weights)
        return out, *back(gs)

    f64 = lambda a: np.asarray(a, np.float64)  # noqa: E731
    want = {name: np.einsum(eqn, f64(x), f64(weights[name])) for name, (eqn, _) in PRODUCTS.items()}
    gs = {name: normal(*a.shape) for name, a in want.items()}
    want_x, want_w = np.zeros(x.shape), {}
    for name, (eqn, _) in PRODUCTS.items():
        left, out = eqn.split("->")
        a, w = left.split(",")
        want_x += np.einsum(f"{out},{w}->{a}", f64(gs[name]), f64(weights[name]))
        want_w[name] = np.einsum(f"{a},{out}->{w}", f64(x), f64(gs[name]))
    with jax.set_mesh(mesh):
        compiled = jax.jit(both).lower(x, weights, gs).compile()
        found = compiled(x, weights, gs)
    share = 1e-6 if dtype == jnp.float32 else 2**-7
    for got, expected in zip(
        jax.tree.leaves(found), jax.tree.leaves((want, want_x, want_w)), strict=True
    ):
        top = np.abs(expected).max()
        np.testing.assert_allclose(f64(got), expected, rtol=0, atol=share * top)
    assert compiled.as_text().count(" reduce-scatter(") == 1
