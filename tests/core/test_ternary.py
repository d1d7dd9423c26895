"""Products with ternary weights: integers, floats in any dtype and the published formula agree; who
rounds them again, or adds to them, is told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core import ternary as products
from lmwright.core.leaves import Lora, Ternary, merge
from lmwright.core.ternary import in_codes
from lmwright.core.weight import as_array, dot
from lmwright.models.bitnet import BitNet

SIZES = {
    "vocab_size": 31, "embed_dim": 48, "mlp_dim": 80, "num_layers": 2, "num_heads": 6,
    "num_kv_heads": 2, "head_dim": 8, "seq_len": 16,
}  # fmt: skip


def problem(dtype="f4"):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 5, 6, 8)), dtype)
    return x, jnp.asarray(rng.standard_normal((6, 8, 48)), "f4")


def formula(x, w):
    """numpy, float64, as the paper has it."""
    x, w = (np.asarray(a, np.float64) for a in (x, w))
    s = np.abs(w).mean()
    a = 127 / np.abs(x).max((2, 3), keepdims=True)
    values = np.clip(np.round(w / s), -1, 1) * s
    return np.einsum("btnh,nhd->btd", np.round(x * a) / a, values)


@pytest.mark.parametrize("dtype", ["f4", "bfloat16"])
def test_the_product_is_the_formula(dtype):
    x, w = problem(dtype)
    leaf = Ternary(w, inputs=2, outputs=1)
    found = dot("btnh,nhd->btd", x, leaf, out_dtype=jnp.float32)
    np.testing.assert_allclose(found, formula(x, w), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["f4", "bfloat16"])
def test_integers_give_the_same_bits(dtype, monkeypatch):
    """What devices with int8 units do, traced for one of them and run here."""
    x, w = problem(dtype)

    def traced():  # each time anew
        return jax.jit(lambda x: dot("btnh,nhd->btd", x, Ternary(w, inputs=2, outputs=1))).trace(x)

    floats = traced().lower().compile()(x)
    monkeypatch.setattr(products, "device_kind", lambda: "TPU v5e")
    integers = traced()
    assert "i32[2,5,48]" in str(integers.jaxpr)
    np.testing.assert_array_equal(integers.lower().compile()(x), floats)


def test_rounding_passes_gradients_on():
    x, w = problem()

    def loss(x, w):
        return jnp.sum(jnp.sin(dot("btnh,nhd->btd", x, Ternary(w, inputs=2, outputs=1))))

    dx, dw = jax.grad(loss, (0, 1))(x, w)
    values = np.asarray(as_array(Ternary(w, inputs=2, outputs=1), jnp.float32))
    g = np.cos(formula(x, w))
    a = 127 / np.abs(x).max((2, 3), keepdims=True)
    np.testing.assert_allclose(dx, np.einsum("btd,nhd->btnh", g, values), rtol=1e-4, atol=1e-5)
    rounded = np.round(x * a) / a
    np.testing.assert_allclose(dw, np.einsum("btnh,btd->nhd", rounded, g), rtol=1e-4, atol=1e-5)


def test_an_adapter_is_rounded_with_its_base():
    """So that the merged weight computes what was trained, and gradients reach both factors."""
    x, w = problem()
    rng = np.random.default_rng(1)
    a, b = (jnp.asarray(rng.standard_normal(s), "f4") for s in ((6, 8, 3), (3, 48)))
    lora = lambda b: Lora(w, a, b, inputs=2, outputs=1)  # noqa: E731
    product = lambda leaf: dot("btnh,nhd->btd", x, Ternary(leaf, inputs=2, outputs=1))  # noqa: E731
    np.testing.assert_array_equal(product(lora(b)), product(merge(lora(b))))
    grads = jax.grad(lambda b: jnp.sum(product(lora(b)) ** 2))(b)
    assert np.abs(grads).min() > 0


def test_what_is_ternary_is_said_once():
    """By the Params: matrices of the layers, and neither embeddings nor norms."""
    model = BitNet(**SIZES)
    spec = model.layer_spec("global")
    found = in_codes(spec, {name: jnp.zeros(param.shape) for name, param in spec.items()})
    typed = {name for name, leaf in found.items() if isinstance(leaf, Ternary)}
    assert typed == {"q", "k", "v", "o", "gate", "up", "down"}
    assert not model.spec()["embed"].ternary
