"""Cost of the attention kernel of long rows."""

import numpy as np
import pytest

from lmwright.hardware.chips import CHIPS
from lmwright.hardware.slices import parse_slice
from lmwright.kernels.tpu_spans import Sizes, sizes_of
from lmwright.nn.intervals import causal_reach
from lmwright.planner.compiler.cost import estimate
from lmwright.planner.compiler.hlo import parse
from lmwright.planner.compiler.long_attention import (
    CYCLES,
    PRODUCTS,
    WAYS,
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
