"""The walk over a scheduled program, on programs small enough to reckon by hand."""

import pytest

from podsmith.plan.cost import estimate, group_size
from podsmith.plan.hlo import parse
from podsmith.plan.topology import parse_slice
from podsmith.presets.hardware import RATES, peak_of

PROGRAM = """
HloModule jit_step, is_scheduled=true

%dots (p0: f32[64,128], p1: f32[128,256]) -> f32[64,256] {
  %p0 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %p1 = f32[128,256]{1,0:T(8,128)} parameter(1)
  ROOT %conv = f32[64,256]{1,0:T(8,128)} convolution(%p0, %p1), dim_labels=bf_io->bf
}

%body (arg: (s32[], f32[64,128], f32[128,256])) -> (s32[], f32[64,128], f32[128,256]) {
  %arg = (s32[]{:T(128)}, f32[64,128]{1,0:T(8,128)}, /*index=2*/f32[128,256]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %x = f32[64,128]{1,0:T(8,128)} get-tuple-element(%arg), index=1
  %w = f32[128,256]{1,0:T(8,128)} get-tuple-element(%arg), index=2
  %two = s32[]{:T(128)} constant(2)
  %start = (f32[128,256]{1,0:T(8,128)}, f32[128,256]{1,0:T(8,128)}) collective-permute-start(%w), source_target_pairs={{0,1},{1,0}}
  %product = f32[64,256]{1,0:T(8,128)} fusion(%x, %w), kind=kOutput, calls=%dots, backend_config={"estimated_cycles":"77"}
  %moved = f32[128,256]{1,0:T(8,128)} collective-permute-done(%start)
  %scaled = f32[64,128]{1,0:T(8,128)} fusion(%x), kind=kLoop, calls=%other, backend_config={"estimated_cycles":"5000"}
  %next = s32[]{:T(128)} add(%i, %two)
  ROOT %out = (s32[]{:T(128)}, f32[64,128]{1,0:T(8,128)}, f32[128,256]{1,0:T(8,128)}) tuple(%next, %scaled, %moved)
}

%other (p: f32[64,128]) -> f32[64,128] {
  ROOT %p = f32[64,128]{1,0:T(8,128)} parameter(0)
}

%cond (arg.1: (s32[], f32[64,128], f32[128,256])) -> pred[] {
  %arg.1 = (s32[]{:T(128)}, f32[64,128]{1,0:T(8,128)}, f32[128,256]{1,0:T(8,128)}) parameter(0)
  %limit = s32[]{:T(128)} constant(7)
  %i.1 = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (a: f32[64,128], b: f32[128,256]) -> f32[128,256] {
  %a = f32[64,128]{1,0:T(8,128)} parameter(0)
  %b = f32[128,256]{1,0:T(8,128)} parameter(1)
  %one = s32[]{:T(128)} constant(1)
  %begin = s32[]{:T(128)} copy(%one)
  %kernel = f32[1,1,256,64]{3,2,1,0} custom-call(%q), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 1024}"
}}, metadata={op_name="x"}
  %gathered = f32[128,512]{1,0:T(8,128)} all-gather(%b), replica_groups=[1,2]<=[2], dimensions={1}
  %init = (s32[]{:T(128)}, f32[64,128]{1,0:T(8,128)}, f32[128,256]{1,0:T(8,128)}) tuple(%begin, %a, %b)
  %loop = (s32[]{:T(128)}, f32[64,128]{1,0:T(8,128)}, f32[128,256]{1,0:T(8,128)}) while(%init), condition=%cond, body=%body
  ROOT %result = f32[128,256]{1,0:T(8,128)} get-tuple-element(%loop), index=2
}
"""  # noqa: E501


def test_a_loop_that_counts_from_one_by_two_to_seven_turns_three_times():
    program = parse(PROGRAM)
    main = program.computations["main"]
    assert program.entry == "main"
    assert program.trip_count(main.by_name["loop"], main) == 3
    # the kernel's metadata, three lines of it, hides nothing that follows
    assert main.by_name["gathered"].opcode == "all-gather"


def test_the_clock_by_hand():
    where = parse_slice("v5e:1x2")
    rates, peak = RATES["v5e"], peak_of("TPU v5 lite").bf16_flops
    found = estimate(parse(PROGRAM), where)
    flops = 2 * 64 * 128 * 256
    matmul = flops / (peak * rates.matmul_efficiency)
    vector = 5000 / rates.clock_hz
    permute = 128 * 256 * 4 / rates.link_bytes_per_s
    gather = 128 * 512 * 4 / 2 / rates.link_bytes_per_s  # two chips, one link
    assert found.matmul_flops == 3 * flops
    assert found.by_kind["matmul"] == pytest.approx(3 * matmul)
    assert found.by_kind["vector"] == pytest.approx(3 * vector)
    assert found.hidden_s == pytest.approx(3 * matmul)
    assert found.by_kind["exposed collectives"] == pytest.approx(gather + 3 * (permute - matmul))
    assert found.step_s == pytest.approx(sum(found.by_kind.values()))
    assert found.collectives == {"collective-permute": 3, "all-gather": 1}


@pytest.mark.parametrize(
    "groups, size",
    [
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ("replica_groups=[4,2]<=[8]", 2),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}, x=1", 4),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("channel_id=1", 16),
    ],
)
def test_group_sizes_as_the_compiler_writes_them(groups, size):
    line = f"ENTRY %m (p: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} all-reduce(%p), {groups}\n}}"
    assert group_size(parse(line).computations["m"].instructions[0], 16) == size


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("hello")
