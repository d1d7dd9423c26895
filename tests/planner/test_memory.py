"""Memory against what JAX itself says of the same run: state, and residuals of the backward."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import walk
from lmwright.planner.analytic.layout import Layout, activation_cuts, on_paper
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.memory import memory, saved_bytes, scores_alive
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.compiler.child import shard_bytes
from lmwright.presets import of_section
from lmwright.program.plan import resolve
from lmwright.program.state import abstract_state
from tests.in_memory import abstract_weights
from tests.planner.runs import SMALL, run_of

MESHES = [(), ("mesh.fsdp=4", "mesh.tensor=2"), ("mesh.data=2", "mesh.tensor=2")]
MODELS = of_section("model")
KINDS = ["adamw", "adam8bit", "adafactor", "lion", "muon"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_state_is_what_the_shardings_give_a_device(mesh, kind, tmp_path):
    choice = (f"optim.kind={kind}", "optim.learning_rate=1e-3", "train.ema_decay=0.9")
    run = run_of(tmp_path, *SMALL, *mesh, *choice, batch=16)
    part = abstract_state(resolve(run, jax.devices()))["trained"]["model"]
    found = memory(Layout.of(on_paper(run, parse_machine("v5e-8"))))
    assert found.weights == shard_bytes(part["weights"])
    scalar = 4  # the optimizer's own step
    assert found.optimizer == shard_bytes(part["optimizer"]) + shard_bytes(part["ema"])
    assert scalar <= found.optimizer


def test_a_base_in_four_bits_is_packed(tmp_path):
    run = run_of(tmp_path, *SMALL, "lora.rank=4", "lora.base=int4", batch=16)
    state = abstract_state(resolve(run, jax.devices()[:1]))
    parts = [part["weights"] for part in state["trained"].values()]
    held = shard_bytes([state["frozen"], parts])
    found = memory(Layout.of(on_paper(run, parse_machine("v5e-1")))).weights
    assert found == pytest.approx(held, rel=1e-6)


@pytest.mark.parametrize("remat", ["block", "mlp", "gate", "dots", "none"])
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_saved_activations_are_the_residuals_that_jax_keeps(remat, head, tmp_path):
    overrides = (*SMALL, f"train.remat={remat}", f"model.head={head}")
    run = run_of(tmp_path, *overrides, batch=3)
    machine = replace(parse_machine("v5e:1x1"))
    model, compute = run.model, Compute(precision="bf16", remat=remat, kernels="tpu")
    leaf = lambda dtype: jax.ShapeDtypeStruct((3, 256), dtype)  # noqa: E731
    batch = Batch(leaf(jnp.int32), leaf(jnp.int32), leaf(jnp.int32), leaf(jnp.float32))

    def residuals(w, batch):
        return jax.vjp(lambda w: model.hidden(w, batch, compute)[0], w)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, abstract_weights(model.spec()), batch))
    stacked = [a for a in kept if a.shape[:2] == (model.num_layers, 3)]
    want = sum(math.prod(a.shape) * a.dtype.itemsize for a in stacked)
    got = saved_bytes(Layout.of(on_paper(run, machine))[0])
    # without remat, the norms also keep a number for each token
    assert got == pytest.approx(want, rel=0.01 if remat == "none" else 1e-9)


@pytest.mark.parametrize("kept", ["int12", "int8"])
@pytest.mark.parametrize("remat", ["block", "mlp"])
def test_inputs_in_fewer_bits_are_the_residuals_that_jax_keeps(remat, kept, tmp_path):
    words = (*SMALL, "model.embed_dim=192", f"train.remat={remat}", f"train.block_inputs={kept}")
    run = run_of(tmp_path, *words, batch=3)
    compute = Compute(precision="bf16", remat=remat, block_inputs=kept, kernels="tpu")
    leaf = lambda dtype: jax.ShapeDtypeStruct((3, 256), dtype)  # noqa: E731
    batch = Batch(leaf(jnp.int32), leaf(jnp.int32), leaf(jnp.int32), leaf(jnp.float32))

    def residuals(w, batch):
        return jax.vjp(lambda w: run.model.hidden(w, batch, compute)[0], w)[1]

    tree = jax.eval_shape(residuals, abstract_weights(run.model.spec()), batch)
    stacked = [a for a in jax.tree.leaves(tree) if a.shape[:2] == (run.model.num_layers, 3)]
    want = sum(math.prod(a.shape) * a.dtype.itemsize for a in stacked)
    got = saved_bytes(Layout.of(on_paper(run, parse_machine("v5e:1x1")))[0])
    assert got == pytest.approx(want, rel=1e-9)


def test_pieces_shrink_what_is_saved_and_add_gradients(tmp_path):
    machine = parse_machine("v4-32")
    one, four = (
        memory(Layout.of(on_paper(run_of(tmp_path, f"train.num_microbatches={n}"), machine)))
        for n in (1, 4)
    )
    assert four.saved == one.saved / 4
    assert four.gradients == 2 * one.gradients  # their sum, beside the new ones
    assert four.temporaries < one.temporaries
    assert sum(one.parts().values()) == pytest.approx(one.peak)


def test_scores_are_kept_whole_where_there_is_no_kernel(tmp_path):
    run = run_of(tmp_path, "train.remat=none")
    tpu, gpu = (Layout.of(on_paper(run, parse_machine(m)))[0] for m in ("v5p-16", "gpu:h200x8"))
    plain, early = (replace(gpu, kernels=kernels) for kernels in ("reference", "early gpu"))
    scores = 32 * 16 * 2048 * 2048 * 32 * 4  # layers, rows, queries, keys, heads
    assert saved_bytes(plain) - saved_bytes(tpu) == pytest.approx(scores, rel=0.2)
    assert saved_bytes(gpu) == saved_bytes(early) < 1.1 * saved_bytes(tpu)
    assert scores_alive(gpu) == 0 and scores_alive(replace(gpu, seq_len=2000)) > 0
    assert scores_alive(early) == scores_alive(plain) / 4  # of 512 queries
    assert saved_bytes(plain) > scores


def test_every_axis_counts(tmp_path):
    """Axes that no mesh may have yet are sizes like the others."""
    plan = on_paper(run_of(tmp_path), parse_machine("v4-32"))
    (base,) = Layout.of(plan)
    for axis, pieces in (("context", 4), ("stage", 4), ("expert", 4)):
        cut = replace(base, sizes=dict(base.sizes) | {"fsdp": 4, axis: pieces})
        found = memory([cut])
        assert 0 < found.peak < 4 * memory([base]).peak
        if axis == "stage":
            assert cut.layers == base.layers / 4
        else:
            assert cut.tokens == base.tokens


def test_unrolled_layers_free_what_they_saved(tmp_path):
    """On a GPU the gradients of all layers and what these saved are not there at once, and `none`
    keeps inputs of products; compiled by XLA for an H100 (`benchmarks/plan_gpu.py --shapes`)."""
    gpu = parse_machine("gpu:h100x1")
    words = ("model.seq_len=2048", "model.num_layers=8", "model.vocab_size=49152")
    compiled = {"none": 5.152, "dots": 4.443, "block": 3.173}  # GiB
    for remat, want in compiled.items():
        run = run_of(tmp_path, *words, f"train.remat={remat}", preset="llama-135m", batch=8)
        assert Quick.of(run, gpu).memory.peak == pytest.approx(want * 2**30, rel=0.03)
    wide = run_of(tmp_path, "train.remat=dots", "data.pack.seq_len=256", preset="llama-1b", batch=1)
    found = memory(Layout.of(on_paper(wide, gpu)))  # gradients are the most there
    (layout,) = Layout.of(on_paper(wide, gpu))
    assert found.saved == found.cast == 0.0 and saved_bytes(layout) > 0
    assert found.gradients == 4 * layout.held["trained"]
    deep = run_of(tmp_path, *SMALL, "train.remat=none", "model.num_layers=49", batch=1)
    scanned, dots = (
        memory(Layout.of(on_paper(replace(deep, train=replace(deep.train, remat=name)), gpu)))
        for name in ("none", "dots")
    )
    assert scanned.saved > 1.5 * dots.saved and scanned.cast > 0  # as on TPUs


@pytest.mark.parametrize(
    "on, words, compiled",
    [  # GiB by XLA for an H100, and by the TPU's compiler
        ("gpu:h100x2", ("train.remat=none", "mesh.fsdp=1"), 2.873),
        (
            "v5e-4",
            ("train.remat=mlp", "mesh.fsdp=2", "model.embed_dim=512", "model.num_heads=4",
             "model.num_kv_heads=2", "model.head_dim=128", "train.global_batch_size=32"),
            1.871,
        ),
    ],
)  # fmt: skip
def test_stages_keep_every_tick_and_meet_in_the_loss(on, words, compiled, tmp_path):
    """Microbatches of a pipeline come to the loss together."""
    shape = ("model.seq_len=1024", "model.vocab_size=16384", "model.num_layers=4", "mesh.stage=2")
    words = (*shape, "train.num_microbatches=4", *words)
    run = run_of(tmp_path, *words, preset="llama-135m", batch=16)
    quick = Quick.of(run, parse_machine(on))
    assert quick.memory.peak == pytest.approx(compiled * 2**30, rel=0.02)
    assert quick.layouts[0].ticks == 5


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_outputs_of_every_preset_can_be_cut(make):
    for _, param in walk(make().spec()):
        if param.is_matrix and "layers" in param.batch:
            activation_cuts(("batch", "seq", *param.outputs))
