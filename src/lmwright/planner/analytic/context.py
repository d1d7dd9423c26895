"""Bytes that attention exchanges where `mesh.context` cuts the rows.

all_to_all   q, k, v there and the result back; their gradients the other way
ring         a global layer: q, k, v into balanced order and the result back, then keys and
             values of all other devices, and once more with their gradients
             a window's: the keys and values of the stretch before a device's own tokens
"""

from lmwright.kernels.all_to_all_attention import copies_of
from lmwright.kernels.window_attention import is_near, stretch
from lmwright.planner.analytic.layout import WEIGHT_BYTES, Layout


def context_bytes(layout: Layout) -> float:
    """Bytes that a device receives for one microbatch."""
    m, ways = layout.attention, layout.sizes["context"]
    if m is None or ways == 1:
        return 0.0
    tensor = layout.sizes["tensor"]
    q, kv = m.num_heads / tensor, max(1, m.num_kv_heads // tensor)  # heads of a device
    element, share = layout.activation_bytes, (ways - 1) / ways
    if layout.run.train.context_attention == "all_to_all":
        there = q + 2 * kv * copies_of(kv, ways)
        again = 0 if layout.remat.everything else there
        heads = len(m.windows) * share * (2 * (there + q) + again) * element
    else:
        by_token = 2 * kv * (2 * element + WEIGHT_BYTES)  # there twice; gradients in float32
        order = 2 * (2 * q + 2 * kv) * share * element
        near = [w for w in m.windows if is_near(w, layout.seq_len)]
        stretches = sum(stretch(w, layout.seq_len, ways) for w in near)
        heads = (len(m.windows) - len(near)) * ((ways - 1) * by_token + order)
        heads += 2 * kv * (2 + 1) * element * stretches * ways / layout.seq_len
    return layout.tokens / layout.stages * m.head_dim * heads
