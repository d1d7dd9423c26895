"""The walk over a scheduled program, on programs small enough to reckon by hand."""

import pytest

from lmwright.hardware.chips import CHIPS, LONG_ROWS
from lmwright.hardware.devices import peak_of
from lmwright.hardware.slices import parse_slice
from lmwright.planner.compiler.cost import IN_ONE_PIECE, estimate
from lmwright.planner.compiler.hlo import parse
from lmwright.planner.compiler.kernel_cost import row_attention_cycles, visited
from lmwright.planner.compiler.links import group_size

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


def test_a_loop_of_rounds_says_how_often_it_turns():
    """The number of rounds in which experts exchange rows depends on the data."""
    scope = ', metadata={op_name="jit(step)/shard_map/rounds_4_62/while"}'
    text = PROGRAM.replace("condition=%cond, body=%body", f"condition=%cond, body=%body{scope}")
    text = text.replace("constant(7)", "parameter(1)")
    main = parse(text).computations["main"]
    assert parse(text).trip_count(main.by_name["loop"], main) == 4


def test_the_clock_by_hand():
    where = parse_slice("v5e:1x2")
    rates, peak = CHIPS["v5e"].rates, peak_of("TPU v5 lite").bf16_flops
    found = estimate(parse(PROGRAM), where)
    flops = 2 * 64 * 128 * 256
    assert 77 / rates.clock_hz > flops / peak  # the compiler expects less than the peak
    matmul = max(77 / rates.clock_hz / rates.cycles_share, flops / peak)
    vector = 5000 / rates.clock_hz / rates.cycles_share
    permute = 128 * 256 * 4 / rates.link_bytes_per_s
    gather = 128 * 512 * 4 / 2 / rates.link_bytes_per_s  # two chips, one link
    assert found.matmul_flops == 3 * flops
    assert found.by_kind["matmul"] == pytest.approx(3 * matmul)
    assert found.by_kind["vector"] == pytest.approx(3 * vector)
    # nothing needs what is gathered before the end: it could be hidden behind the loop
    exposed = IN_ONE_PIECE * gather
    assert found.hidden_s == pytest.approx(3 * matmul + gather - exposed)
    assert found.by_kind["exposed collectives"] == pytest.approx(exposed + 3 * (permute - matmul))
    assert found.step_s == pytest.approx(sum(found.by_kind.values()))
    assert found.collectives == {"collective-permute": 3, "all-gather": 1}
    assert sum(s for kinds in found.by_part.values() for s in kinds.values()) == pytest.approx(
        found.step_s
    )


def test_no_product_is_expected_to_beat_the_peak():
    where = parse_slice("v5e:1x2")
    text = PROGRAM.replace('"estimated_cycles":"77"', '"estimated_cycles":"1"')
    peak = peak_of("TPU v5 lite").bf16_flops
    found = estimate(parse(text), where)
    best = 3 * 2 * 64 * 128 * 256 / peak
    assert CHIPS["v5e"].rates.cycles_share > 1  # which the bound is for
    assert found.by_kind["matmul"] == pytest.approx(best)


@pytest.mark.parametrize("name, times", [("v5e:1x2", 2), ("v4:2x2x1", 1)])
def test_integers_take_half_the_time_where_there_are_units_for_them(name, times):
    where = parse_slice(name)
    text = PROGRAM.replace('"estimated_cycles":"77"', '"estimated_cycles":"1"')
    start = text.index("%dots")
    dots = text[start : text.index("%body")]
    integers = dots.replace("f32[64,256]", "s32[64,256]").replace("f32[", "s8[")
    found, floats = (estimate(parse(t), where) for t in (text.replace(dots, integers), text))
    assert times * found.by_kind["matmul"] == pytest.approx(floats.by_kind["matmul"])
    assert found.matmul_flops == floats.matmul_flops


