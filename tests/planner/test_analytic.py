"""The analytic time: products as many as JAX traces, the rest by hand on small numbers."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.hardware.chips import CHIPS
from lmwright.planner.analytic.context import context_bytes
from lmwright.planner.analytic.layout import Layout, on_paper
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.analytic.step_time import timing
from lmwright.planner.compiler.kernel_cost import row_attention_cycles
from tests.in_memory import abstract_weights
from tests.planner.runs import SMALL, run_of


def dot_flops(jaxpr, times=1):
    """FLOPs of all matrix products in a jaxpr, loops as often as they turn; kernels left out,
    of branches by platform one."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            inner = math.prod(shape[i] for i in contract)
            total += 2 * times * inner * math.prod(eqn.outvars[0].aval.shape)
        elif eqn.primitive.name == "cond":
            # rotary positions, too, are a small product on one platform alone
            branches = [dot_flops(b.jaxpr, times) for b in eqn.params["branches"]]
            total += max(branches) if min(branches) else 0
        elif eqn.primitive.name not in ("pallas_call", "shard_map"):
            turns = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    total += dot_flops(inner, times * turns)
    return total


@pytest.mark.parametrize("remat", ["none", "dots", "gate", "mlp", "block"])
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_products_are_those_that_jax_traces(remat, head, tmp_path):
    overrides = (*SMALL, f"train.remat={remat}", f"model.head={head}", "train.precision=fp32")
    # sides that fill the tiles: padding is the compiler's, and not in the trace
    overrides += ("model.embed_dim=128", "model.mlp_dim=384")
    run = run_of(tmp_path, *overrides, batch=2)
    compute = Compute(precision="fp32", remat=remat, kernels="tpu", loss_chunk_tokens=128)
    leaf = lambda dtype: jax.ShapeDtypeStruct((2, 256), dtype)  # noqa: E731
    batch = Batch(leaf(jnp.int32), leaf(jnp.int32), leaf(jnp.int32), leaf(jnp.float32))

    def loss(w, batch):
        return run.objective.loss(run.model, w, batch, None, compute).total

    traced = jax.make_jaxpr(jax.grad(loss))(abstract_weights(run.model.spec()), batch)
    machine = parse_machine("v5e:1x1")
    found = timing(Layout.of(on_paper(run, machine)), machine)
    got = found.by_kind["matmul"] * machine.flops * machine.matmul_efficiency
    # the backward pass of the kernel has one small product outside of it
    outside = 2 * 2 * 256 * 6 * 128 * run.model.num_layers
    assert got == pytest.approx(dot_flops(traced.jaxpr), abs=2 * outside)


def test_parts_and_kinds_add_up(tmp_path):
    quick = Quick.of(run_of(tmp_path, "train.remat=mlp"), parse_machine("v4-32"))
    found = quick.timing
    assert found.step_s == pytest.approx(sum(found.by_kind.values()))
    products = found.by_kind["matmul"] + found.by_kind["attention"]
    assert sum(found.by_part.values()) == pytest.approx(products)
    # no step is faster than the model's FLOPs at the peak, and none of ours near it
    assert 0.2 < quick.mfu < 0.8
    assert quick.plan.flops_per_step / 16 / 275e12 == pytest.approx(quick.mfu * quick.step_s)


@pytest.mark.parametrize("on", ["v2-8", "v3-8", "v4-8", "v5e-8", "v5p-8", "v6e-8", "7x-8"])
def test_every_generation_has_an_attention_kernel(on, tmp_path):
    """The one of whole rows, twice forward and once backward, but for v2 and v3, which have no
    bfloat16 there; longer rows and other devices take another."""
    changes = "train.remat=block", "train.global_batch_size=16", "data.pack.seq_len=2048"
    run = run_of(tmp_path, *changes, preset="llama-1b")
    machine, heads = parse_machine(on), 16 * run.model.num_heads * run.model.num_layers
    found = Quick.of(run, machine)
    assert found.layouts[0].has_whole_rows == (on[:2] not in ("v2", "v3"))
    assert 0 < found.timing.by_kind["attention"] < found.step_s
    if found.layouts[0].has_whole_rows:
        forward, backward = row_attention_cycles(machine.kind, run.model.head_dim)
        each = [6 * 512**2 * scores + 2048 * token for scores, token in (forward, backward)]
        rates = CHIPS[machine.kind].rates
        rate = rates.clock_hz * rates.cores * rates.kernel_share * machine.num_devices
        cycles = heads * (2 * each[0] + each[1])
        assert found.timing.by_kind["attention"] == pytest.approx(cycles / rate)


def test_one_device_has_no_collectives_and_more_have(tmp_path):
    alone = Quick.of(run_of(tmp_path, preset="llama-135m"), parse_machine("v5e:1x1")).timing
    assert set(alone.by_kind) == {"matmul", "attention", "vector"} and alone.hidden_s == 0
    eight = Quick.of(run_of(tmp_path, preset="llama-135m"), parse_machine("v5e-8")).timing
    assert eight.by_kind["exposed collectives"] > 0
    assert eight.by_kind["matmul"] == pytest.approx(alone.by_kind["matmul"] / 8)


