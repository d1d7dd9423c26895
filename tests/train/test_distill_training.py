"""Where the teacher lies among the frozen weights, and how its weights are kept."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from lmwright.config.run import Data, Run, Train
from lmwright.core.param import walk
from lmwright.models.bitnet import BitNet
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from lmwright.objectives.distill import TEACHER, Distill
from lmwright.optim import KINDS
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.program.lora_section import LowRank
from lmwright.program.plan import resolve
from lmwright.program.qat_section import Qat
from lmwright.program.state import abstract_state, init_state, saved
from lmwright.train.evaluated import eval_weights

MODEL = Llama(
    vocab_size=64, embed_dim=32, mlp_dim=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, seq_len=24, head="untied",
)  # fmt: skip


def plan_of(objective=None, lora=None, **train):
    run = Run(
        name="t", dir="unused", model=MODEL, objective=objective or Distill(), lora=lora,
        qat=Qat(weights="int4"), optim=KINDS["adamw"](learning_rate=1e-2),
        data=Data(dir="unused"),
        train=Train(steps=10, global_batch_size=4, init_from="there", **train),
    )  # fmt: skip
    return resolve(run, jax.devices()[:1])


def test_matrices_are_kept_as_their_products_read_them():
    for precision, dtype in (("bf16", jnp.bfloat16), ("fp32", jnp.float32)):
        state = abstract_state(plan_of(precision=precision))
        kept = dict(walk(state["frozen"][TEACHER]))
        assert kept["layers.up"].dtype == kept["embed"].dtype == dtype
        assert kept["norm"].dtype == jnp.float32
        assert TEACHER not in str(jax.tree.structure(saved(state)))


def test_a_ternary_teacher_keeps_its_codes():
    sizes = {name: getattr(MODEL, name) for name in (
        "vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim",
        "seq_len")}  # fmt: skip
    objective = Distill(teacher="there", teacher_model=BitNet(**sizes))
    kept = dict(walk(abstract_state(plan_of(objective, precision="bf16"))["frozen"][TEACHER]))
    assert (kept["layers.up"].dtype, kept["embed"].dtype) == (jnp.float32, jnp.bfloat16)


def test_the_frozen_base_teaches_adapters_inside_the_rounding():
    """There is no second copy, neither on the devices nor in the plan."""
    lora = LowRank(rank=2, base="fp32")
    plan = plan_of(lora=lora)
    state = init_state(plan)
    assert TEACHER not in state["frozen"]
    bound = eval_weights(plan, state, "default")
    for (_, a), (_, b) in zip(walk(bound[TEACHER]), walk(state["frozen"]), strict=True):
        np.testing.assert_array_equal(a, b)
    machine = parse_machine("v5e-1")
    named = Distill(teacher="there", teacher_model=MODEL)
    shared, apart = (
        Quick.of(plan_of(objective, lora).run, machine) for objective in (Distill(), named)
    )
    assert shared.plan.flops_per_step == apart.plan.flops_per_step
    params = sum(param.size for _, param in walk(MODEL.spec()))
    assert apart.memory.weights - shared.memory.weights >= 2 * params
    alone = Quick.of(replace(shared.run, objective=Clm()), machine)
    assert shared.memory.weights == alone.memory.weights
