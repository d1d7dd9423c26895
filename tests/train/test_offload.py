"""What lies on the host, and mlps by chunks: memory changes, numbers do not."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import psutil
import pytest

from lmwright.config.check import check_run
from lmwright.config.run import Mesh
from lmwright.errors import UserError
from lmwright.models.apertus import Apertus
from lmwright.models.deberta import Deberta
from lmwright.models.eurobert import EuroBert
from lmwright.models.experts import Experts
from lmwright.models.falcon_h1 import FalconH1
from lmwright.models.llada import Llada
from lmwright.models.moe import Mixtral
from lmwright.models.phi3 import Phi3
from lmwright.objectives import KINDS as OBJECTIVES
from lmwright.optim import KINDS
from lmwright.planner.analytic.layout import Layout, on_paper
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.memory import layer_bytes
from lmwright.program.plan import Plan, resolve
from lmwright.program.state import abstract_state, init_state
from lmwright.program.step import make_step
from lmwright.train.host_memory import refuse_small_host
from lmwright.train.identity import identity
from tests.aot.slices import run_of
from tests.train.test_step import assert_close, assert_close_to_largest, make_batch, make_run, once


@once
def states(run, devices=1, steps=2):
    """The state and the metrics after some steps."""
    plan = resolve(run, jax.devices()[:devices])
    state, batch = init_state(plan), make_batch(run)
    step = make_step(plan)
    for _ in range(steps):
        state, metrics = step(state, batch)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)}
    return jax.tree.map(np.asarray, (state, metrics)), kinds


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
    "offload, remat",
    [
        pytest.param("block_inputs", "block", marks=pytest.mark.slow),  # as in test_block_inputs
        ("attention", "mlp"),
        ("products", "block"),
    ],
)
def test_the_host_changes_no_bit(offload, remat):
    run = make_run(remat=remat, num_microbatches=2)
    equal(states(run)[0], states(make_run(remat=remat, num_microbatches=2, offload=offload))[0])


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"context": 4}])
@pytest.mark.parametrize("offload", ["block_inputs", "attention", "products"])
def test_the_host_changes_no_bit_on_a_mesh(offload, axes):
    mesh, devices = Mesh(**{"fsdp": 1} | axes), int(np.prod(list(axes.values())))
    run = replace(make_run(remat="block"), mesh=mesh)
    ours = replace(make_run(remat="block", offload=offload), mesh=mesh)
    equal(states(ours, devices)[0], states(run, devices)[0])


@pytest.mark.parametrize(
    "mlp, devices", [pytest.param("swiglu", 1, marks=pytest.mark.slow), ("relu2", 1), ("swiglu", 8)]
)
def test_chunks_of_an_mlp_add_up(mlp, devices):
    """Gradients, as the first moments of the first step have them."""
    runs = [
        make_run({"mlp": mlp, "bias": "all"}, remat="block", mlp_chunk_tokens=chunk)
        for chunk in (None, 8)
    ]
    (whole, metrics), (cut, cut_metrics) = (states(run, devices, steps=1)[0] for run in runs)
    np.testing.assert_allclose(cut_metrics["loss"], metrics["loss"], rtol=1e-6)
    moments = (state["trained"]["model"]["optimizer"]["mu"] for state in (cut, whole))
    assert_close_to_largest(*moments, share=2e-6)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_the_head_s_gradient_is_added_up_once(devices):
    (whole, metrics), (once, once_metrics) = (
        states(make_run(head_gradient=when), devices, steps=1)[0] for when in ("by_chunk", "once")
    )
    np.testing.assert_allclose(once_metrics["loss"], metrics["loss"], rtol=1e-6)
    moments = (state["trained"]["model"]["optimizer"]["mu"] for state in (once, whole))
    assert_close_to_largest(*moments, share=2e-6)


def optimizers(kind):
    """The run with the optimizer on the devices, and with its moments on the host."""
    return [
        replace(make_run(), optim=KINDS[kind](learning_rate=1e-2, offload=offload))
        for offload in ("none", "moments")
    ]


@pytest.mark.slow
def test_moments_on_the_host_change_no_bit():
    (near, _), (far, kinds) = map(states, optimizers("adamw"))
    equal(far, near)
    assert "pinned_host" in kinds


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_moments_of_every_optimizer_on_a_mesh(kind):
    """A layer by itself may be rounded otherwise than in the stack."""
    (near, _), (far, _) = (states(run, 8) for run in optimizers(kind))
    assert_close(far[0]["trained"]["model"]["weights"], near[0]["trained"]["model"]["weights"])


def test_a_step_that_is_skipped_leaves_moments_on_the_host():
    run = replace(make_run(), optim=KINDS["adamw"](learning_rate=1e-2, offload="moments"))
    plan = resolve(run, jax.devices()[:1])
    step, batch = make_step(plan), make_batch(run)
    state, _ = step(init_state(plan), batch)
    before = jax.tree.map(np.asarray, state["trained"]["model"])
    spoiled = replace(batch, loss_weight=batch.loss_weight * np.nan)
    state, metrics = step(state, spoiled)
    assert metrics["skipped"] == 1
    after = jax.tree.map(np.asarray, state["trained"]["model"])
    equal(*({name: part[name] for name in ("weights", "optimizer")} for part in (after, before)))


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"offload": "attention"}, "train.offload: 'attention' has no effect with train.remat"),
        ({"offload": "products", "remat": "mlp"}, "train.remat: 'mlp' has no effect"),
        ({"head_gradient": "once", "loss_chunk_tokens": 24}, "24 tokens, whose loss is one chunk"),
        ({"mlp_chunk_tokens": 8}, "train.mlp_chunk_tokens: has no effect with train.remat"),
        ({"mlp_chunk_tokens": 24, "remat": "block"}, "24 has no effect on rows of 24 tokens"),
        ({"mlp_chunk_tokens": 7, "remat": "block"}, "does not divide the rows of 24 tokens"),
        (
            {"mlp_chunk_tokens": 8, "remat": "block", "offload": "products"},
            "has no effect with train.offload = 'products'",
        ),
        ({"block_inputs": "int8"}, "does not lower the peak with train.remat = 'none'"),
        ({"block_inputs": "int12", "remat": "block"}, "do not divide model.embed_dim = 32"),
    ],
)
def test_settings_without_effect(changes, told):
    with pytest.raises(UserError, match="train") as error:
        check_run(make_run(**changes))
    assert told in str(error.value)


@pytest.mark.parametrize("kind", sorted(OBJECTIVES))
def test_head_gradient_has_an_effect_or_is_refused(kind):
    """The program of the step differs, or the setting is an error; dpo and kto need adapters."""
    labeled = kind in ("classify", "multilabel", "tag")
    objective = OBJECTIVES[kind](**({"labels": ("a", "b")} if labeled else {}))
    runs = [
        replace(make_run(head_gradient=when, loss_chunk_tokens=8), objective=objective)
        for when in ("by_chunk", "once")
    ]
    if objective.both_ways:
        sizes = {"embed_dim": 32, "mlp_dim": 40, "num_layers": 2, "num_heads": 4,
                 "num_kv_heads": 2, "head_dim": 8}  # fmt: skip
        family = Llada if objective.fills_masks else EuroBert
        model = family(vocab_size=64, seq_len=24, **sizes)
        if kind == "mlm":
            objective = replace(objective, mask_ratio=1.0)
        if kind in ("rtd", "answer"):
            model = Deberta(vocab_size=64, seq_len=24, **sizes | {"num_kv_heads": 4})
        runs = [replace(run, model=model, objective=objective) for run in runs]
    if objective.learns_from != "texts" or objective.has_teacher:
        with pytest.raises(UserError, match=f"'once' has no effect on objective.kind = '{kind}'"):
            check_run(runs[1])
        if kind != "orpo":
            return
    else:
        check_run(runs[1])
    programs = []
    for run in runs:
        plan = resolve(run, jax.devices()[:2])
        with jax.set_mesh(plan.mesh):
            lowered = make_step(plan).lower(abstract_state(plan), make_batch(run))
        programs.append(lowered.as_text())
    assert (programs[0] == programs[1]) == (kind == "orpo")


def test_chunks_divide_over_the_mesh():
    run = replace(make_run(remat="block", mlp_chunk_tokens=6), mesh=Mesh(fsdp=1, context=4))
    with pytest.raises(UserError, match="mlp_chunk_tokens"):
        resolve(run, jax.devices()[:4])


class Devices:
    """A plan's devices with a host of their own."""

    platform, device_kind, process_index = "tpu", "TPU v5e", 0

    def __init__(self, *kinds):
        self.kinds = kinds

    def addressable_memories(self):
        return [SimpleNamespace(kind=kind) for kind in self.kinds]


