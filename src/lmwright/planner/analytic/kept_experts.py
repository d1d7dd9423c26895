"""Results of experts that `train.remat = "none"` keeps for the backward pass, beside products.

With a capacity, the weights that a layer has gathered are among them (`nn/moe.py`): whole weights
of every layer, in the activations' dtype. Without one they are gathered again.
"""

from collections.abc import Iterator

from lmwright.planner.analytic.layout import WEIGHT_BYTES, Layout


def kept_of_experts(layout: Layout) -> Iterator[tuple[str, float]]:
    """(name, bytes that a mean layer keeps on a device) of such results."""
    for w in layout.stock.model_weights:
        if not w.is_routed:
            continue
        share, size = layout.share(w), layout.activation_bytes
        capacity = layout.capacity_factor(w)
        if capacity is not None and any(ways > 1 for ways in layout.sizes.values()):
            held = w.param.size / w.layers * layout.stages / layout.product_ways(w)
            yield f"{w.path}, gathered", share * held * size
        if w.param.inputs == ("mlp",) and not layout.in_rounds(w):
            choices = share * layout.tokens * w.per_token
            yield "rows of experts", layout.slots(w) * choices * w.fan_out * size
            if capacity is not None:
                yield "results of experts", choices * w.fan_out * WEIGHT_BYTES
            else:  # beside their shares, in float32
                yield "inputs of results", choices * w.fan_in * WEIGHT_BYTES
