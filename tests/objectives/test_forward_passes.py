"""Forward passes of objectives that compare with a reference, and their FLOPs, against the
compiler's count."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.leaves import Lora
from lmwright.models.llama import Llama
from lmwright.objectives.kto import Kto
from lmwright.objectives.preference import Dpo, Orpo
from tests.in_memory import abstract_weights

LENGTH, ROWS, RANK = 128, 2, 2
MODEL = Llama(
    vocab_size=512, embed_dim=128, mlp_dim=384, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=32, seq_len=LENGTH,
)  # fmt: skip


def loss_of(objective):
    """The loss as a function of adapters and other things, and these."""
    base = abstract_weights(MODEL.spec())

    def loss(factors, base, batch):
        up = Lora(base["layers"]["up"], *factors)
        w = base | {"layers": base["layers"] | {"up": up}}
        return objective.loss(MODEL, w, batch, jax.random.key(0), compute).total

    ids = jnp.repeat(jnp.arange(1, 5), LENGTH // 4)[None].repeat(ROWS, 0)
    places = jnp.tile(jnp.arange(LENGTH // 4), 4)[None].repeat(ROWS, 0)
    tokens = jnp.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 512
    batch = Batch(tokens, ids, places, (places > 4).astype(jnp.float32))
    factors = jnp.ones((2, 128, RANK)), jnp.ones((2, RANK, 384))
    compute = replace(Compute(), unroll=True, loss_chunk_tokens=LENGTH)  # loops count once
    return loss, (factors, base, batch)


def compiled_flops(objective):
    """FLOPs of a loss and its gradient for adapters, as XLA counts them."""
    loss, given = loss_of(objective)
    return jax.jit(jax.grad(loss)).lower(*given).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("objective", [Orpo(), Dpo(), Kto(), Kto(loss_kind="apo-zero-unpaired")])
def test_all_passes_are_said(objective, monkeypatch):
    """Beside the one that the gradient is taken through."""
    hidden, passes = Llama.hidden, []
    monkeypatch.setattr(Llama, "hidden", lambda *given: passes.append(1) or hidden(*given))
    loss, given = loss_of(objective)
    jax.eval_shape(loss, *given)
    assert len(passes) == 1 + objective.forward_passes


@pytest.fixture(scope="module")
def alone():
    """FLOPs of an objective without a reference."""
    return compiled_flops(Orpo())


@pytest.mark.parametrize("objective", [Dpo(), Kto(), Kto(loss_kind="apo-zero-unpaired")])
def test_passes_of_the_reference_are_counted(alone, objective):
    flops = MODEL.work(LENGTH).flops_per_token
    estimate = flops(4, objective.forward_passes) / flops(4)
    assert compiled_flops(objective) / alone == pytest.approx(estimate, rel=0.08)
