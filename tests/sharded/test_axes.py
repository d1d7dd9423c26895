"""Every mesh gives the single device's loss and gradients."""

import itertools

import jax
import numpy as np
import pytest

from lmwright.core.sharding import AXES
from lmwright.program.state import abstract_batch, abstract_state, init_state
from lmwright.program.step import make_step
from tests.sharded.problem import (
    ROWS,
    SEQ_LEN,
    alone,
    assert_same,
    gradients,
    make_batch,
    make_run,
    model_gradients,
    plan_of,
)

FOUR = {"num_layers": 4}  # as many as stages


@pytest.mark.parametrize("axis", ["data", "expert", "context", "tensor"])
def test_an_axis_alone(axis):
    assert_same(gradients(make_run({axis: 8}, num_microbatches=2)), alone())


def test_a_pipeline_alone():
    assert_same(gradients(make_run({"stage": 4}, FOUR, num_microbatches=8)), alone(**FOUR))


PRODUCTS = [
    ({"expert": 2, "context": 2, "tensor": 2}, {"num_microbatches": 2, "remat": "dots"}),
    ({"data": 2, "context": 4}, {"context_attention": "all_to_all", "remat": "block"}),
    ({"stage": 2, "context": 2, "data": 2}, {"num_microbatches": 4, "remat": "block"}),
]
MORE_PRODUCTS = [
    (
        {"fsdp": 2, "context": 2, "tensor": 2},
        {"context_attention": "all_to_all", "num_microbatches": 2, "remat": "block"},
    ),
    ({"context": 3}, {"loss_chunk_tokens": 11}),  # chunks that do not divide
    ({"stage": 2, "fsdp": 2, "tensor": 2}, {"num_microbatches": 2, "remat": "dots"}),
]


@pytest.mark.parametrize(
    ("axes", "train"),
    [*PRODUCTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_PRODUCTS)],
)
def test_products(axes, train):
    assert_same(gradients(make_run(axes, **train)), alone())


def test_fewer_kv_heads_than_devices_that_trade_them():
    model = {"num_kv_heads": 2}
    run = make_run({"context": 8}, model, context_attention="all_to_all", remat="block")
    assert_same(gradients(run), alone(**model))


@pytest.mark.slow
def test_a_tied_head():
    axes = {"context": 2, "tensor": 2}
    assert_same(gradients(make_run(axes, {"head": "tied"})), alone(head="tied"))


def factorizations(total):
    """All ways to write `total` devices as a product over the axes."""
    sizes = [d for d in range(1, total + 1) if total % d == 0]
    for picked in itertools.product(sizes, repeat=len(AXES)):
        if np.prod(picked) == total:
            yield dict(zip(AXES, picked, strict=True))


EIGHT = [axes for axes in factorizations(8) if axes["stage"] < 8]  # for four layers


def name_of(axes):
    return "-".join(f"{axis}{size}" for axis, size in axes.items() if size > 1)


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("axes", EIGHT, ids=name_of)
def test_every_mesh_of_eight(axes, num_microbatches):
    run = make_run(axes, FOUR, num_microbatches=num_microbatches)
    assert_same(gradients(run), alone(**FOUR))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [axes for axes in EIGHT if axes["context"] > 1], ids=name_of)
def test_every_mesh_of_eight_with_all_to_all(axes):
    run = make_run(axes, FOUR, num_microbatches=2, context_attention="all_to_all")
    assert_same(gradients(run), alone(**FOUR))


@pytest.mark.parametrize(
    "axes",
    [
        {"expert": 2, "context": 2, "tensor": 2},
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_whole_step_and_where_its_state_lies(axes):
    def step(run):
        plan = plan_of(run)
        with jax.set_mesh(plan.mesh):
            return make_step(plan)(init_state(plan), make_batch(run.train.num_microbatches))

    state, metrics = step(make_run(axes, num_microbatches=2, remat="dots"))
    want, want_metrics = step(make_run())
    for name, value in want_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    part, want = state["trained"]["model"], want["trained"]["model"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        jax.tree.map(np.asarray, part["weights"]), jax.tree.map(np.asarray, want["weights"]),
    )  # fmt: skip
    up = part["weights"]["layers"]["up"]
    cut = np.prod([axes.get(a, 1) for a in ("fsdp", "expert", "context")])
    shard = (2, 24 // cut, 40 // axes["tensor"])
    moments = [a for a in jax.tree.leaves(part["optimizer"]) if a.shape == up.shape]
    assert len(moments) == 2 * 2, "two moments each of up and gate"
    for leaf in [up, *moments]:
        assert {piece.data.shape for piece in leaf.addressable_shards} == {shard}


def test_the_residual_stream_is_cut_along_tokens():
    run = make_run({"tensor": 2})
    plan = plan_of(run)
    with jax.set_mesh(plan.mesh):
        fn = jax.jit(lambda w, b: model_gradients(plan, w, b))
        weights = abstract_state(plan)["trained"]["model"]["weights"]
        text = fn.lower(weights, abstract_batch(plan)).compile().as_text()
    layers, embed = run.model.num_layers, run.model.embed_dim
    assert f"f32[{layers},{ROWS},{SEQ_LEN // 2},{embed}]" in text, "what the layers keep of it"
    assert f"f32[{layers},{ROWS},{SEQ_LEN},{embed}]" not in text
