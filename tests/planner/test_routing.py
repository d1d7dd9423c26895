"""Experts in the analytic model: what JAX traces, what the compiler said, small numbers by hand."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from lmwright.nn import exchange
from lmwright.nn.moe import Dispatch, mixture
from lmwright.planner.analytic import experts
from lmwright.planner.analytic.candidates import meshes_of
from lmwright.planner.analytic.layout import Layout, on_paper
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.memory import saved_results
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.analytic.step_time import is_all_reduced
from tests.planner.runs import SMALL, run_of

OLMOE = "model.num_layers=4", "train.remat=block"
ROUNDS = "mesh.expert=8", "mesh.fsdp=1"


def layout_of(folder, on, *overrides, preset="olmoe-1b-7b", batch=16):
    """The layout of a run on a machine."""
    (layout,) = Layout.of(on_paper(run_of(folder, *overrides, preset=preset, batch=batch), on))
    return layout


def gathers(jaxpr, shape):
    """Number of gathers in a jaxpr, and in what it calls, that give as many elements as `shape`."""
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            continue
        if eqn.primitive.name == "gather":
            count += math.prod(eqn.outvars[0].aval.shape) == math.prod(shape)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                count += gathers(inner, shape) if hasattr(inner, "eqns") else 0
    return count


@pytest.mark.parametrize("remat", ["none", "block"])
def test_rows_are_moved_as_often_as_jax_gathers_them(remat, tmp_path):
    tokens, width, each, num = 32, 24, 2, 4
    shapes = {"up": (num, width, 40), "gate": (num, width, 40), "down": (num, 40, width)}
    array = jax.ShapeDtypeStruct
    w = {name: array(shape, jnp.float32) for name, shape in shapes.items()}
    x, ids = array((1, tokens, width), jnp.float32), jnp.zeros((1, tokens, each), jnp.int32)
    shares, real = array((1, tokens, each), jnp.float32), jnp.ones((1, tokens), bool)

    def output(x, shares, w):
        return mixture(x, ids, shares, real, w, Dispatch(num))[0]

    def loss(*args):
        whole = output if remat == "none" else jax.checkpoint(output)
        return jnp.sum(whole(*args) ** 2)

    traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, shares, w)
    machine = parse_machine("v5e:1x1")
    layout = layout_of(tmp_path, machine, f"train.remat={remat}", "model.num_layers=4", batch=1)
    (mix,) = experts.mixtures(layout)
    moved = [one for _, one in experts.passes(mix) if one.moves]
    assert len(moved) == gathers(traced.jaxpr, (tokens * each, width))


@pytest.mark.parametrize(
    "on, overrides, batch, compiled_s",
    [
        ("v5e-8", (), 16, 0.0470),
        ("v5e-8", ROUNDS, 16, 0.1414),
        ("v6e-8", (), 16, 0.0277),
    ],
)
def test_passes_over_rows_take_what_the_compiler_says(on, overrides, batch, compiled_s, tmp_path):
    """Vector and memory instructions of the experts in the TPU compiler's programs, by its cycles
    (`planner/compiler/cost.py`)."""
    run = run_of(tmp_path, *OLMOE, *overrides, preset="olmoe-1b-7b", batch=batch)
    took = Quick.of(run, parse_machine(on)).timing
    assert took.by_kind["routing"] == pytest.approx(compiled_s, rel=0.1)


@pytest.mark.parametrize(
    "on, batch, overrides, compiled_s",
    [
        ("v5e-8", 16, ROUNDS, (0.3429, 0.4499)),
        ("v6e-8", 16, ROUNDS, (0.1552, 0.1997)),
        ("v4-32", 32, ("mesh.expert=4", "mesh.fsdp=4"), (0.3134, 0.3584)),
    ],
)
def test_meshes_rank_as_the_compiler_has_them(on, batch, overrides, compiled_s, tmp_path):
    """All devices along `fsdp`, and some of them or all along `expert`."""
    runs = (
        run_of(tmp_path, *OLMOE, *words, preset="olmoe-1b-7b", batch=batch)
        for words in ((), overrides)
    )
    found = [Quick.of(run, parse_machine(on)).step_s for run in runs]
    assert found == pytest.approx(compiled_s, rel=0.1) and found == sorted(found)


def test_rows_that_travel_by_hand(tmp_path):
    machine = parse_machine("v5e-8")  # 2 x 4, no rings: four chips send through two links
    layout = layout_of(tmp_path, machine, *OLMOE, *ROUNDS)
    rows = 2 * 4096 * 8 * 2048 * 2  # two rows of tokens, eight experts each, bfloat16
    way = 4 * rows / 45e9  # half of 8 x rows x 1/2 over two links, in four layers
    whole, hidden = experts.exchange_s(layout, machine)
    assert whole == pytest.approx(5 * way)
    assert 0 < hidden <= way  # half of two of the five ways at most
    three = layout_of(tmp_path, machine, *OLMOE, "mesh.expert=2", "mesh.fsdp=4")
    assert experts.exchange_s(three, machine)[0] == pytest.approx(5 * way / 2)
    alone = layout_of(tmp_path, machine, *OLMOE)
    assert experts.exchange_s(alone, machine) == (0.0, 0.0)


def test_rounds_are_those_of_the_exchange(tmp_path):
    tokens, k, num, ways = 8192, 8, 64, 8
    zeros = partial(jnp.zeros, dtype=jnp.int32)
    each = zeros((tokens, k))
    here = exchange.Here(zeros(tokens * k), each, zeros(num), each == 0)
    way = exchange.Way(here, zeros(ways), zeros((ways, num // ways)), zeros(ways))
    (mix,) = experts.mixtures(layout_of(tmp_path, parse_machine("v5e-8"), *OLMOE, *ROUNDS))
    assert (mix.choices, mix.slots) == (tokens * k, way.slots)
    assert mix.rounds == 3 and mix.places == 3 * ways * way.slots / (tokens * k) == 1.5


def test_experts_have_no_copies_over_their_axis(tmp_path):
    """Their gradients are not added up over `expert`, and a width that fills the tiles is not
    padded, whatever it is cut by."""
    machine = parse_machine("v5e:1x2")
    layout = layout_of(tmp_path, machine, *OLMOE, "mesh.expert=2", "mesh.fsdp=1")
    for w in layout.weights:
        assert layout.copies(w) == (1 if w.is_expert or layout.gathered_ways(w) == 2 else 2)
    alone = layout_of(tmp_path, parse_machine("v5e:1x1"), *OLMOE, batch=8)
    for w, whole in zip(layout.weights, alone.weights, strict=True):
        if w.is_expert and w.param.inputs == ("embed",):  # the last one is not needed in rounds
            times = [experts.product_s(a, b, machine) for a, b in ((layout, w), (alone, whole))]
            assert times[0] == pytest.approx(times[1])


def test_sums_of_gradients_go_around_a_ring_where_there_is_one():
    """As the compiler made them: a ring through all chips of a plane, none through a cuboid."""
    made = {("v4-32", 16): True, ("v5p-16", 8): True, ("v4-32", 4): False, ("v5e-8", 8): False}
    for (on, ways), whole in made.items():
        assert is_all_reduced(parse_machine(on), ways) == whole
    assert not is_all_reduced(parse_machine("gpu:h100x8"), 8)


def test_empty_slots_are_computed_as_well(tmp_path):
    machine, words = parse_machine("v5e-8"), ("model.experts.capacity_factor=1.25", *OLMOE)
    layout, plain = (layout_of(tmp_path, machine, *w) for w in (words, OLMOE))
    down = next(w for w in layout.weights if w.is_expert)
    assert layout.slots(down) == 640 * 64 / (4096 * 8)  # 1.25 x 4096 x 8 / 64 for each expert
    once, others = (
        experts.product_s(each, down, machine) / experts.products(each, down)
        for each in (layout, plain)
    )
    assert once / others == pytest.approx(1.25)


def test_results_of_experts_are_kept_where_products_are(tmp_path):
    """The gradients of the routing weights need those of slots alone."""
    machine = parse_machine("v5e-8")
    words = "model.num_layers=4", "train.remat=dots"
    slots = "model.experts.capacity_factor=1.25"
    for overrides, kept in ((words, False), ((*words, *ROUNDS), False), ((*words, slots), True)):
        layout = layout_of(tmp_path, machine, *overrides)
        sizes = {result.name: result.bytes for result in saved_results(layout)}
        (mix,) = experts.mixtures(layout)
        assert (mix.down.path in sizes) == kept
        if kept:
            assert sizes[mix.down.path] == mix.choices * 2048 * 2


@pytest.mark.parametrize(
    "words, batch, compiled_gib",
    [
        ("train.remat=none", 8, 9.35),
        ("train.remat=dots", 16, 7.89),
        ("train.remat=block", 16, 6.65),
        ("train.remat=block mesh.expert=8 mesh.fsdp=1", 16, 5.88),
    ],
)
def test_memory_is_what_the_compiler_says(words, batch, compiled_gib, tmp_path):
    """Results of experts count."""
    run = run_of(tmp_path, OLMOE[0], *words.split(), preset="olmoe-1b-7b", batch=batch)
    found = Quick.of(run, parse_machine("v5e-8"))
    assert found.memory.peak / 2**30 == pytest.approx(compiled_gib, rel=0.07)


@pytest.mark.parametrize("capacity", [None, 1.25])
def test_only_with_a_capacity_are_gathered_weights_kept(capacity, tmp_path):
    changes = [] if capacity is None else [f"model.experts.capacity_factor={capacity}"]
    words = OLMOE[0], "train.remat=none", *changes
    layout = layout_of(tmp_path, parse_machine("v5e-8"), *words, batch=8)
    gathered = [result for result in saved_results(layout) if result.name.endswith("gathered")]
    whole = 3 * 64 * 2048 * 1024 * 2 if capacity else 0  # of a layer, in bfloat16
    assert sum(result.bytes for result in gathered) == whole


def test_only_experts_are_cut_over_expert(tmp_path):
    machine = parse_machine("v5e-8")
    dense = run_of(tmp_path, *SMALL, batch=16)
    assert {mesh.expert for mesh in meshes_of(dense, machine)} == {1}
    sparse = run_of(tmp_path, *OLMOE, preset="olmoe-1b-7b", batch=16)
    found = [mesh for mesh in meshes_of(sparse, machine) if mesh.tensor == mesh.context == 1]
    assert {mesh.expert for mesh in found} == {1, 2, 4, 8}
    assert all(mesh.data * mesh.fsdp * mesh.expert == 8 for mesh in found)
