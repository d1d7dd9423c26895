"""Adapters: seconds of products with their factors, too thin to keep the matrix unit busy.

x [T, in] --A [in, R]--> [T, R] --B [R, out]--> [T, out], added to the product of the base
"""

from lmwright.planner.analytic.layout import Layout
from lmwright.planner.analytic.machine import Machine
from lmwright.planner.analytic.stock import Weight

TILE = 128  # products are padded to multiples of it
PASSES = 2.0  # of what a factor reads and writes; B's product goes to memory before it is added


def adapter_s(layout: Layout, weight: Weight, count: int, machine: Machine) -> float:
    """Seconds of `count` products of each token of a microbatch with a factor (all its layers)."""
    tokens = count * layout.tokens * weight.active / layout.product_ways(weight)
    rank = min(weight.fan_in, weight.fan_out)
    padding = -(-rank // TILE) * TILE / rank
    flops = 2 * tokens * weight.param.size * padding
    sides = (weight.fan_in + weight.fan_out) * weight.param.size / (weight.fan_in * weight.fan_out)
    moved = PASSES * tokens * sides * layout.activation_bytes
    rate = machine.flops * machine.matmul_efficiency
    return max(flops / rate, moved / machine.vector_bytes_per_s)
