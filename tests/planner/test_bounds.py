"""No part of an answer is faster than the hardware: matrix units, memory, kernels."""

import math

import pytest

from lmwright.core.contract import seen_keys
from lmwright.hardware.chips import CHIPS
from lmwright.hardware.slices import parse_slice
from lmwright.planner.analytic.machine import machine_of, parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.planner.analytic.step_time import products
from lmwright.planner.compiler.cost import estimate
from lmwright.planner.compiler.hlo import parse
from lmwright.planner.compiler.kernel_cost import (
    PRODUCTS,
    row_attention_cycles,
    row_attention_s,
    splash_s,
)
from lmwright.presets import of_section
from tests.planner.runs import run_of

SLICES = ("v2-8", "v3-8", "v4-16", "v5e-8", "v5p-16", "v6e-8", "7x-8")  # of eight devices
HEADS = (64, 80, 96, 128, 192, 256)


@pytest.mark.parametrize("generation", CHIPS)
def test_no_attention_kernel_is_faster_than_its_products(generation):
    rates = CHIPS[generation].rates
    machine = machine_of(parse_slice(f"{generation}-8"))
    scores = 2.0**30
    for head in HEADS:
        least = {way: n * 2 * head * scores / machine.flops for way, n in PRODUCTS.items()}
        for way in PRODUCTS:
            assert splash_s(rates, generation, head, way, scores) >= 0.9999 * least[way]
        if CHIPS[generation].row_attention:
            # 512 tokens of each block are in the diagonal, which is in what goes by tokens
            for cycles, way in zip(
                row_attention_cycles(generation, head), ("fwd", "bwd"), strict=True
            ):
                assert row_attention_s(rates, cycles, scores, 0) >= 0.9999 * least[way]
                assert row_attention_s(rates, cycles, 0, scores / 512) >= 0.9999 * least[way]


@pytest.mark.parametrize("preset", of_section("model"))
def test_no_preset_is_faster_than_the_chip(preset, tmp_path):
    model = of_section("model")[preset]()
    kind = "diffusion" if model.fills_masks else "mlm"
    masked = (f"objective.kind={kind}",) if model.both_ways else ()
    run = run_of(tmp_path, "data.tokenizer.vocab_size=512", *masked, preset=preset, batch=8)
    for on in SLICES:
        quick = Quick.of(run, parse_machine(on))
        (layout,), kinds = quick.layouts, quick.timing.by_kind
        everywhere = quick.machine.flops * quick.machine.num_devices
        tokens, m = quick.plan.tokens_per_step, run.model
        met = sum(
            products(layout, w) * w.active * w.param.size
            for w in layout.weights
            if w.param.is_matrix
        )
        assert kinds["matmul"] >= 2 * tokens * met / everywhere, on
        if layout.attention is None:
            assert kinds["attention"] == 0 and layout.work.mixing_flops > 0
            continue
        keys = sum(seen_keys(window, layout.seq_len) for window in m.windows)
        scores = (PRODUCTS["fwd"] + PRODUCTS["bwd"]) * 2 * keys * m.num_heads * m.head_dim
        assert kinds["attention"] >= tokens * scores / everywhere, on


ONE = """
%product (a: bf16[512,1024], b: bf16[1024,2048]) -> bf16[512,2048] {
  %a = bf16[512,1024]{1,0:T(8,128)} parameter(0)
  %b = bf16[1024,2048]{1,0:T(8,128)} parameter(1)
  ROOT %conv = bf16[512,2048]{1,0:T(8,128)} convolution(%a, %b), dim_labels=bf_io->bf
}

%sum (c: bf16[512,2048]) -> bf16[512,2048] {
  %c = bf16[512,2048]{1,0:T(8,128)} parameter(0)
  ROOT %d = bf16[512,2048]{1,0:T(8,128)} add(%c, %c)
}

ENTRY %main (x: bf16[512,1024], y: bf16[1024,2048]) -> bf16[512,2048] {
  %x = bf16[512,1024]{1,0:T(8,128)} parameter(0)
  %y = bf16[1024,2048]{1,0:T(8,128)} parameter(1)
  %z = bf16[512,2048]{1,0:T(8,128)} fusion(%x, %y), kind=kOutput, calls=%product, backend_config={"estimated_cycles":"1"}
  ROOT %sum.1 = bf16[512,2048]{1,0:T(8,128)} fusion(%z), kind=kLoop, calls=%sum, backend_config={"estimated_cycles":"1"}
}
"""  # noqa: E501


@pytest.mark.parametrize("generation", CHIPS)
def test_no_compiled_part_is_faster_than_the_chip(generation):
    where = parse_slice(f"{generation}-8")
    peak = where.family.peak.bf16_flops
    found = estimate(parse(ONE), where)
    assert found.by_kind["matmul"] >= 2 * 512 * 1024 * 2048 / peak
    least = 512 * 2048 * 2 / CHIPS[generation].rates.hbm_bytes_per_s
    assert found.by_kind["vector"] == pytest.approx(least)
    # what stays in the vector memory, or is written in place, does not pass through the other
    near = ONE.replace("ROOT %sum.1 = bf16[512,2048]{1,0:T(8,128)}", "ROOT %sum.1 = bf16[512,2048]{1,0:T(8,128)S(1)}")  # fmt: skip # noqa: E501
    assert estimate(parse(near), where).by_kind["vector"] < least / 100
    # a kernel whose cycles nobody knows does not run at the peak either
    kernel = ONE.replace("add(%c, %c)", "negate(%c)").replace(
        'kind=kOutput, calls=%product, backend_config={"estimated_cycles":"1"}',
        'custom_call_target="tpu_custom_call", metadata={op_name="gmm"}',
    ).replace("fusion(%x, %y), custom", "custom-call(%x, %y), custom")  # fmt: skip
    busy = estimate(parse(kernel), where).by_kind["matmul"] * peak
    assert math.isclose(busy, 2 * 512 * 1024 * 2048 / CHIPS[generation].rates.matmul_efficiency)


def test_a_product_of_which_the_compiler_knows_no_cycles():
    """It writes the largest integer; the step then takes what flops or memory take."""
    where = parse_slice("v5e-8")
    rates, peak = CHIPS["v5e"].rates, where.family.peak.bf16_flops
    unknown = ONE.replace('"estimated_cycles":"1"', f'"estimated_cycles":"{2**63 - 1}"', 1)
    by_flops = 2 * 512 * 1024 * 2048 / peak / rates.matmul_efficiency
    assert estimate(parse(unknown), where).by_kind["matmul"] == pytest.approx(by_flops)
    narrow = unknown.replace("1024,2048", "1024,2").replace("512,2048", "512,2")
    moved = 2 * (512 * 1024 + 1024 * 2 + 512 * 2)
    assert estimate(parse(narrow), where).by_kind["matmul"] == pytest.approx(
        moved / rates.hbm_bytes_per_s
    )
    # the buffers of a collective that goes on behind it are handed on, not moved
    aliased = narrow.replace(
        "kind=kOutput", "output_to_operand_aliasing={{}: (0, {})}, kind=kOutput"
    )
    assert estimate(parse(aliased), where).by_kind["matmul"] < moved / rates.hbm_bytes_per_s / 2