def test_gathers_and_gradients_by_hand(tmp_path):
    """One layer's worth on two chips with one link: bytes over rate."""
    from lmwright.planner.analytic import step_time as a

    run = run_of(tmp_path, *SMALL, batch=2)
    machine = parse_machine("v5e:1x2")
    found = timing(Layout.of(on_paper(run, machine)), machine)
    matrices = run.model.num_layers * (96 * 128 * (6 + 2 + 2 + 6) + 3 * 96 * 320) + 512 * 96
    norms = run.model.num_layers * 2 * 96 + 96
    gathered = 2 * 2 * matrices / 2 / machine.link_bytes_per_s
    # each chip receives its half of the matrices' gradients, and all of the norms' there and back
    reduced = (4 * matrices / 2 + 4 * 2 * norms / 2) / machine.link_bytes_per_s
    exposed = a.GATHERS_EXPOSED * gathered + a.REDUCTIONS_EXPOSED * reduced
    assert found.by_kind["exposed collectives"] == pytest.approx(exposed)
    assert found.hidden_s == pytest.approx(gathered + reduced - exposed)


def test_every_axis_costs_what_it_should(tmp_path):
    machine = parse_machine("v5p-128")  # 4 x 4 x 4
    (base,) = Layout.of(on_paper(run_of(tmp_path), machine))

    def cut(**sizes):
        return timing([replace(base, sizes=dict(base.sizes) | {"fsdp": 64} | sizes)], machine)

    whole = cut()
    tensor, context, stage = cut(fsdp=16, tensor=4), cut(fsdp=16, context=4), cut(fsdp=16, stage=4)
    for other in (tensor, context, stage):  # the same work over the same devices
        ratio = other.by_kind["matmul"] / whole.by_kind["matmul"]
        assert ratio == pytest.approx(4 if other is stage else 1, rel=0.2) or other is stage
    assert tensor.by_kind["exposed collectives"] > whole.by_kind["exposed collectives"]
    assert context.by_kind["exposed collectives"] > whole.by_kind["exposed collectives"]
    busy = sum(stage.by_kind[kind] for kind in ("matmul", "attention", "vector"))
    assert stage.by_kind["idle"] == pytest.approx(3 * busy)  # one microbatch, four stages


def test_slices_talk_over_the_network(tmp_path):
    run = run_of(tmp_path, "mesh.data=2")
    one = Quick.of(run_of(tmp_path), parse_machine("v5e-16")).timing
    two = Quick.of(run, parse_machine("2xv5e-16")).timing
    assert two.by_kind["network"] > 0 and "network" not in one.by_kind
    assert two.by_kind["matmul"] == pytest.approx(one.by_kind["matmul"] / 2)


def test_bytes_that_attention_exchanges_over_context_by_hand(tmp_path):
    """Four devices, 8 query and 2 kv heads, rows of 256, bf16; two layers, of which one may have
    a window of 17 and gets the 16 tokens before its own."""
    machine = parse_machine("v5p:2x2x1")
    ring = (*SMALL, "mesh.fsdp=1", "mesh.context=4", "train.remat=block")
    ring += ("model.num_layers=2", "model.num_heads=8")

    def of(*changes):
        """Bytes of a token of a device, by the size of a head."""
        (layout,) = Layout.of(on_paper(run_of(tmp_path, *ring, *changes, batch=1), machine))
        assert layout.tokens == 64
        return context_bytes(layout) / (64 * layout.attention.head_dim)

    kv = 2 * 2 * (2 + 2 + 4)  # keys and values twice, and their float32 gradients
    order = 2 * (8 + 2 + 2 + 8) * 2 * 3 / 4
    assert of() == pytest.approx(2 * (3 * kv + order))
    windows = ("model.window=17", 'model.layer_pattern=["local", "global"]')
    stretch = 2 * 2 * (2 + 2 + 2)  # their gradients as they are
    assert of(*windows) == pytest.approx(3 * kv + order + stretch * 16 / 64)
    # each of two kv heads goes to two devices
    traded = 2 * (8 + 2 * 4 + 8) + (8 + 2 * 4)
    assert of("train.context_attention=all_to_all") == pytest.approx(2 * traded * 2 * 3 / 4)


def test_a_reference_takes_its_time(tmp_path):
    """The compiler's program of this step takes 1.215 times as long with a reference:
    lmwright plan llama-360m --on v5e-8 lora.rank=8 train.global_batch_size=64 objective.kind=dpo"""
    seconds = {}
    for kind in ("orpo", "dpo"):
        changes = "lora.rank=8", f"objective.kind={kind}", "data.pack.seq_len=2048"
        run = run_of(tmp_path, *changes, preset="llama-360m", batch=64)
        seconds[kind] = Quick.of(run, parse_machine("v5e-8")).step_s
    assert seconds["dpo"] / seconds["orpo"] == pytest.approx(1.215, rel=0.05)