# libtpu 0.0.42.1 for v5e, shortened: a gather starts, a product carries it on, it ends
CARRIED = """
HloModule jit_step, is_scheduled=true

%begin (p: bf16[20,512]) -> (bf16[20,512], bf16[160,512], u32[]) {
  %p = bf16[20,512]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[160,512]{1,0:T(8,128)(2,1)} all-gather(%p), replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}
  ROOT %custom-call.1 = (bf16[20,512]{1,0}, bf16[160,512]{1,0}, u32[]{:S(2)}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%carry (q: bf16[20,512], r: bf16[160,512], a: bf16[1024,256], b: bf16[256,512]) -> (bf16[1024,512], bf16[160,512], u32[]) {
  %q = bf16[20,512]{1,0:T(8,128)(2,1)} parameter(0)
  %a = bf16[1024,256]{1,0:T(8,128)(2,1)} parameter(2)
  %b = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(3)
  %all-gather.2 = bf16[160,512]{1,0:T(8,128)(2,1)} all-gather(%q), replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}
  %convolution.1 = bf16[1024,512]{1,0:T(8,128)(2,1)} convolution(%a, %b), dim_labels=bf_io->bf
  ROOT %tuple.1 = (bf16[1024,512]{1,0}, bf16[160,512]{1,0}, u32[]{:S(2)}) tuple(%convolution.1, %all-gather.2)
}

%end (s: bf16[160,512]) -> bf16[160,512] {
  %s = bf16[160,512]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.3 = bf16[160,512]{1,0:T(8,128)(2,1)} all-gather(%s), replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}
  ROOT %custom-call.3 = bf16[160,512]{1,0:T(8,128)(2,1)} custom-call(%all-gather.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (w: bf16[20,512], x: bf16[1024,256], y: bf16[256,512]) -> bf16[160,512] {
  %w = bf16[20,512]{1,0:T(8,128)(2,1)} parameter(0)
  %x = bf16[1024,256]{1,0:T(8,128)(2,1)} parameter(1)
  %y = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(2)
  %async-collective-start.5 = (bf16[20,512]{1,0}, bf16[160,512]{1,0}, u32[]{:S(2)}) fusion(%w), kind=kCustom, calls=%begin
  %get-tuple-element.1 = bf16[20,512]{1,0} get-tuple-element(%async-collective-start.5), index=0
  %get-tuple-element.2 = bf16[160,512]{1,0} get-tuple-element(%async-collective-start.5), index=1
  %fusion.404 = (bf16[1024,512]{1,0}, bf16[160,512]{1,0}, u32[]{:S(2)}) fusion(%get-tuple-element.1, %get-tuple-element.2, %x, %y), kind=kOutput, calls=%carry, backend_config={"estimated_cycles":"CYCLES"}
  %get-tuple-element.3 = bf16[160,512]{1,0} get-tuple-element(%fusion.404), index=1
  ROOT %async-collective-done.5 = bf16[160,512]{1,0:T(8,128)(2,1)} fusion(%get-tuple-element.3), kind=kCustom, calls=%end
}
"""  # noqa: E501


@pytest.mark.parametrize("cycles", [3_000, 30_000])
def test_a_gather_that_products_carry_on_is_one_gather(cycles):
    where = parse_slice("v5e-8")  # 2 x 4, a grid: the corner has a link along each axis
    rates = CHIPS["v5e"].rates
    found = estimate(parse(CARRIED.replace("CYCLES", str(cycles))), where)
    gather = 160 * 512 * 2 * 7 / 8 / (2 * rates.link_bytes_per_s)
    product = max(cycles / rates.clock_hz / rates.cycles_share, 2 * 1024 * 256 * 512 / 197e12)
    assert found.collectives == {"all-gather": 1}
    assert found.matmul_flops == 2 * 1024 * 256 * 512
    assert found.step_s == pytest.approx(max(gather, product))
    assert found.hidden_s == pytest.approx(min(gather, product))


SCATTERED = """
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter (p: f32[1024,512]) -> f32[256,512] {
  %p = f32[1024,512]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[1024,512]{1,0:T(8,128)} all-reduce(%p), replica_groups=[1,4]<=[4], to_apply=%add
  %zero = s32[] constant(0)
  ROOT %dynamic-slice.1 = f32[256,512]{1,0:T(8,128)} dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={256,512}
}

ENTRY %main (w: f32[1024,512]) -> f32[256,512] {
  %w = f32[1024,512]{1,0:T(8,128)} parameter(0)
  ROOT %fusion.1 = f32[256,512]{1,0:T(8,128)} fusion(%w), kind=kCustom, calls=%all-reduce-scatter
}
"""  # noqa: E501


def test_an_all_reduce_of_which_a_slice_is_kept_moves_half():
    found = estimate(parse(SCATTERED), parse_slice("v4-8"))  # 2 x 2 x 1: two links
    assert found.collectives == {"reduce-scatter": 1}
    moved = 1024 * 512 * 4 * 3 / 4
    assert found.step_s == pytest.approx(moved / (2 * CHIPS["v4"].rates.link_bytes_per_s))


