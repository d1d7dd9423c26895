"""An objective may hold two models: state, step, FLOPs and plan follow its spec."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from lmwright.config.run import Data, Run, Train
from lmwright.core.contract import Loss, Objective
from lmwright.core.param import count_params
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.program.plan import resolve
from lmwright.program.state import init_state
from lmwright.program.step import make_step
from lmwright.train.evaluated import eval_weights

LARGE = Llama(
    vocab_size=64, embed_dim=32, mlp_dim=40, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=8, seq_len=24, head="untied",
)  # fmt: skip
SMALL = replace(LARGE, embed_dim=16, mlp_dim=24, num_layers=2, head="tied")


@dataclass(frozen=True, kw_only=True)
class Pair(Objective):
    """The run's model and another, side by side on the same rows."""

    other: Llama
    kind: str = "pair"

    def _models(self, model):
        return {"large": model, "small": self.other}

    def spec(self, model):
        return {name: m.spec() for name, m in self._models(model).items()}

    def works(self, model, seq_len):
        return {name: m.work(seq_len) for name, m in self._models(model).items()}

    def exported(self, model, w):
        return model, w["large"]

    def loss(self, model, w, batch, key, compute):
        each = [
            Clm().loss(m, w[name], batch, key, compute) for name, m in self._models(model).items()
        ]
        return Loss(sum(one.total for one in each), each[0].weight, each[0].metrics)


def run_of(model, objective):
    return Run(
        name="t", dir="unused", model=model, objective=objective,
        optim=KINDS["adamw"](learning_rate=1e-2, clip_norm=None), data=Data(dir="unused"),
        train=Train(steps=10, global_batch_size=4, precision="fp32", ema_decay=0.9),
    )  # fmt: skip


def runs_of(large, small):
    """The run of both models, and that of each."""
    alone = {"large": run_of(large, Clm()), "small": run_of(small, Clm())}
    return run_of(large, Pair(other=small)), alone


PAIR, ALONE = runs_of(LARGE, SMALL)


def batch_of(run):
    from lmwright.core.contract import Batch

    tokens = np.random.default_rng(0).integers(0, 64, (1, 4, 24)).astype(np.int32)
    here = np.broadcast_to(np.arange(24, dtype=np.int32), tokens.shape)
    return Batch(tokens, np.ones_like(tokens), here, np.ones(tokens.shape, np.float32))


def test_each_trains_as_it_does_alone():
    """Two optimizer steps from the same weights; nothing ties the two models."""
    # few layers, which are unrolled and compiled one by one
    pair, each = runs_of(replace(LARGE, num_layers=2), replace(SMALL, num_layers=1))
    plan = resolve(pair, jax.devices()[:1])
    state = init_state(plan)
    start = jax.tree.map(np.asarray, state["trained"]["model"]["weights"])
    step = make_step(plan)
    for _ in range(2):
        state, metrics = step(state, batch_of(pair))
    for name, run in each.items():
        alone = resolve(run, jax.devices()[:1])
        own = init_state(alone)
        part = own["trained"]["model"]
        part["weights"] = jax.tree.map(jax.numpy.array, start[name])
        part["ema"] = jax.tree.map(jax.numpy.array, start[name])
        one_step = make_step(alone)
        for _ in range(2):
            own, _ = one_step(own, batch_of(run))
        for tree in ("weights", "ema"):
            got = state["trained"]["model"][tree][name]
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
                got,
                own["trained"]["model"][tree],
            )
    assert metrics["loss"] > 0


def test_evaluation_and_export_see_the_one_that_the_objective_names():
    plan = resolve(PAIR, jax.devices()[:1])
    weights = eval_weights(plan, init_state(plan), "model")
    model, w = PAIR.objective.exported(PAIR.model, weights)
    assert model == LARGE and w is weights["large"]


def test_flops_memory_and_time_are_those_of_both():
    plans = {name: resolve(run, jax.devices()[:1]) for name, run in ALONE.items()}
    both = resolve(PAIR, jax.devices()[:1])
    assert both.num_params == sum(count_params(m.spec()) for m in (LARGE, SMALL))
    assert both.flops_per_step == pytest.approx(sum(p.flops_per_step for p in plans.values()))
    machine = parse_machine("v5e-1")
    pair, *each = (Quick.of(run, machine) for run in (PAIR, *ALONE.values()))
    for part in ("weights", "optimizer", "saved"):
        total = sum(getattr(q.memory, part) for q in each)
        assert getattr(pair.memory, part) == pytest.approx(total, abs=8)  # a count of steps
    for kind in ("matmul", "attention", "vector"):
        assert pair.timing.by_kind[kind] == pytest.approx(sum(q.timing.by_kind[kind] for q in each))
