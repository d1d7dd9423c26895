"""Cost of the attention kernels, which the compiler does not know: blocks by blocks.

A kernel visits the blocks of the score matrix that the causal mask touches, those on the
diagonal in full; behind a window, none:

    # . .            # . .
    # # .            # # .
    # # #            . # #      with a window of one block

With attention both ways it visits all blocks, or those within reach.

The cost of a kernel is that of the compiler's own schedule, as `benchmarks/attention_schedule.py`
reads it (`long_attention` has that of long rows, `recurrence_cost` those of memories), and never
less than the matrix units need for the products. Our own kernel (`kernels/tpu_row_attention.py`)
costs so much by score below the diagonal, and by token for all else (`hardware.chips`); JAX's
splash kernel by score of the blocks that it visits, forward, and backward in one kernel or in two.
Which blocks are visited is read from the program: from the kernel's metadata, and from the table of
blocks that is splash's first operand.
"""

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np

from lmwright.hardware.chips import CHIPS, LONG_ROWS, Rates
from lmwright.kernels import tpu_disentangled
from lmwright.kernels.tpu_row_attention import BLOCK
from lmwright.kernels.tpu_spans import Sizes
from lmwright.kernels.tpu_splash import BOTH_WAYS
from lmwright.nn.intervals import Reach, causal_reach
from lmwright.planner.compiler import long_attention, recurrence_cost
from lmwright.planner.compiler.hlo import Computation, Instruction, arrays, usual_share

_SPANS = re.compile(r'(block|span)_(q|kv)\\?": (\d+)')
_BLOCKS = re.compile(r'block_(q|kv)(_dkv|_dq)?\\?": (\d+)')
_PIECES = re.compile(r'pieces\\?": (\d+)')
_WINDOW = re.compile(r'window\\?": (\d+)')
_REACH = re.compile(r'reach\\?": \[(\d+|null), (\d+|null)\]')
_TABLE = re.compile(r"[su](?:8|16|32)\[(\d+(?:,\d+)+)\]")
_FLOATS = re.compile(r"\b(?:bf|f)(?:8\w*|16|32)\[[\d,]*\]")
_SPLASH = {"splash_mha_fwd": "fwd", "splash_mha_dkv": "dkv", "splash_mha_dq": "dq"}
_SUFFIX = {"fwd": "", "dkv": "_dkv", "dq": "_dq"}
_ROW = {"row_attention_fwd": 0, "row_attention_bwd": 1}
_DISENTANGLED = {tpu_disentangled.FORWARD: 0, tpu_disentangled.BACKWARD: 1}
PRODUCTS = {"fwd": 2, "bwd": 5, "dkv": 4, "dq": 3}
"""Matrix products for each score, of queries, keys, values and gradients; `bwd` gives all three
gradients."""
ROW_PRODUCTS = (PRODUCTS["fwd"], PRODUCTS["bwd"])


def attention_s(step: Instruction, holder: Computation, generation: str, rates: Rates) -> float:
    """Seconds of a kernel of attention or of memories on a device: from its queries [..., N, T, H],
    where the batch is left out if it is one row, its name and its blocks; 0 for other kernels."""
    if (recurrent := recurrence_cost.way_of(step)) is not None:
        return recurrence_cost.of_call(step, holder, recurrent, generation, rates)
    call = _Call.of(step, holder)
    if call is None:
        return 0.0
    if call.kernel in long_attention.WAYS:
        return _long_rows_s(call, generation, rates)
    if call.kernel in _DISENTANGLED:
        scores = call.heads * call.length**2
        return disentangled_s(generation, rates, scores, _DISENTANGLED[call.kernel])
    if call.kernel in _ROW:
        cycles = row_attention_cycles(generation, call.head_dim)[_ROW[call.kernel]]
        size = call.block("q")
        return call.heads * whole_row_s(rates, cycles, call.length, size, call.reach)
    way, scores = _splash_scores(call)
    return splash_s(rates, generation, call.head_dim, way, call.heads * scores)


