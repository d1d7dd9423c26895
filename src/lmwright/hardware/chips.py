"""Peaks of accelerators, keyed by the `device_kind` string that JAX reports.

All figures are for one JAX device: a whole chip, except on v2, v3 and 7x, where a device is
one of the chip's two TensorCores (v4 and v5p join theirs: megacore). TPU peaks are the
vendor's, which equal MXUs x 2 x side^2 x clock; GPU peaks are dense, without sparsity.
A device that is not listed has no known peak, and MFU is then left out rather than guessed.
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak performance of one device."""

    bf16_flops: float
    """Multiply-adds in bfloat16, counted as two operations, per second."""
    hbm_bytes: int
    """Memory on the device."""

    usable_bytes: int = 0
    """What the TPU compiler lets a program use, as its out-of-memory message says; 0 where
    that is not known."""


_V5E = Peak(bf16_flops=197e12, hbm_bytes=16 * GIB, usable_bytes=16_911_433_728)
_V5P = Peak(bf16_flops=459e12, hbm_bytes=95 * GIB, usable_bytes=102_800_042_229)
_V6E = Peak(bf16_flops=918e12, hbm_bytes=32 * GIB, usable_bytes=33_554_432_000)

PEAKS = {
    "TPU v2": Peak(bf16_flops=46e12 / 2, hbm_bytes=8 * GIB),
    "TPU v3": Peak(bf16_flops=123e12 / 2, hbm_bytes=16 * GIB, usable_bytes=16_621_523_435),
    "TPU v4": Peak(bf16_flops=275e12, hbm_bytes=32 * GIB, usable_bytes=33_017_561_088),
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": Peak(bf16_flops=2307e12 / 2, hbm_bytes=96 * GIB, usable_bytes=101_737_037_824),
    "NVIDIA A100-SXM4-40GB": Peak(bf16_flops=312e12, hbm_bytes=40 * GIB),
    "NVIDIA A100-SXM4-80GB": Peak(bf16_flops=312e12, hbm_bytes=80 * GIB),
    "NVIDIA L4": Peak(bf16_flops=121e12, hbm_bytes=24 * GIB),
    "NVIDIA H100 80GB HBM3": Peak(bf16_flops=989e12, hbm_bytes=80 * GIB),
    "NVIDIA H200": Peak(bf16_flops=989e12, hbm_bytes=141 * 10**9),
    "NVIDIA B200": Peak(bf16_flops=2250e12, hbm_bytes=180 * 10**9),
}


def peak_of(device_kind: str) -> Peak | None:
    """Peak of the device kind as JAX spells it; None where it is not known (every CPU)."""
    return PEAKS.get(device_kind)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one device of a TPU generation, for `plan`."""

    clock_hz: float
    """bf16 peak over 2 x side^2 x number of MXUs."""
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    """One way over one link between chips."""
    cycles_share: float
    """The compiler's cycles over those that published runs took, of all that the core does."""
    clock_known: bool = True
    """Where not, `cycles_share` makes up for it, in kernels as well."""
    cores: int = 1
    """TensorCores of the device."""
    attention_cycles: float = 1.8e-3
    """Of one core, beyond the matrix units' own, for each score and product of the attention
    kernel; see `plan.kernel_cost`."""

    @property
    def kernel_share(self) -> float:
        """The share for cycles of a kernel's final schedule, which nothing beats."""
        return min(1.0, self.cycles_share) if self.clock_known else self.cycles_share

    matmul_efficiency: float = 0.8
    """Share of the peak that a large model's products reach, for the answer without a compiler."""
    attention_efficiency: float = 0.5
    """The same of the attention kernel; assumed."""


