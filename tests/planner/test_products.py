"""FLOPs of products in the compiled program, batch dimensions among them."""

import pytest

from lmwright.planner.compiler.hlo import parse
from lmwright.planner.compiler.products import Products

PROGRAM = """
HloModule step

ENTRY %main (a: bf16[8,640,96], b: bf16[8,96,32]) -> bf16[8,640,32] {{
  %a = bf16[{a}]{{2,1,0}} parameter(0)
  %b = bf16[{b}]{{2,1,0}} parameter(1)
  ROOT %y = bf16[{y}]{{2,1,0}} {opcode}(%a, %b), {attributes}
}}
"""


@pytest.mark.parametrize(
    "opcode, attributes, a, b, y, flops",
    [
        # one matrix for each of eight groups of rows, as TPUs write it
        (
            "convolution",
            "window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf",
            "8,640,96", "8,96,32", "8,640,32", 2 * 8 * 640 * 96 * 32,
        ),
        # two batch dimensions
        (
            "convolution",
            "window={size=8x2 stride=7x1 lhs_dilate=8x2}, dim_labels=01bf_01io->01bf",
            "8,2,64,96", "8,2,96,32", "8,2,64,32", 2 * 8 * 2 * 64 * 96 * 32,
        ),
        # all rows by the same matrix, whose axis of 16 heads is a window over padded places
        (
            "convolution",
            "window={size=1x16 pad=0_0x15_15 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f",
            "2,40,96,1", "16,8,96,1", "2,40,16,8", 2 * 2 * 40 * 96 * 16 * 8,
        ),
        # a sum over a window of two rows
        (
            "convolution", "window={size=2}, dim_labels=0fb_0io->bf0",
            "2,64,96", "2,64,32", "96,32,1", 2 * 2 * 64 * 96 * 32,
        ),
        (
            "dot",
            "lhs_batch_dims={1}, lhs_contracting_dims={2}, rhs_batch_dims={0}",
            "640,8,96", "8,96,32", "8,640,32", 2 * 8 * 640 * 96 * 32,
        ),
        (
            "dot", "lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            "640,96", "96,32", "640,32", 2 * 640 * 96 * 32,
        ),
    ],
)  # fmt: skip
def test_every_product_of_a_batch_is_counted_once(opcode, attributes, a, b, y, flops):
    program = parse(PROGRAM.format(opcode=opcode, attributes=attributes, a=a, b=b, y=y))
    body = program.computations[program.entry]
    work = Products(program, int8_units=False).of(body.root, body)
    assert work.flops == work.needed == pytest.approx(flops)
