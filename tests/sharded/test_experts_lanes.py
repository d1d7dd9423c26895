"""Several adapters of a model with experts in one step have the loss, metrics and gradients that
each has alone on its own rows."""

from dataclasses import replace

import jax
import pytest

from lmwright.errors import UserError
from lmwright.nn import exchange
from lmwright.program.lora_section import Adapter, LowRank
from lmwright.program.qat_section import Qat
from lmwright.program.step import summed_gradients
from tests.sharded.problem import ROWS, assert_same, make_batch, plan_of
from tests.sharded.test_experts import BIASED, GEMMA4, NEXT, OSS, PLACES, SOFTMAX, run_of, stirred

EVEN = (Adapter(name="a", rank=3), Adapter(name="b", rank=5))
UNEVEN = (Adapter(name="a", rank=3, rows=8), Adapter(name="b", rank=5))  # one and three lanes
ALL = LowRank(targets=("all",), base="fp32", adapters=EVEN)
BESIDE = LowRank(targets=("attention",), base="int8", adapters=EVEN)
PLAIN = replace(BIASED.experts, balance_loss=0.0, z_loss=0.0)  # those are of a lane
SUMS = replace(BIASED, experts=PLAIN, reasoning=None)
CASES = [
    (OSS, ALL, {}),
    (SOFTMAX, replace(ALL, base="int4"), {"fsdp": 2, "expert": 2, "tensor": 2}),
    (SUMS, replace(ALL, adapters=UNEVEN), {}),
    (SOFTMAX, BESIDE, {"fsdp": 2, "expert": 4}),
    (SOFTMAX, replace(BESIDE, variant="dora"), {}),
    (OSS, replace(ALL, base="mxfp4"), {"expert": 4}),
    (PLACES, ALL, {"expert": 2}),
    (GEMMA4, BESIDE, {}),
    (NEXT, ALL, {}),
]  # fmt: skip


def results(model, lora, axes, own=None):
    """Gradients of factors none of which is zero, and the loss's sums, of each adapter; `own` says
    which rows of the batch there are."""
    batch = make_batch(1)
    if own is not None:
        batch = jax.tree.map(lambda a: a[:, own], batch)
    run = replace(run_of(model, axes, global_batch_size=batch.tokens.shape[1]), lora=lora)
    plan, key = plan_of(run), jax.random.key(0)
    trainees = plan.training.trainees
    held = jax.tree.map(lambda leaf: leaf.sharding, plan.training.abstract_frozen(plan.mesh))
    with jax.set_mesh(plan.mesh):
        frozen = jax.device_put(jax.jit(plan.training.make_frozen)(key), held)
        w = {}
        for trainee in trainees:
            fresh = jax.jit(plan.training.init, static_argnums=0)(trainee, frozen, key)
            fresh = jax.tree.map(stirred, fresh)
            w[trainee.name] = jax.device_put(fresh, plan.training.shardings(trainee, plan.mesh))
        keys = [key] * len(trainees)
        fn = jax.jit(lambda f, w, b: summed_gradients(plan, trainees, f, w, b, keys))
        grads, losses = jax.device_get(fn(frozen, w, batch))
    return {t.name: (grads[t.name], loss) for t, loss in zip(trainees, losses, strict=True)}


@pytest.mark.parametrize(
    ("model", "lora", "axes", "names"),
    [(*CASES[0], "b"), *(pytest.param(*case, "ab", marks=pytest.mark.slow) for case in CASES)],
)
def test_each_as_if_alone(model, lora, axes, names, monkeypatch):
    monkeypatch.setattr(exchange, "TILE", 8)  # several rounds
    first = set(range(0, ROWS, 4 if lora.adapters is UNEVEN else 2))
    rows = {"a": sorted(first), "b": sorted(set(range(ROWS)) - first)}
    together = results(model, lora, axes)
    for adapter in (each for each in lora.adapters if each.name in names):
        one = replace(lora, adapters=(replace(adapter, rows=None),))
        alone = results(model, one, axes, rows[adapter.name])[adapter.name]
        for _, loss in (together[adapter.name], alone) if lora.adapters is UNEVEN else ():
            for name in ("router_busiest", "router_balance"):  # of a lane
                loss.metrics.pop(name, None)
        assert_same(together[adapter.name], alone)


@pytest.mark.parametrize(
    ("lora", "qat", "says"),
    [
        (replace(ALL, variant="dora"), None, 'lora.variant: "dora" on experts is for one device'),
        (
            replace(ALL, dropout=0.1),
            None,
            "lora.dropout: has no effect with several adapters on experts",
        ),
        (ALL, Qat(group_size=8), "qat: cannot round several adapters with their experts"),
    ],
)
def test_what_several_on_experts_do_not(lora, qat, says):
    plan = plan_of(replace(run_of(SOFTMAX), lora=lora, qat=qat))
    with pytest.raises(UserError, match=says):
        plan.training.refuse(plan.mesh, plan.training.trainees)
    other = replace(plan.run, lora=replace(lora, targets=("attention",)))
    plan_of(other).training.refuse(plan.mesh, plan_of(other).training.trainees)
