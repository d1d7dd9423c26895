"""Adapters over a frozen base on eight devices equal one device, two steps in."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from lmwright.config.run import Data, Mesh, Run, Train
from lmwright.core.contract import Batch
from lmwright.core.param import init_weights
from lmwright.core.sharding import batch_sharding
from lmwright.errors import UserError
from lmwright.models.bitnet import BitNet
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.program.lora_section import Adapter, LowRank
from lmwright.program.plan import resolve
from lmwright.program.qat_section import Qat
from lmwright.program.state import init_state
from lmwright.program.step import make_step, summed_gradients

SIZES = {
    "vocab_size": 64, "embed_dim": 64, "mlp_dim": 96, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 16, "seq_len": 16,
}  # fmt: skip
MODEL = Llama(**SIZES)
ONE = LowRank(base="int4", rank=6, variant="dora")
TWO = LowRank(base="int8", adapters=(Adapter(name="a", rank=3), Adapter(name="b", rank=5, rows=8)))
INSIDE = replace(TWO, base="fp32")
TERNARY = BitNet(**SIZES)


def planned(lora, num_devices, model=MODEL, qat=None, pieces=1, **mesh):
    """The plan of a run, and a batch of it."""
    run = Run(
        name="x", dir="x", model=model, objective=Clm(), data=Data(dir="x"), lora=lora, qat=qat,
        optim=KINDS["adamw"](learning_rate=1e-2, eps=1e-4),
        train=Train(steps=9, global_batch_size=16, num_microbatches=pieces, precision="fp32"),
        mesh=Mesh(**mesh),
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 64, (pieces, 16 // pieces, 16), dtype=np.int32)
    batch = Batch(
        tokens=tokens,
        segment_ids=np.ones_like(tokens),
        positions=np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape),
        loss_weight=np.ones(tokens.shape, np.float32),
    )
    return resolve(run, jax.devices()[:num_devices]), batch


def two_steps(lora, num_devices, **more):
    plan, batch = planned(lora, num_devices, **more)
    with jax.set_mesh(plan.mesh):
        batch = jax.device_put(batch, batch_sharding(plan.mesh, leading=1))
        step, state = make_step(plan), init_state(plan)
        for _ in range(2):
            state, metrics = step(state, batch)
    weights = {name: part["weights"] for name, part in state["trained"].items()}
    return jax.device_get((weights, metrics)), state["frozen"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora, mesh, more",
    [
        (ONE, {"fsdp": 2, "tensor": 2, "stage": 2}, {}),
        (TWO, {"fsdp": 4, "context": 2}, {}),
        (INSIDE, {"fsdp": 4, "context": 2}, {"model": TERNARY}),
        (INSIDE, {"fsdp": 2, "tensor": 2, "context": 2}, {"qat": Qat(group_size=16)}),
    ],
    ids=["one, with stages", "two", "two of a ternary base", "two inside the rounding"],
)
def test_eight_devices_equal_one(lora, mesh, more):
    (weights, metrics), _ = two_steps(lora, 1, **more)
    (sharded, others), base = two_steps(lora, 8, **more, **mesh)
    for name, value in metrics.items():
        np.testing.assert_allclose(others[name], value, rtol=2e-4, atol=1e-5, err_msg=name)
    for one, other in zip(jax.tree.leaves(weights), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_allclose(other, one, atol=2e-4)
    up = base["layers"]["up"]
    up = getattr(up, "values", up)
    assert up.addressable_shards[0].data.size * 8 == up.size


def test_each_microbatch_of_a_pipeline_drops_what_it_drops_without_stages():
    def gradients(num_devices, **mesh):
        plan, batch = planned(
            LowRank(targets=("up",), rank=2, dropout=0.5, base="fp32"),
            num_devices,
            pieces=2,
            **mesh,
        )
        trainees, key = plan.training.trainees, jax.random.key(0)
        with jax.set_mesh(plan.mesh):
            frozen, w = (
                plan.training.make_frozen(key),
                {"default": init_weights(trainees[0].spec, key)},
            )
            fn = jax.jit(lambda w, b: summed_gradients(plan, trainees, frozen, w, b, [key])[0])
            return jax.device_get(fn(w, batch))["default"]["layers"]["up"]["b"]

    alone, staged = gradients(1), gradients(2, stage=2)
    np.testing.assert_allclose(staged, alone, atol=1e-5 * np.abs(alone).max())


def test_several_adapters_and_stages_are_refused():
    with pytest.raises(UserError, match=r"mesh\.stage: several adapters"):
        two_steps(TWO, 8, fsdp=4, stage=2)
