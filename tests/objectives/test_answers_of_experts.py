"""Objectives over answers add what a model's experts ask for, as trl's trainers do."""

from functools import cache

import jax
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.leaves import Lora
from lmwright.core.param import init_weights
from lmwright.models.experts import Experts
from lmwright.models.moe import Mixtral
from lmwright.objectives.clm import Clm
from lmwright.objectives.kto import Kto
from lmwright.objectives.preference import Dpo, Orpo
from tests.objectives.test_preference import conversations, packed

BATCH = packed(list(conversations()))


def model_of(**losses):
    experts = Experts(num_experts=5, experts_per_token=2, mlp_dim=8, bias_rate=0.01, **losses)
    return Mixtral(
        vocab_size=37, embed_dim=12, num_layers=1, num_heads=4, num_kv_heads=2,
        head_dim=6, seq_len=48, experts=experts,
    )  # fmt: skip


@cache
def weights():
    w = jax.tree.map(lambda a: 3 * a, init_weights(model_of().spec(), jax.random.key(0)))
    normal = lambda key, *shape: 0.3 * jax.random.normal(jax.random.key(key), shape)  # noqa: E731
    q = Lora(w["layers"]["q"], normal(1, 1, 12, 3), normal(2, 1, 3, 4, 6), outputs=2)
    return {**w, "layers": {**w["layers"], "q": q}}


@cache
def of_text():
    """Metrics of the next tokens of the batch."""
    loss = jax.jit(lambda w: Clm().loss(model_of(), w, BATCH, jax.random.key(0), Compute()))
    return loss(weights()).metrics


@pytest.mark.parametrize("objective", [Dpo(), Orpo(), Kto(loss_kind="apo-zero-unpaired")])
def test_losses_and_the_bias_of_routers(objective):
    """What is added is that of `Clm`, whose value is that of transformers
    (tests/parity/test_moe_parity.py); and the bias has a gradient."""

    @jax.jit
    def gradient(w, bias):
        def loss(bias):
            own = {**w, "layers": {**w["layers"], "router_bias": bias}}
            model = model_of(balance_loss=5.0, z_loss=0.1)
            made = objective.loss(model, own, BATCH, jax.random.key(0), Compute())
            return made.total, made

        return jax.grad(loss, has_aux=True)(bias)

    w = weights()
    by, made = gradient(w, w["layers"]["router_bias"])
    balance, z = (of_text()[f"router_{name}"] for name in ("balance", "z"))
    np.testing.assert_allclose(made.metrics["router_z"], z, rtol=1e-5)
    np.testing.assert_allclose(made.metrics["router_balance"], balance, rtol=1e-5)
    added = 5.0 * balance[0] / balance[1] + 0.1 * z[0] / z[1]
    plain = objective.loss(model_of(), w, BATCH, jax.random.key(0), Compute()).total
    np.testing.assert_allclose(made.total - plain, added * made.weight, rtol=1e-4)
    assert np.abs(by).max() > 0
    np.testing.assert_allclose(by.sum(axis=-1), 0, atol=1e-4)
