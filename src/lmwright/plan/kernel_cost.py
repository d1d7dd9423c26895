"""Cost of the attention kernels, which the compiler does not know: blocks by blocks.

A kernel visits the blocks of the score matrix that the causal mask touches, those on the
diagonal in full:

    # . .
    # # .      3 x 3 blocks: 6 of 9 are visited
    # # #

Our own kernel (`kernels/tpu_row_attention.py`) costs what the compiler's schedule of it has
(`presets.hardware.ROW_ATTENTION`): by score below the diagonal, and by token for all else.

In a block of JAX's splash kernel every score passes through a few matmuls (2 forward; 7 backward
in two kernels, or 5 in one) and, for each of them, some vector work. Both run on one TensorCore,
and what they take is added up. How much vector work is assumed (`Rates.attention_cycles`), and
constants were fitted with it; the compiler's schedule (`benchmarks/attention_schedule.py --splash`)
has a quarter more cycles forward and 29 % fewer backward on v4 (heads of 96), since both overlap.
"""

import math
import re

import numpy as np

from lmwright.plan.hlo import Computation, Instruction, arrays
from lmwright.presets.hardware import ROW_ATTENTION, Rates

LANES = 128

_BLOCKS = re.compile(r'block_(q|kv)(_dkv|_dq)?\\?": (\d+)')
FUSED_MATMULS = 5
_MATMULS = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}
_ROW = {"row_attention_fwd": 0, "row_attention_bwd": 1}
_SUFFIX = {"splash_mha_dkv": "_dkv", "splash_mha_dq": "_dq"}


def attention_s(
    step: Instruction, holder: Computation, generation: str, peak: float, rates: Rates
) -> float:
    """Seconds of an attention kernel on a device of `peak` FLOP/s, from its queries [..., N, T, H],
    its name and its blocks; 0 for other kernels."""
    called = step.name + step.op_name
    which = next((w for w in (*_MATMULS, *_ROW) if w in called), None)
    queries = [
        dims
        for name in step.operands
        if name in holder.by_name
        for _, dims in arrays(holder.by_name[name].shape)
        if len(dims) >= 4  # more where it is mapped over adapters
    ]
    if which is None or not queries:
        return 0.0
    *mapped, n, one, other = max(queries, key=math.prod)
    b, t, h = math.prod(mapped), max(one, other), min(one, other)  # either may be the minor one
    blocks = {(side, of or ""): int(size) for side, of, size in _BLOCKS.findall(step.rest)}
    suffix = _SUFFIX.get(which, "")
    q, kv = blocks.get(("q", suffix), t), blocks.get(("kv", suffix), t)
    if which in _ROW:
        below = b * n * (visited(t, q, kv) - t * kv)
        return row_attention_s(
            rates, row_attention_cycles(generation, h)[_ROW[which]], below, b * n * t
        )
    scores = b * n * visited(t, q, kv)
    # dq in as many parts as there are blocks of keys: [B, blocks, N, T, H]
    fused = which == "splash_mha_dkv" and any(len(dims) == 5 for _, dims in arrays(step.shape))
    matmuls = FUSED_MATMULS if fused else _MATMULS[which]
    padded = math.ceil(h / LANES) * LANES
    per_score = 2 * padded / peak + rates.attention_cycles / (rates.clock_hz * rates.cores)
    return scores * matmuls * per_score / rates.cycles_share


def row_attention_s(
    rates: Rates, cycles: tuple[float, float], below: float, tokens: float
) -> float:
    """Seconds of our own kernel, one way, for so many scores below the diagonal and tokens of
    heads; not less than the schedule says, whatever other programs do."""
    by_score, by_token = cycles
    seconds = (below * by_score + tokens * by_token) / (rates.clock_hz * rates.cores)
    return seconds / min(1.0, rates.cycles_share)


def row_attention_cycles(generation: str, head_dim: int) -> tuple[tuple[float, float], ...]:
    """(by score below the diagonal, by token of a head for the rest) of one core, forward and
    backward; head sizes that were not compiled lie between those that were."""
    known = ROW_ATTENTION[generation]

    def at(name: str) -> float:
        values = [getattr(cycles, name) for cycles in known.values()]
        return float(np.interp(head_dim, list(known), values))

    forward = at("forward") / 1000, at("around_forward")
    return forward, (at("backward") / 1000, at("around_backward"))


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
