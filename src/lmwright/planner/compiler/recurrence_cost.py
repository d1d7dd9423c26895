"""Cost of the kernels of `tpu_mlstm`, `tpu_delta_rule` and `tpu_ssd`: chunks times cycles of one.

Cycles are those of the compiler's own schedule, as `benchmarks/recurrence_schedule.py` reads and
fits them; never less than the matrix units need for a chunk's products, nor than the memory needs
for what a kernel reads and writes.
"""

import math

from lmwright.hardware.chips import CHIPS, Rates
from lmwright.planner.compiler.hlo import Computation, Instruction, arrays

WAYS = {
    "mlstm": ("mlstm_fwd", "mlstm_states", "mlstm_bwd"),
    "delta_rule": ("delta_rule_fwd", "delta_rule_bwd"),
    "ssd": ("ssd_fwd", "ssd_bwd"),
}
"""Kernels of each recurrence."""
CYCLES: dict[str, dict[str, tuple[float, float, float]]] = {
    "v4": {
        "mlstm_fwd": (844, 9.58, 1.04),
        "mlstm_states": (487, 0.0, 1.38),
        "mlstm_bwd": (1093, 11.3, 0.833),
        "delta_rule_fwd": (576, 0, 1.11),
        "delta_rule_bwd": (609, 24, 0.95),
        "ssd_fwd": (154, 8.28, 0.571),
        "ssd_bwd": (409, 19.1, 0.599),
    },
    "v5e": {
        "mlstm_fwd": (681, 7.6, 0.5),
        "mlstm_states": (316, 0.0, 1.22),
        "mlstm_bwd": (675, 7.54, 0.736),
        "delta_rule_fwd": (597, 0, 0.944),
        "delta_rule_bwd": (552, 17.1, 0.809),
        "ssd_fwd": (122, 4.45, 0.583),
        "ssd_bwd": (339, 15.4, 0),
    },
    "v5p": {
        "mlstm_fwd": (735, 7.69, 0.502),
        "mlstm_states": (386, 0.0, 1.18),
        "mlstm_bwd": (880, 8.09, 0.7),
        "delta_rule_fwd": (603, 0, 0.842),
        "delta_rule_bwd": (551, 18.3, 0.742),
        "ssd_fwd": (129, 4.4, 0.573),
        "ssd_bwd": (349, 15, 0),
    },
    "v6e": {
        "mlstm_fwd": (686, 5.24, 1.13),
        "mlstm_states": (327, 0.0, 2.31),
        "mlstm_bwd": (814, 6.81, 0.552),
        "delta_rule_fwd": (535, 3.81, 2.19),
        "delta_rule_bwd": (525, 18, 1.9),
        "ssd_fwd": (91.9, 3.7, 1.86),
        "ssd_bwd": (307, 11.2, 0),
    },
    "7x": {
        "mlstm_fwd": (581, 6.43, 1.31),
        "mlstm_states": (326, 0.0, 2.21),
        "mlstm_bwd": (902, 5.27, 0.599),
        "delta_rule_fwd": (460, 15.7, 1.92),
        "delta_rule_bwd": (563, 6.81, 2.22),
        "ssd_fwd": (92.8, 3.46, 2.15),
        "ssd_bwd": (291, 11.8, 0),
    },
}
"""Cycles of one core for a chunk of L tokens of a head, by generation and kernel: (a, b, c) stands
for a + b L^2 / 1000 + c times the least."""


def least_cycles(generation: str, way: str, size: int, key_dim: int, head_dim: int) -> float:
    """Cycles of the matrix units of one core for the products of a chunk of a head."""
    pairs, memory = size**2 * (key_dim + head_dim), size * key_dim * head_dim
    inverse = 3 * size**3 * (math.log2(size) - 1)  # two of half the rows a level, in three passes
    products = {
        "mlstm_fwd": pairs + 2 * memory,
        "mlstm_states": memory,
        "mlstm_bwd": size**2 * (3 * key_dim + 2 * head_dim) + 4 * memory,
        "delta_rule_fwd": 2 * pairs + 3 * memory + inverse,
        "delta_rule_bwd": size**2 * (5 * key_dim + 4 * head_dim) + 6 * memory,
        # eight heads of a step share products of pairs of tokens with c and b
        "ssd_fwd": size**2 * (key_dim / 8 + head_dim) + 2 * memory,
        "ssd_bwd": size**2 * (3 * key_dim / 8 + 2 * head_dim) + 5 * memory,
    }[way]
    rates = CHIPS[generation].rates
    return 2 * products * rates.clock_hz * rates.cores / CHIPS[generation].peak.bf16_flops


def way_of(step: Instruction) -> str | None:
    """The kernel that an instruction runs; None for others."""
    known = (way for ways in WAYS.values() for way in ways)
    return next((way for way in known if way in step.name + step.op_name), None)


def of_call(
    step: Instruction, holder: Computation, way: str, generation: str, rates: Rates
) -> float:
    """Seconds of a kernel on a device, from its marks [..., chunks, 8, L] and the queries or keys
    and the values behind them, [..., T, K] and [..., T, H]; of state spaces [..., T, G K] and
    [..., T, N H], and memories [B, chunks, K, N H]."""
    given = [holder.by_name[name] for name in step.operands if name in holder.by_name]
    *several, _, size = arrays(given[0].shape)[0][1]
    values = 2 if way == "mlstm_states" else 3
    key_dim, head_dim = (arrays(given[i].shape)[0][1][-1] for i in (1, values))
    if way in WAYS["ssd"]:
        every = [sizes for each in (step, *given) for _, sizes in arrays(each.shape)]
        memories = (sizes for sizes in every if len(sizes) == 4)
        head_dim, key_dim = head_dim // several[1], next(memories, (0, 0, key_dim))[2]
    moved = step.nbytes + sum(each.nbytes for each in given)
    return mlstm_s(generation, rates, way, math.prod(several), size, key_dim, head_dim, moved)


def mlstm_s(
    generation: str, rates: Rates, way: str, chunks: int, size: int, key_dim: int, head_dim: int,
    moved_bytes: float,
) -> float:  # fmt: skip
    """Seconds of a kernel for `chunks` chunks of all heads and rows. Raises ValueError for a chip
    that does not run it."""
    if generation not in CYCLES:
        raise ValueError(f"{generation}: no kernel of {way}")
    a, b, c = CYCLES[generation][way]
    least = least_cycles(generation, way, size, key_dim, head_dim)
    cycles = max(a + b * size**2 / 1000 + c * least, least)
    by_cycles = chunks * cycles / (rates.kernel_share * rates.clock_hz * rates.cores)
    return max(by_cycles, moved_bytes / rates.hbm_bytes_per_s)
