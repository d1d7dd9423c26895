"""Cost of the attention kernel of long rows."""

import json

import numpy as np
import pytest

from lmwright.hardware.chips import CHIPS
from lmwright.hardware.slices import parse_slice
from lmwright.kernels.tpu_spans import Sizes, sizes_of
from lmwright.nn.intervals import Reach, causal_reach
from lmwright.planner.compiler.cost import estimate
from lmwright.planner.compiler.hlo import parse
from lmwright.planner.compiler.kernel_cost import reach_of
from lmwright.planner.compiler.long_attention import (
    CYCLES,
    PRODUCTS,
    WAYS,
    Visits,
    long_attention_s,
    visits,
)

KERNEL = """
ENTRY %main (q: bf16[2,8,128,8192]) -> (bf16[2,8,128,8192]) {
  %q = bf16[2,8,128,8192]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %NAME.1 = (bf16[2,8,128,8192]{3,2,1,0:T(8,128)(2,1)}) custom-call(%q, %q, %q), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512, \\"block_kv\\": 1024, \\"span_q\\": 1024, \\"span_kv\\": 2048}"
}}, metadata={op_name="x"}
}
"""  # noqa: E501


@pytest.mark.parametrize("way", WAYS)
def test_a_row_in_pieces_costs_as_a_whole_one(way):
    whole = KERNEL.replace("NAME", way)
    cut = whole.replace("2,8,128,8192", "8,8,128,2048").replace('{\\"', '{\\"pieces\\": 4, \\"', 1)
    assert "pieces" in cut
    first, second = (estimate(parse(text), parse_slice("v6e-8")).step_s for text in (whole, cut))
    assert first == second > 0


@pytest.mark.parametrize("window", [None, 1, 700, 4096])
def test_blocks_are_those_that_the_mask_touches(window):
    sizes = Sizes(4096, 512, 1024, 1024, 2048)
    behind = np.arange(4096)[:, None] - np.arange(4096)
    mask = (behind >= 0) & (behind < (window or 4096))
    blocks = mask.reshape(8, 512, 4, 1024).swapaxes(1, 2).reshape(32, -1)
    found = visits(sizes, causal_reach(window))
    assert found.plain == blocks.all(axis=1).sum()
    assert found.plain + found.masked == blocks.any(axis=1).sum()
    assert found.steps == mask.reshape(4, 1024, 2, 2048).any(axis=(1, 3)).sum()


@pytest.mark.parametrize("reach", [(None, None), (700, 700), (1500, 200), (None, 511)])
def test_blocks_of_rows_seen_both_ways(reach):
    sizes, (before, after) = Sizes(4096, 512, 1024, 1024, 2048), reach
    behind = np.arange(4096)[:, None] - np.arange(4096)
    mask = (behind <= (4096 if before is None else before)) & (
        -behind <= (4096 if after is None else after)
    )
    blocks = mask.reshape(8, 512, 4, 1024).swapaxes(1, 2).reshape(32, -1)
    found = visits(sizes, Reach(*reach))
    assert found.plain == blocks.all(axis=1).sum()
    assert found.plain + found.masked == blocks.any(axis=1).sum()
    assert found.steps == mask.reshape(4, 1024, 2, 2048).any(axis=(1, 3)).sum()


def test_blocks_of_a_band():
    """One for each block of queries in each span of keys that it meets: two at an edge."""
    sizes = sizes_of(8192, 64, 2, Reach(64, 64))
    assert sizes == Sizes(8192, 256, 512, 2048, 2048, band=True)
    assert visits(sizes, Reach(64, 64)) == Visits(0, 32 + 2 * 3, 4 + 2 * 3)


@pytest.mark.parametrize(
    ("said", "reach"),
    [("", (None, 0)), ('\\"window\\": 64', (63, 0)), ('\\"reach\\": [null, null]', (None, None)),
     ('\\"reach\\": [64, 9]', (64, 9))],
)  # fmt: skip
def test_the_reach_is_read_off_the_program(said, reach):
    assert reach_of(said)[:2] == reach
    assert not said or json.dumps(Reach(*reach).metadata)[1:-1] == said.replace("\\", "")


@pytest.mark.parametrize("generation", CYCLES)
def test_whole_rows_seen_both_ways_cost_all_of_their_blocks(generation):
    """16 blocks and not 10; of near ones 10."""
    text = (
        KERNEL.replace("NAME", "row_attention_fwd").replace("1024", "512").replace("8192", "2048")
    )
    both = text.replace('{\\"block_q', '{\\"reach\\": [null, null], \\"block_q')
    near = text.replace('{\\"block_q', '{\\"reach\\": [64, 64], \\"block_q')
    causal, both, near = (
        estimate(parse(t), parse_slice(f"{generation}-8")).by_kind["attention"]
        for t in (text, both, near)
    )
    assert 1.4 * causal < both < 1.9 * causal
    assert near == pytest.approx(both * 10 / 16, rel=0.04)


@pytest.mark.parametrize("way", [0, 1])
@pytest.mark.parametrize("generation", CYCLES)
def test_a_compiled_kernel_is_costed_by_its_blocks(generation, way):
    """As the answer without a compiler is, and never faster than the products."""
    found = estimate(parse(KERNEL.replace("NAME", WAYS[way])), parse_slice(f"{generation}-8"))
    rates, sizes = CHIPS[generation].rates, sizes_of(8192, 128, 2)
    one = long_attention_s(generation, rates, 128, sizes, causal_reach(None), way)
    assert found.by_kind["attention"] == pytest.approx(16 * one)
    scores = 8192**2 / 2
    assert one > PRODUCTS[way] * 2 * 128 * scores / CHIPS[generation].peak.bf16_flops
    two = long_attention_s(generation, rates, 128, sizes, causal_reach(1024), way)
    assert 0 < two < 0.6 * one