@dataclass(frozen=True)
class _Call:
    """A call of an attention kernel in a program."""

    kernel: str
    step: Instruction
    operands: list[str]
    """Shapes of its operands."""
    q_dims: tuple[int, ...]
    """Shape of its queries [..., N, T, H] of a device, in which H may stand before T."""
    heads: int
    """Heads of all rows."""
    length: int
    head_dim: int

    @classmethod
    def of(cls, step: Instruction, holder: Computation) -> Self | None:
        """The kernel call of an instruction; None for other instructions."""
        called = step.name + step.op_name
        names = (*_SPLASH, *_ROW, *_DISENTANGLED, *long_attention.WAYS)
        kernel = next((name for name in names if name in called), None)
        operands = [holder.by_name[name].shape for name in step.operands if name in holder.by_name]
        queries = [
            dims
            for shape in operands
            if _FLOATS.match(shape)
            for _, dims in arrays(shape)
            if len(dims) >= 3  # more where there are several rows, or adapters
        ]
        if kernel is None or not queries:
            return None
        q_dims = max(queries, key=math.prod)
        *mapped, first, second = q_dims  # tokens and head_dim, in the order of the kernel
        heads, length, head_dim = math.prod(mapped), max(first, second), min(first, second)
        if pieces := _PIECES.search(step.rest):
            heads, length = heads // int(pieces[1]), length * int(pieces[1])
        return cls(kernel, step, operands, q_dims, heads, length, head_dim)

    @property
    def reach(self) -> Reach:
        return reach_of(self.step.rest)

    def block(self, side: str, way: str = "") -> int:
        """Tokens of a block of queries ("q") or keys ("kv"): the whole row where none is named."""
        sizes = {(side, of or ""): int(size) for side, of, size in _BLOCKS.findall(self.step.rest)}
        return sizes.get((side, way), self.length)


def _long_rows_s(call: _Call, generation: str, rates: Rates) -> float:
    named = {(of, side): int(size) for of, side, size in _SPANS.findall(call.step.rest)}
    sizes = Sizes(
        call.length,
        *(named[of, side] for of in ("block", "span") for side in ("q", "kv")),
        band="band" in call.step.rest,
    )
    way = long_attention.WAYS.index(call.kernel)
    return call.heads * long_attention.long_attention_s(
        generation, rates, call.head_dim, sizes, call.reach, way
    )


def _splash_scores(call: _Call) -> tuple[str, int]:
    """The key of `PRODUCTS` of a call of JAX's splash kernel, and the scores of a head that it
    visits."""
    way = _SPLASH[call.kernel]
    q, kv = (call.block(side, _SUFFIX[way]) for side in ("q", "kv"))
    table = next((m for m in map(_TABLE.match, call.operands) if m), None)
    sides = [int(n) for n in table[1].split(",")] if table else []
    causal = BOTH_WAYS not in call.step.op_name
    if way != "dkv":
        return way, visited(call.length, q, kv, sides[-1] if sides else None, causal)
    scores = visited(call.length, kv, q, sides[-2] if sides else None, causal)
    # dq in as many parts as there are blocks of keys: [..., blocks, N, T, H]
    whole = any(len(dims) == len(call.q_dims) + 1 for _, dims in arrays(call.step.shape))
    return "bwd" if whole else way, scores


def reach_of(metadata: str) -> Reach:
    """The reach of queries, from the metadata that `Reach.metadata` wrote; causal if it is
    empty."""
    if found := _REACH.search(metadata):
        return Reach(*(None if side == "null" else int(side) for side in found.groups()))
    window = _WINDOW.search(metadata)
    return causal_reach(int(window[1]) if window else None)


def splash_s(rates: Rates, generation: str, head_dim: int, way: str, scores: float) -> float:
    """Seconds of JAX's splash kernel for scores of the blocks that it visits; `way` is a key of
    `PRODUCTS`."""
    least = PRODUCTS[way] * 2 * head_dim / flops_per_cycle(generation)
    if known := CHIPS[generation].splash:
        cycles = [k.fwd if way == "fwd" else k.bwd for k in known.values()]
        by_score = float(np.interp(head_dim, list(known), cycles)) / 1000
        by_score *= LONG_ROWS.get(way, 1.0)
    else:  # v2 and v3, in float32: products and vector work after each other, assumed
        by_score = least + PRODUCTS[way] * rates.attention_cycles
    cycles = scores * max(by_score / rates.kernel_share, least)
    return cycles / (rates.clock_hz * rates.cores)


