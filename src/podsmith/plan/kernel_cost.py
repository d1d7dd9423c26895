"""Cost of the attention kernels, which the compiler does not know: blocks by blocks.

A splash kernel visits the blocks of the score matrix that the causal mask touches, those on
the diagonal in full:

    # . .
    # # .      3 x 3 blocks: 6 of 9 are visited
    # # #

In a block every score passes through a few matmuls (2 forward; 7 backward in two kernels, or
5 in one) and, for each of them, some vector work. Both run on one TensorCore, and what they
take is added up. How much vector work is assumed (`Rates.attention_cycles`): libtpu's static
profile (`--xla_jf_dump_static_llo_profile_to`, for v5p and v6e), from which 1.8 cycles for each
matmul and 1,000 scores were once read, does not count the turns of the grid in a way that could be
told: its numbers grow with the heads, not with the blocks.
"""

import math
import re

from podsmith.plan.hlo import Computation, Instruction, arrays
from podsmith.presets.hardware import Rates

LANES = 128

_BLOCKS = re.compile(r'block_(q|kv)(_dkv|_dq)?\\?": (\d+)')
FUSED_MATMULS = 5
_MATMULS = {
    "splash_mha_fwd": 2,
    "splash_mha_dkv": 4,
    "splash_mha_dq": 3,
    "row_attention_fwd": 2,
    "row_attention_bwd": FUSED_MATMULS,
}
_SUFFIX = {"splash_mha_dkv": "_dkv", "splash_mha_dq": "_dq"}


def attention_s(step: Instruction, holder: Computation, peak: float, rates: Rates) -> float:
    """Seconds of a splash kernel on a device of `peak` FLOP/s, from its queries [B, N, T, H],
    its name and its blocks; 0 for other kernels."""
    which = next((w for w in _MATMULS if w in step.name + step.op_name), None)
    queries = [
        dims
        for name in step.operands
        if name in holder.by_name
        for _, dims in arrays(holder.by_name[name].shape)
        if len(dims) == 4
    ]
    if which is None or not queries:
        return 0.0
    b, n, *sides = max(queries, key=math.prod)
    t, h = max(sides), min(sides)  # either may be the minor one
    blocks = {(side, of or ""): int(size) for side, of, size in _BLOCKS.findall(step.rest)}
    suffix = _SUFFIX.get(which, "")
    q, kv = blocks.get(("q", suffix), t), blocks.get(("kv", suffix), t)
    scores = b * n * visited(t, q, kv)
    # dq in as many parts as there are blocks of keys: [B, blocks, N, T, H]
    fused = which == "splash_mha_dkv" and any(len(dims) == 5 for _, dims in arrays(step.shape))
    matmuls = FUSED_MATMULS if fused else _MATMULS[which]
    padded = math.ceil(h / LANES) * LANES
    per_score = 2 * padded / peak + rates.attention_cycles / (rates.clock_hz * rates.cores)
    return scores * matmuls * per_score


def ragged_flops(step: Instruction, holder: Computation) -> float:
    """FLOPs of a megablox kernel, 2 m k n as if every row were somebody's: from its two operands
    and its result, of which one is stacked by group; 0 for other kernels."""
    if "gmm" not in step.op_name:
        return 0.0
    shapes = [holder.by_name[n].shape for n in step.operands if n in holder.by_name]
    sizes = [
        math.prod(dims[-2:])
        for shape in (*shapes, step.shape)
        for _, dims in arrays(shape)
        if len(dims) in (2, 3)
    ]
    return 2 * math.sqrt(math.prod(sizes)) if len(sizes) == 3 else 0.0


def visited(length: int, q: int, kv: int) -> int:
    """Scores of one head in blocks of q x kv that the causal mask touches."""
    rows = math.ceil(length / q)
    blocks = sum(math.ceil(min((row + 1) * q, length) / kv) for row in range(rows))
    return blocks * q * kv
