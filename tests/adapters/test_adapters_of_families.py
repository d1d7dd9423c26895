"""Adapters on every family: the step is traced, over int8, for one adapter and for two."""

from functools import partial

import jax
import pytest

from lmwright.config.run import Data, Pack, Run, Train
from lmwright.core.param import walk
from lmwright.formats.hf_read import model_from_config
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.program.lora_section import Adapter, LowRank
from lmwright.program.plan import resolve
from lmwright.program.state import abstract_batch, abstract_state
from lmwright.program.step import train_step
from tests.parity.families import ROWS

TWO = (Adapter(name="a", rank=2), Adapter(name="b", rank=3))


@pytest.mark.parametrize(
    "name",
    [n if n in ("phi3", "qwen3-5") else pytest.param(n, marks=pytest.mark.slow) for n in ROWS],
)
def test_every_matrix_of_the_layers_takes_an_adapter(name):
    row = ROWS[name]
    model = model_from_config(row.said | {"architectures": [row.architecture]}, name)
    experts = any("experts" in param.axes for _, param in walk(model.spec()))
    for adapters in ((),) if experts else ((), TWO):
        run = Run(
            name="x", dir="x", model=model, objective=Clm(),
            optim=KINDS["adamw"](learning_rate=1e-2),
            data=Data(dir="x", pack=Pack(seq_len=16)),
            # those that PEFT refuses are not in "all"
            lora=LowRank(base="int8", rank=3, adapters=adapters,
                         targets=("all", *model.hf.peft_refuses)),
            train=Train(steps=9, global_batch_size=4, precision="bf16"),
        )  # fmt: skip
        plan = resolve(run, jax.devices()[:1])
        active = plan.training.trainees
        found = {module.path for module in active[0].modules}
        matrices = {p for p, w in walk(model.spec()) if w.is_matrix and "layers" in w.batch}
        assert {p for p in matrices - found if not p.endswith("router")} == set()
        step = partial(train_step, plan, active)
        with jax.set_mesh(plan.mesh):
            state = abstract_state(plan)
            new, metrics = jax.eval_shape(step, state, abstract_batch(plan))
        assert metrics["loss"].shape == ()
        for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