@pytest.mark.parametrize(
    "kinds, free, told",
    [
        (("device",), 2**40, "cannot read the memory of their host; use train.offload=none"),
        (("device", "pinned_host"), 1000, "devices put 0.0 GiB into the memory of this host"),
        (("device", "pinned_host"), 2**40, None),
    ],
)
def test_a_host_without_the_memory_is_refused_before_it_is_pinned(monkeypatch, kinds, free, told):
    plan = resolve(make_run(remat="block", offload="block_inputs"), jax.devices()[:1])
    monkeypatch.setattr(Plan, "devices", [Devices(*kinds)])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    if told is None:
        refuse_small_host(plan)
        return
    with pytest.raises(UserError) as error:
        refuse_small_host(plan)
    assert told in str(error.value)


SIZES = {"vocab_size": 64, "embed_dim": 32, "head_dim": 8, "num_layers": 2, "num_heads": 4,
         "num_kv_heads": 2, "seq_len": 24}  # fmt: skip


def test_chunks_of_experts_alone_are_refused():
    experts = Experts(num_experts=4, experts_per_token=2, mlp_dim=40)
    run = make_run(remat="block", mlp_chunk_tokens=8)
    with pytest.raises(UserError, match="has no effect on a mixtral model"):
        check_run(replace(run, model=Mixtral(**SIZES, experts=experts)))


