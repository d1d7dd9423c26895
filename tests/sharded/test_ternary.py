"""Ternary weights over devices: the product is the same sum of integers, and gradients are those of
one device where no activation is rounded, of which one in many thousands falls otherwise."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lmwright.core import ternary as products
from lmwright.core.leaves import Ternary
from lmwright.core.weight import dot
from lmwright.models.bitnet import BitNet
from tests.sharded.problem import SEQ_LEN, VOCAB, assert_same, gradients, make_run, plan_of

MODEL = BitNet(
    vocab_size=VOCAB, embed_dim=96, mlp_dim=40, num_layers=2, num_heads=16, num_kv_heads=8,
    head_dim=6, seq_len=SEQ_LEN,
)  # fmt: skip
MESH = {"fsdp": 2, "context": 2, "tensor": 2}


def run_of(axes=None, **train):
    return replace(make_run(axes, **train), model=MODEL)


@pytest.fixture
def floats(monkeypatch):
    """Activations as they are."""
    monkeypatch.setattr(
        products, "int8_tokens", lambda x, axes: (x, jnp.ones((1,) * x.ndim, jnp.float32))
    )


@cache
def alone():
    return gradients(run_of())


@pytest.mark.parametrize(
    "axes, train",
    [
        (MESH, {"num_microbatches": 2}),
        pytest.param(
            {"stage": 2, "context": 2, "tensor": 2},
            {"num_microbatches": 4, "remat": "block"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"data": 2, "fsdp": 4}, {"mlp_chunk_tokens": 16}, marks=pytest.mark.slow),
        pytest.param(MESH, {"mlp_chunk_tokens": 16}, marks=pytest.mark.slow),
    ],
)
def test_gradients(floats, axes, train):
    assert_same(gradients(run_of(axes, **train)), alone())


def test_rounded_activations_over_devices():
    """Scales of tokens whose values are on several devices, and sums of integers."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 8, 16, 6)).astype("f4")
    w = rng.standard_normal((16, 6, 96)).astype("f4")
    mesh = plan_of(run_of(MESH)).mesh

    def product(x, w):
        return dot("btnh,nhd->btd", x, Ternary(w, inputs=2, outputs=1))

    with jax.set_mesh(mesh):
        place = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*axes)))  # noqa: E731
        found = jax.jit(product)(
            place(x, "fsdp", "context", "tensor"), place(w, "tensor", None, "fsdp")
        )
    np.testing.assert_allclose(found, jax.jit(product)(x, w), rtol=1e-6, atol=1e-6)