IN_LINE = """
ENTRY %main (w: bf16[64,4096], x: bf16[2048,4096], y: bf16[4096,4096]) -> bf16[2048,4096] {
  %w = bf16[64,4096]{1,0:T(8,128)} parameter(0)
  %x = bf16[2048,4096]{1,0:T(8,128)} parameter(1)
  %y = bf16[4096,4096]{1,0:T(8,128)} parameter(2)
  %first = bf16[2048,4096]{1,0:T(8,128)} convolution(%x, %y), dim_labels=bf_io->bf
  %cast = bf16[64,4096]{1,0:T(8,128)} fusion(%SENT), kind=kLoop, calls=%c, backend_config={"estimated_cycles":"10"}
  %whole = bf16[4096,4096]{1,0:T(8,128)} all-gather(%cast), replica_groups=[1,64]<=[64], dimensions={0}
  %part = bf16[4096,4096]{1,0:T(8,128)} bitcast(%whole)
  %second = bf16[2048,4096]{1,0:T(8,128)} convolution(%x, %y), dim_labels=bf_io->bf
  ROOT %third = bf16[2048,4096]{1,0:T(8,128)} convolution(%second, %part), dim_labels=bf_io->bf
}

%c (q: bf16[64,4096]) -> bf16[64,4096] {
  ROOT %q = bf16[64,4096]{1,0:T(8,128)} parameter(0)
}
"""  # noqa: E501


@pytest.mark.parametrize("sent, before", [("w", 2), ("first", 1)])
def test_a_collective_in_one_piece_hides_between_what_it_sends_and_who_needs_it(sent, before):
    """Behind both products before the one that needs it, or behind one where it sends what the
    first has made."""
    where, rates = parse_slice("v4-128"), CHIPS["v4"].rates
    gather = 4096 * 4096 * 2 * 63 / 64 / (6 * rates.link_bytes_per_s)
    peak = peak_of("TPU v4").bf16_flops
    product = 2 * 2048 * 4096 * 4096 / (peak * rates.matmul_efficiency)  # no cycles are known
    cast = 64 * 4096 * 2 / rates.hbm_bytes_per_s
    found = estimate(parse(IN_LINE.replace("SENT", sent)), where)
    waited = max(0.0, gather - before * product)
    assert waited == 0 or before == 1
    exposed = waited + IN_ONE_PIECE * (gather - waited)
    assert found.by_kind["exposed collectives"] == pytest.approx(exposed, abs=2 * cast)
    assert found.hidden_s == pytest.approx(gather - exposed, abs=2 * cast)
    assert found.by_kind["matmul"] == pytest.approx(3 * product)


ACROSS_SLICES = """
ENTRY %main (p: f32[1024,1024]) -> f32[1024,1024] {
  %p = f32[1024,1024]{1,0:T(8,128)} parameter(0)
  %token = token[] after-all()
  %out = (f32[1024,1024]{1,0:T(8,128)}, u32[], token[]) send(%p, %token), channel_id=1, is_host_transfer=true
  %in = (f32[1024,1024]{1,0:T(8,128)}, u32[], token[]) recv(%token), channel_id=2, is_host_transfer=true
  %work = f32[1024,1024]{1,0:T(8,128)} fusion(%p), kind=kLoop, calls=%c, backend_config={"estimated_cycles":"105000"}
  %in-done = (f32[1024,1024]{1,0:T(8,128)}, token[]) recv-done(%in), channel_id=2, is_host_transfer=true
  %out-done = token[] send-done(%out), channel_id=1, is_host_transfer=true
  ROOT %got = f32[1024,1024]{1,0:T(8,128)} get-tuple-element(%in-done), index=0
}

%c (q: f32[1024,1024]) -> f32[1024,1024] {
  %q = f32[1024,1024]{1,0:T(8,128)} parameter(0)
  ROOT %negated = f32[1024,1024]{1,0:T(8,128)} negate(%q)
}
"""  # noqa: E501


