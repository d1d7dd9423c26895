"""Collectives that a loop's products carry on, by a program small enough to reckon by hand."""

import pytest

from lmwright.hardware.chips import CHIPS
from lmwright.hardware.slices import parse_slice
from lmwright.planner.compiler.cost import estimate
from lmwright.planner.compiler.hlo import parse
from tests.planner.test_cost import CARRIED

IN_A_LOOP = (
    CARRIED.partition("ENTRY")[0]
    + """
%body (arg: (s32[], bf16[20,512], bf16[160,512], bf16[1024,256], bf16[256,512])) -> (s32[], bf16[20,512], bf16[160,512], bf16[1024,256], bf16[256,512]) {
  %arg = (s32[], bf16[20,512]{1,0}, bf16[160,512]{1,0}, bf16[1024,256]{1,0}, bf16[256,512]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %from = bf16[20,512]{1,0} get-tuple-element(%arg), index=1
  %to = bf16[160,512]{1,0} get-tuple-element(%arg), index=2
  %x = bf16[1024,256]{1,0} get-tuple-element(%arg), index=3
  %y = bf16[256,512]{1,0} get-tuple-element(%arg), index=4
  %one = s32[] constant(1)
  %fusion.404 = (bf16[1024,512]{1,0}, bf16[160,512]{1,0}, u32[]{:S(2)}) fusion(%from, %to, %x, %y), kind=kOutput, calls=%carry, backend_config={"estimated_cycles":"3000"}
  %further = bf16[160,512]{1,0} get-tuple-element(%fusion.404), index=1
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], bf16[20,512]{1,0}, bf16[160,512]{1,0}, bf16[1024,256]{1,0}, bf16[256,512]{1,0}) tuple(%next, %from, %further, %x, %y)
}

%cond (arg.1: (s32[], bf16[20,512], bf16[160,512], bf16[1024,256], bf16[256,512])) -> pred[] {
  %arg.1 = (s32[], bf16[20,512]{1,0}, bf16[160,512]{1,0}, bf16[1024,256]{1,0}, bf16[256,512]{1,0}) parameter(0)
  %limit = s32[] constant(TURNS)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  ROOT %lt = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (w: bf16[20,512], x: bf16[1024,256], y: bf16[256,512]) -> bf16[160,512] {
  %w = bf16[20,512]{1,0:T(8,128)(2,1)} parameter(0)
  %x.1 = bf16[1024,256]{1,0:T(8,128)(2,1)} parameter(1)
  %y.1 = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(2)
  %zero = s32[] constant(0)
  %async-collective-start.5 = (bf16[20,512]{1,0}, bf16[160,512]{1,0}, u32[]{:S(2)}) fusion(%w), kind=kCustom, calls=%begin
  %first = bf16[20,512]{1,0} get-tuple-element(%async-collective-start.5), index=0
  %second = bf16[160,512]{1,0} get-tuple-element(%async-collective-start.5), index=1
  %init = (s32[], bf16[20,512]{1,0}, bf16[160,512]{1,0}, bf16[1024,256]{1,0}, bf16[256,512]{1,0}) tuple(%zero, %first, %second, %x.1, %y.1)
  %loop = (s32[], bf16[20,512]{1,0}, bf16[160,512]{1,0}, bf16[1024,256]{1,0}, bf16[256,512]{1,0}) while(%init), condition=%cond, body=%body
  %gathered = bf16[160,512]{1,0} get-tuple-element(%loop), index=2
  ROOT %async-collective-done.5 = bf16[160,512]{1,0:T(8,128)(2,1)} fusion(%gathered), kind=kCustom, calls=%end
}
"""  # noqa: E501
)


@pytest.mark.parametrize("turns", [1, 16])
def test_a_gather_that_a_loop_carries_on_is_one_gather(turns):
    """As beside the chunks of a recurrence; the compiler leaves it to the loop's products."""
    where, rates = parse_slice("v5e-8"), CHIPS["v5e"].rates
    found = estimate(parse(IN_A_LOOP.replace("TURNS", str(turns))), where)
    gather = 160 * 512 * 2 * 7 / 8 / (2 * rates.link_bytes_per_s)
    flops = turns * 2 * 1024 * 256 * 512
    products = max(turns * 3000 / rates.clock_hz / rates.cycles_share, flops / 197e12)
    assert found.collectives == {"all-gather": 1} and found.matmul_flops == flops
    assert found.step_s == pytest.approx(max(gather, products))
    assert found.hidden_s == pytest.approx(min(gather, products))