# Clocks, HBM and link rates are the vendor's (v6e's and 7x's clocks: assumed). cycles_share and
# matmul_efficiency are fitted by `benchmarks/plan_accuracy.py --fit` to one published run each for
# v4, v5e, v5p and v6e; v2 and v3 take v4's share, 7x v5p's, and their efficiencies are assumed.
# Above one, the chip, or the published run's tiles and layouts, are better than the compiler
# expects of our program.
# HBM and link rates: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm
RATES = {
    "v2": Rates(clock_hz=0.7e9, hbm_bytes_per_s=350e9, link_bytes_per_s=62e9,
                cycles_share=0.895, matmul_efficiency=0.8),
    "v3": Rates(clock_hz=0.94e9, hbm_bytes_per_s=450e9, link_bytes_per_s=82e9,
                cycles_share=0.895, matmul_efficiency=0.8),
    "v4": Rates(clock_hz=1.05e9, hbm_bytes_per_s=1228e9, link_bytes_per_s=45e9,
                cycles_share=0.895, cores=2, matmul_efficiency=0.765),
    "v5e": Rates(clock_hz=1.5e9, hbm_bytes_per_s=819e9, link_bytes_per_s=45e9,
                 cycles_share=1.162, matmul_efficiency=0.833),
    "v5p": Rates(clock_hz=1.75e9, hbm_bytes_per_s=2765e9, link_bytes_per_s=90e9,
                 cycles_share=1.254, cores=2, matmul_efficiency=0.929),
    "v6e": Rates(clock_hz=1.75e9, hbm_bytes_per_s=1640e9, link_bytes_per_s=90e9,
                 cycles_share=1.203, clock_known=False, matmul_efficiency=0.685),
    "7x": Rates(clock_hz=2.2e9, hbm_bytes_per_s=3690e9, link_bytes_per_s=90e9,
                cycles_share=1.254, matmul_efficiency=0.8),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AttentionCycles:
    """Cycles of one core for `kernels/tpu_row_attention.py`."""

    forward: float
    """For 1,000 scores below the blocks of the diagonal."""
    backward: float
    around_forward: float
    """For each token of a head beside these, the diagonal among it."""
    around_backward: float


def _cycles(*numbers: float) -> AttentionCycles:
    names = ("forward", "backward", "around_forward", "around_backward")
    return AttentionCycles(**dict(zip(names, numbers, strict=True)))


# By generation and head size, blocks of 512 tokens, bfloat16: libtpu's own schedule, as
# `benchmarks/attention_schedule.py` reads it.
ROW_ATTENTION = {
    "v4": {
        64: _cycles(6.34, 8.71, 3.39, 5.17),
        96: _cycles(6.86, 10.03, 3.80, 5.96),
        128: _cycles(7.38, 11.17, 4.24, 6.67),
        256: _cycles(10.87, 19.17, 6.85, 12.24),
    },
    "v5e": {
        64: _cycles(4.20, 6.43, 2.17, 4.01),
        96: _cycles(4.77, 7.72, 2.63, 4.94),
        128: _cycles(5.45, 8.90, 2.88, 5.49),
        256: _cycles(8.63, 17.77, 5.20, 11.22),
    },
    "v5p": {
        64: _cycles(4.26, 6.45, 2.29, 4.09),
        96: _cycles(4.90, 7.77, 2.67, 5.00),
        128: _cycles(5.49, 8.81, 3.01, 5.86),
        256: _cycles(8.62, 17.11, 5.29, 11.37),
    },
    "v6e": {
        64: _cycles(3.21, 4.22, 1.71, 2.70),
        96: _cycles(3.48, 4.76, 1.88, 3.03),
        128: _cycles(3.50, 4.92, 1.92, 3.26),
        256: _cycles(4.54, 6.63, 2.78, 4.63),
    },
    "7x": {
        64: _cycles(2.98, 4.14, 1.60, 2.51),
        96: _cycles(3.10, 4.42, 1.77, 2.78),
        128: _cycles(3.26, 4.71, 1.96, 2.92),
        256: _cycles(4.12, 6.13, 2.70, 4.29),
    },
}


@dataclass(frozen=True, kw_only=True)
class SplashCycles:
    """Cycles of one core for 1,000 scores of the blocks that JAX's splash kernel visits, as
    `kernels/tpu_attention.py` chooses them."""

    fwd: float
    bwd: float
    """All three gradients, in one kernel."""


# By generation and head size, from the same schedules (`--splash`).
SPLASH = {
    "v4": {96: SplashCycles(fwd=9.4, bwd=13.3), 256: SplashCycles(fwd=18.03, bwd=26.47)},
    "v5e": {256: SplashCycles(fwd=13.43, bwd=21.70)},
    "v5p": {128: SplashCycles(fwd=5.55, bwd=10.16)},
    "v6e": {128: SplashCycles(fwd=4.09, bwd=6.35)},
}
LONG_ROWS = {"dkv": 0.84, "dq": 0.66}
"""The two backward kernels of rows too long for one, in its cycles: 5.29 and 4.44 of 6.35 on v6e,
8.56 and 6.25 of 10.16 on v5p, with heads of 128."""
