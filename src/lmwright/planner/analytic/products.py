"""Products: seconds of the matmuls with a weight, forward and backward."""

from lmwright.planner.analytic.adapters import TILE, adapter_s
from lmwright.planner.analytic.layout import Layout
from lmwright.planner.analytic.machine import Machine
from lmwright.planner.analytic.memory import is_recomputed
from lmwright.planner.analytic.stock import Weight


def product_s(layout: Layout, weight: Weight, machine: Machine) -> float:
    """Seconds of the products with a weight (all its layers), for one microbatch."""
    if not weight.param.is_matrix or not products(layout, weight):
        return 0.0
    if weight.adds_to:
        return adapter_s(layout, weight, products(layout, weight), machine)
    share = weight.active * weight.param.size / layout.product_ways(weight)
    share *= _padding(layout, weight)
    if weight.is_expert:  # tokens of all devices along `expert` come
        share *= layout.sizes["expert"] * layout.slots(weight)
    flops = 2 * products(layout, weight) * layout.tokens * share
    return flops / (machine.flops * machine.matmul_efficiency)


def products(layout: Layout, weight: Weight) -> int:
    """Number of matmuls of a token with a weight: forward, for its gradient, for the gradient of
    the weight, and if it is recomputed. A lookup table has none, unless it is also the head."""
    if not weight.active:
        return 0
    # a frozen weight needs no gradient, and a reference has no adapters
    once = 3 if weight.trained else (2 + layout.extra_passes)
    if not weight.stacked:
        return once  # the loss takes its gradient at once, whatever `train.remat` says
    return once + is_recomputed(layout, weight)


def _padding(layout: Layout, weight: Weight) -> float:
    """Work on padded tiles divided by work on the product's own sizes."""
    ways = layout.product_ways(weight) / layout.stages
    ways /= layout.sizes["expert"] if weight.is_expert else 1
    side = weight.fan_in if "embed" in weight.param.outputs else weight.fan_out  # what is cut
    held = side / ways
    return (-(-held // TILE) * TILE) / held