def test_slices_exchange_over_the_hosts_network_behind_arithmetic():
    found = estimate(parse(ACROSS_SLICES), parse_slice("2xv4-8"))
    crossing = 1024 * 1024 * 4 / CHIPS["v4"].network_bytes_per_s  # both ways at once
    work = 105_000 / CHIPS["v4"].rates.clock_hz / CHIPS["v4"].rates.cycles_share
    assert found.step_s == pytest.approx(crossing, rel=1e-5)
    assert found.by_kind["exposed collectives"] == pytest.approx(crossing - work, rel=1e-5)
    assert found.collectives == {"send": 1, "recv": 1}


KERNEL = """
ENTRY %main (q: bf16[2,8,2048,96]) -> (bf16[2,8,2048,96]) {
  %q = bf16[2,8,2048,96]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %splash_mha_NAME.1 = (PARTSbf16[2,8,2048,96]{3,2,1,0:T(8,128)(2,1)}) custom-call(%q, %q, %q), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 1024, \\"block_kv\\": 512, \\"block_q_dkv\\": 512, \\"block_kv_dkv\\": 512}"
}}, metadata={op_name="x"}
}
"""  # noqa: E501


@pytest.mark.parametrize(
    "name, parts, way, blocks",
    [
        ("fwd_segmented_residuals", "", "fwd", 1024 * 512 * (2 + 4)),
        ("dkv_segmented_no_residuals", "", "dkv", 512 * 512 * 10),
        # the fused kernel gives dq as well, a part for each block of keys
        ("dkv_segmented_no_residuals", "bf16[2,4,8,2048,96]{4,3,2,1,0}, ", "bwd", 512 * 512 * 10),
    ],
)
def test_attention_is_costed_by_the_blocks_that_the_mask_touches(name, parts, way, blocks):
    text = KERNEL.replace("NAME", name).replace("PARTS", parts)
    found, rates = estimate(parse(text), parse_slice("v4-8")), CHIPS["v4"].rates
    cycles = 2 * 8 * blocks * by_score("v4", 96, way) / 1000  # two cores share the heads
    cost = cycles / (2 * rates.clock_hz) / rates.kernel_share
    assert found.by_kind["attention"] == pytest.approx(cost)
    # a device's only row: the batch is no dimension of the program any more
    alone = text.replace("[2,8,", "[8,").replace("[2,4,8,", "[4,8,").replace("{3,2,1,0", "{2,1,0")
    assert estimate(parse(alone), parse_slice("v4-8")).step_s == pytest.approx(cost / 2)
    # on v2 and v3, in float32, nothing of its schedule is known
    assert estimate(parse(text), parse_slice("v3-8")).step_s > 2 * cost


def by_score(generation, head_dim, way):
    known = CHIPS[generation].splash[head_dim]
    return known.fwd if way == "fwd" else known.bwd * LONG_ROWS.get(way, 1)


@pytest.mark.parametrize("name, way", [("fwd", 0), ("bwd", 1)])
def test_attention_of_whole_rows_is_costed_by_the_compilers_schedule(name, way):
    text = KERNEL.replace("splash_mha_NAME", f"row_attention_{name}").replace("PARTS", "")
    text = text.replace("1024", "512")
    found, rates = estimate(parse(text), parse_slice("v4-8")), CHIPS["v4"].rates
    cycles = schedule_of(CHIPS["v4"].row_attention[96], way)
    cost = cycles / (2 * rates.clock_hz) / rates.cycles_share  # two cores
    assert found.by_kind["attention"] == pytest.approx(cost)
    # a size between two others; never faster than the schedule where the clock is known
    assert row_attention_cycles("v4", 112)[0][0] == pytest.approx((6.86 + 7.38) / 2000)
    for generation in ("v5e", "v5p"):
        rates = CHIPS[generation].rates
        assert rates.cycles_share > rates.kernel_share == 1
        found = estimate(parse(text), parse_slice(f"{generation}-8"))
        least = schedule_of(CHIPS[generation].row_attention[96], way) / rates.clock_hz / rates.cores
        assert found.step_s == pytest.approx(least)


def schedule_of(known, way):
    """Cycles of 16 heads of 2,048 tokens, 6 of 16 blocks below the diagonal."""
    numbers = [(known.forward, known.around_forward), (known.backward, known.around_backward)]
    by_score, by_token = numbers[way]
    return 16 * (6 * 512**2 * by_score / 1000 + 2048 * by_token)


def test_blocks_above_the_diagonal_are_not_visited():
    assert visited(2048, 2048, 2048) == 2048**2
    assert visited(2048, 1024, 1024) == 3 * 1024**2
    assert visited(8192, 1024, 1024) == 36 * 1024**2


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