FALCON = partial(
    FalconH1, mamba_num_heads=8, mamba_head_dim=4, mamba_state_dim=4, mlp_multipliers=(0.9, 0.6),
    bias="mlp",
)  # fmt: skip


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model, share", [(Phi3, 2e-6), (Apertus, 1e-5), (FALCON, 2e-6)])
def test_chunks_of_other_mlps_add_up(model, share, devices):
    """Gate and up in one, as in Phi-3 and Granite 4; slopes, whose gradients are sums of numbers of
    either sign over all tokens and dims."""
    runs = [make_run(remat="block", mlp_chunk_tokens=chunk) for chunk in (None, 8)]
    runs = [replace(run, model=model(**SIZES, mlp_dim=40)) for run in runs]
    (whole, metrics), (cut, cut_metrics) = (states(run, devices, steps=1)[0] for run in runs)
    np.testing.assert_allclose(cut_metrics["loss"], metrics["loss"], rtol=1e-6)
    moments = (state["trained"]["model"]["optimizer"]["mu"] for state in (cut, whole))
    assert_close_to_largest(*moments, share=share)


def test_where_moments_lie_makes_no_other_run():
    near, far = optimizers("adamw")
    assert identity(near) == identity(far)
    far = replace(far, train=replace(far.train, remat="block", offload="products"))
    assert identity(near) == identity(far)


def test_chunks_save_nothing_of_routed_experts(tmp_path):
    run = run_of(tmp_path, "train.remat=block", preset="moe-6m")
    (layout,) = Layout.of(on_paper(run, parse_machine("v5e-8")))
    cut = replace(run, train=replace(run.train, mlp_chunk_tokens=16))
    assert layer_bytes(replace(layout, run=cut)) == layer_bytes(layout)
