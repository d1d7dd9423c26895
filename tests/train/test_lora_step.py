"""What the compiler makes of a step over a frozen base: no gradient of it, no wide copy of it."""

import re
from dataclasses import replace

import jax
import pytest

from lmwright.config.run import Data, Run, Train
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.program.lora_section import LowRank
from lmwright.program.plan import resolve
from lmwright.program.state import abstract_batch, abstract_state
from lmwright.program.step import make_step

MODEL = Llama(
    vocab_size=1000, embed_dim=48, mlp_dim=72, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=16, seq_len=64,
)  # fmt: skip


def program(lora):
    run = Run(
        name="x", dir="x", model=MODEL, objective=Clm(), data=Data(dir="x"), lora=lora,
        optim=KINDS["adamw"](learning_rate=1e-2),
        train=Train(steps=9, global_batch_size=2, precision="fp32", loss_chunk_tokens=16),
    )  # fmt: skip
    plan = resolve(run, jax.devices()[:1])
    plan = replace(plan, compute=replace(plan.compute, unroll=False))
    with jax.set_mesh(plan.mesh):
        lowered = make_step(plan).lower(abstract_state(plan), abstract_batch(plan))
        return lowered.compile().as_text()


@pytest.mark.parametrize("lora", [None, LowRank(base="int8", targets=("attention",), rank=4)])
def test_a_frozen_base_costs_no_gradients_and_stays_narrow(lora):
    text = program(lora)
    products = set(re.findall(r"= f32\[([\d,]*)\]\S* (?:dot|custom-call)\(", text))
    # gradients of the head, of q and of up are products of these shapes
    assert ({"1000,48", "48,64", "48,72"} <= products) == (lora is None)
    assert not products & {"1000,48", "48,64", "48,72"} or lora is None
    stacked = re.findall(r"(?:f32|bf16)\[3,48,(?:4,16|72)\]", text)  # q and up of all layers
    assert bool(stacked) == (lora is None)
