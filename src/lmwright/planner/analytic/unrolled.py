"""Unrolled: what layers without a loop keep beside products, by `core.compute.unrolled`."""

from lmwright.core.compute import CAST, OPERAND
from lmwright.planner.analytic.layout import WEIGHT_BYTES, Layout

CAST_WEIGHTS = "cast weights"


def beside_products(layout: Layout) -> dict[str, float]:
    """Bytes of one microbatch by name, for a mean layer."""
    remat, size = layout.remat, layout.activation_bytes
    if remat.everything or not remat.keeps(OPERAND):
        return {}
    wide = layout.tokens * size * layout.mlp_width / layout.ways("batch", "seq", "mlp")
    sizes = {"inputs of products": 2 * layout.stream_bytes + wide}
    if remat.keeps(CAST) and size != WEIGHT_BYTES:
        of = [w for w in layout.weights if w.trained and w.stacked and w.param.is_matrix]
        cast = sum(w.param.size for w in of if not w.is_expert and not w.adds_to)
        sizes[CAST_WEIGHTS] = cast * size / layout.layers
    return sizes


def spared_bytes(layout: Layout) -> float:
    """Bytes that a mean layer does not move since it keeps these: they are not written again, nor
    float32 weights read again."""
    sizes = beside_products(layout)
    read = sizes.get(CAST_WEIGHTS, 0.0) * WEIGHT_BYTES / layout.activation_bytes
    return sum(sizes.values()) + read
