"""Block inputs in fewer bits: devices give the gradients of one device, and other settings of
memory, adapters and pieces of the batch go with them."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from lmwright.config.run import Mesh
from lmwright.program.lora_section import LowRank
from lmwright.program.plan import resolve
from lmwright.program.state import init_state
from lmwright.program.step import make_step
from tests.train.test_step import assert_close_to_largest, make_batch, make_run, once


def run_of(lora=None, **train):
    run = make_run(**{"remat": "block", "block_inputs": "int12"} | train)
    return replace(run, model=replace(run.model, embed_dim=64), lora=lora)


@once
def moments(run, devices=1):
    """First moments and loss of the first step."""
    plan = resolve(run, jax.devices()[:devices])
    state, metrics = make_step(plan)(init_state(plan), make_batch(run))
    parts = [part["optimizer"]["mu"] for part in state["trained"].values()]
    return jax.tree.map(np.asarray, (parts, metrics["loss"]))


def alike(run, devices, other, share):
    (ours, loss), (wanted, wanted_loss) = moments(run, devices), moments(other)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    assert_close_to_largest(ours, wanted, share=share)


@pytest.mark.parametrize(
    "axes", [{"fsdp": 8}, {"fsdp": 2, "context": 2, "tensor": 2}, {"stage": 2}]
)
def test_devices_change_little(axes):
    """An integer may be another where a sum is rounded otherwise: one step in 2,047."""
    mesh = Mesh(**{"fsdp": 1} | axes)
    devices = int(np.prod(list(axes.values())))
    alike(replace(run_of(), mesh=mesh), devices, run_of(), share=2e-4)


@pytest.mark.parametrize(
    "train",
    [{"num_microbatches": 2}, {"mlp_chunk_tokens": 8}, {"offload": "block_inputs"}],
    ids=str,
)
def test_other_settings_of_memory_change_nothing(train):
    alike(run_of(**train), 1, run_of(), share=1e-5)


def test_mlps_by_chunks_on_a_mesh():
    run = replace(run_of(mlp_chunk_tokens=8), mesh=Mesh(fsdp=8))
    alike(run, 8, run_of(), share=2e-4)


def test_adapters():
    """Their gradients are near those of exact inputs, on one device and on several."""
    lora = LowRank(rank=2, alpha=4.0, dropout=0.0)
    exact = run_of(lora, block_inputs="exact")
    (found, loss), (wanted, exact_loss) = moments(run_of(lora)), moments(exact)
    assert loss == exact_loss
    a, b = (np.concatenate([x.ravel() for x in jax.tree.leaves(t)]) for t in (found, wanted))
    assert 0 < np.linalg.norm(a - b) < 2e-3 * np.linalg.norm(b)
    alike(replace(run_of(lora), mesh=Mesh(fsdp=8)), 8, run_of(lora), share=2e-4)