def whole_row_s(
    rates: Rates, cycles: tuple[float, float], length: int, size: int, reach: Reach
) -> float:
    """Seconds of our own kernel, one way, for a head of a row in blocks of `size` tokens."""
    if reach.after == 0:
        window = None if reach.before is None else reach.before + 1
        return row_attention_s(rates, cycles, scores_below(length, size, window), length)
    by_score, by_token = cycles  # the diagonal is one block of those that are visited
    cycles = by_score, max(by_token - BLOCK * by_score, 0.0)
    return row_attention_s(rates, cycles, scores_met(length, size, reach), length)


def disentangled_s(generation: str, rates: Rates, scores: float, way: int) -> float:
    """Seconds of our kernel of disentangled attention, one way. Raises ValueError for a chip that
    does not run it."""
    known = CHIPS[generation].disentangled
    if known is None:
        raise ValueError(f"{generation}: no kernel of disentangled attention")
    return scores * known[way] / 1000 / rates.kernel_share / (rates.clock_hz * rates.cores)


def row_attention_s(
    rates: Rates, cycles: tuple[float, float], below: float, tokens: float
) -> float:
    """Seconds of our own kernel, one way, for `below` scores under the diagonal and `tokens`
    tokens of heads; not less than the schedule says, whatever other programs do."""
    by_score, by_token = cycles
    cycles = (below * by_score + tokens * by_token) / rates.kernel_share
    return cycles / (rates.clock_hz * rates.cores)


@cache
def row_attention_cycles(generation: str, head_dim: int) -> tuple[tuple[float, float], ...]:
    """(by score below the diagonal, by token of a head for the rest) of one core, forward and
    backward; head sizes that were not compiled lie between those that were. The
    schedule gives issue times only, so the estimate is never below the matrix units' time."""
    known = CHIPS[generation].row_attention

    def at(name: str) -> float:
        values = [getattr(cycles, name) for cycles in known.values()]
        return float(np.interp(head_dim, list(known), values))

    ways = []
    for name, products in zip(("forward", "backward"), ROW_PRODUCTS, strict=True):
        least = products * 2 * head_dim / flops_per_cycle(generation)
        ways.append((max(at(name) / 1000, least), max(at(f"around_{name}"), least * BLOCK)))
    return tuple(ways)


def flops_per_cycle(generation: str) -> float:
    """Peak FLOPs per cycle of the matrix units of one core."""
    rates = CHIPS[generation].rates
    peak = CHIPS[generation].peak.bf16_flops
    return peak / (rates.clock_hz * rates.cores)


def ragged_flops(step: Instruction, holder: Computation) -> float:
    """FLOPs of a megablox kernel (a grouped matmul): 2 m k n with every row counted as used, but in
    rounds of experts those that usually are, from the shapes of its operands and its result, one of
    which is stacked by group; 0 for others."""
    if "gmm" not in step.op_name:
        return 0.0
    shapes = [holder.by_name[n].shape for n in step.operands if n in holder.by_name]
    sizes = [
        math.prod(dims[-2:])
        for shape in (*shapes, step.shape)
        for _, dims in arrays(shape)
        if len(dims) in (2, 3)
    ]
    return 2 * usual_share(step) * math.sqrt(math.prod(sizes)) if len(sizes) == 3 else 0.0


def visited(length: int, q: int, kv: int, most: int | None = None, causal: bool = True) -> int:
    """Scores of one head in blocks of q x kv that the causal mask touches, or all, of which a row
    of blocks visits `most` where there is a window."""
    rows = math.ceil(length / q)
    last = (min((row + 1) * q, length) if causal else length for row in range(rows))
    counts = (math.ceil(end / kv) for end in last)
    return sum(min(count, most or count) for count in counts) * q * kv


def windowed(length: int, q: int, kv: int, window: int | None) -> int | None:
    """The most blocks that a row of blocks visits behind a window; None without one."""
    if window is None or window >= length:
        return None
    rows = range(math.ceil(length / q))
    return max(
        math.ceil(min((row + 1) * q, length) / kv) - max(0, row * q - window + 1) // kv
        for row in rows
    )


def scores_met(length: int, size: int, reach: Reach) -> int:
    """Scores of one head in the blocks within reach."""
    blocks = [range(start, start + size) for start in range(0, length, size)]
    return sum(reach.meets(q, k) for q in blocks for k in blocks) * size**2


def scores_below(length: int, size: int, window: int | None = None) -> int:
    """Scores of one head in the blocks below those of the diagonal that our own kernel visits."""
    rows = range(length // size)
    if window is None:
        return sum(rows) * size**2
    return sum(row - max(0, row * size - window + 1) // size for row in rows) * size**2
