"""Devices of the analytic model other than TPU chips: GPUs, CPU cores, data-center networks.

Rates are the vendors', one way, in bytes per second; GPU peaks are dense, without sparsity. The
GPUs' efficiencies are assumed, the core's rates come from one measured run.
"""

import os
from dataclasses import dataclass, replace

from lmwright.hardware.chips import CHIPS, GIB, Chip, Peak, Power, Price

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Card:
    """Numbers of a GPU that a compiler asks for."""

    capability: tuple[int, int]
    """Compute capability: 8.0 and 8.6 are Ampere, 8.9 Ada, 9.0 Hopper, 10.0 and 12.0 Blackwell."""
    cores: int
    """Streaming multiprocessors."""
    lanes_per_core: int
    threads_per_core: int
    shared_bytes: int
    """Shared memory of a core; a block may have 1 KiB less."""
    cache_bytes: int
    """Second-level cache."""
    clock_ghz: float


@dataclass(frozen=True)
class Gpu:
    """One GPU and what joins it to others."""

    device_kind: str
    """Name that JAX reports."""
    card: Card
    peak: Peak
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    """NVLink (PCIe where there is none) to the GPUs of its node, all links together."""
    network_bytes_per_s: float
    """Rate of its share of the node's network."""
    price: Price | None = None
    per_node: int = 8
    most_w: float = 0.0
    """Thermal design power, as its data sheet says."""


def _small(capability: tuple[int, int], cores: int, cache_mib: int, clock_ghz: float) -> Card:
    """A card for workstations and inference."""
    return Card(capability, cores, 128, 1536, 100 * KIB, cache_mib * MIB, clock_ghz)


SMALL_ECC = int(22.5 * GIB)
"""Memory left of 24 GiB of GDDR6 that corrects errors, as cards in data centers are set."""

# NVIDIA's CUDA programming guide (compute capabilities), data sheets and white papers
A100 = Card((8, 0), 108, 64, 2048, 164 * KIB, 40 * MIB, 1.41)
H100 = Card((9, 0), 132, 128, 2048, 228 * KIB, 50 * MIB, 1.98)
B200 = Card((10, 0), 148, 128, 2048, 228 * KIB, 126 * MIB, 1.965)

# https://www.nvidia.com/en-us/data-center/{a100,h100,h200,dgx-b200,l4,l40s}; NVLink figures there
# count both directions. Networks are those of the DGX systems (HDR 200, NDR 400 Gbit/s a GPU), or
# 25 Gbit/s for cards on PCIe.
# Peaks of GeForce cards are those with sums in float32, half of what is advertised.
# A price is that of the whole machine (a2-highgpu, a2-ultragpu, a3-highgpu, a3-ultragpu,
# g2-standard-4) over its GPUs; others have no list price by the hour there.
PRICES = {"a100": 5.07, "a100-40gb": 3.67, "h100": 11.06, "h200": 10.60, "l4": 0.71}  # USD an hour
WATTS = {
    "a100": 400, "a100-40gb": 400, "a100-pcie": 300, "h100": 700, "h100-pcie": 350, "h200": 700,
    "b200": 1000, "l4": 72, "l40s": 350, "a10g": 300, "a6000": 300, "rtx3090": 350,
    "rtx4090": 450, "rtx5090": 575,
}  # fmt: skip
GPUS = {
    # name: device kind, card, FLOP/s, memory, its bytes/s, of the links, of the network
    name: Gpu(
        kind, card, Peak(bf16_flops=flops, hbm_bytes=memory), *rates,
        PRICES.get(name) and Price(on_demand=PRICES[name]), most_w=WATTS[name],
    )
    for name, (kind, card, flops, memory, *rates) in {
        "a100": ("NVIDIA A100-SXM4-80GB", A100, 312e12, 80 * GIB, 2039e9, 300e9, 25e9),
        "a100-40gb": ("NVIDIA A100-SXM4-40GB", A100, 312e12, 40 * GIB, 1555e9, 300e9, 25e9),
        "a100-pcie": ("NVIDIA A100 80GB PCIe", A100, 312e12, 80 * GIB, 1935e9, 32e9, 3e9),
        "h100": ("NVIDIA H100 80GB HBM3", H100, 989e12, 80 * GIB, 3350e9, 450e9, 50e9),
        "h100-pcie": (
            "NVIDIA H100 PCIe", replace(H100, cores=114, clock_ghz=1.755),
            756e12, 80 * GIB, 2000e9, 64e9, 3e9,
        ),
        "h200": ("NVIDIA H200", H100, 989e12, 141 * 10**9, 4800e9, 450e9, 50e9),
        "b200": ("NVIDIA B200", B200, 2250e12, 180 * 10**9, 8000e9, 900e9, 50e9),
        "l4": ("NVIDIA L4", _small((8, 9), 58, 48, 2.04), 121e12, SMALL_ECC, 300e9, 32e9, 3e9),
        "l40s": (
            "NVIDIA L40S", _small((8, 9), 142, 96, 2.52),
            362e12, 2 * SMALL_ECC, 864e9, 32e9, 3e9,
        ),
        "a10g": ("NVIDIA A10G", _small((8, 6), 80, 6, 1.71), 70e12, SMALL_ECC, 600e9, 32e9, 3e9),
        "a6000": (
            "NVIDIA RTX A6000", _small((8, 6), 84, 6, 1.8), 155e12, 48 * GIB, 768e9, 32e9, 3e9,
        ),
        "rtx3090": (
            "NVIDIA GeForce RTX 3090", _small((8, 6), 82, 6, 1.695),
            71e12, 24 * GIB, 936e9, 32e9, 3e9,
        ),
        "rtx4090": (
            "NVIDIA GeForce RTX 4090", _small((8, 9), 128, 72, 2.52),
            165e12, 24 * GIB, 1008e9, 32e9, 3e9,
        ),
        "rtx5090": (
            "NVIDIA GeForce RTX 5090", _small((12, 0), 170, 96, 2.407),
            209.5e12, 32 * GIB, 1792e9, 64e9, 3e9,
        ),
    }.items()
}  # fmt: skip
GPU_MATMUL_EFFICIENCY = 0.65
GPU_ATTENTION_EFFICIENCY = 0.4

GPU_MEMORY_SHARE = 0.75
"""Fraction of a GPU's memory that JAX takes (XLA_PYTHON_CLIENT_MEM_FRACTION sets another)."""


PRICES_DATE = "2026-10"
"""Month of the list prices, which differ by region and contract; `plan.prices` and `--price` go
first."""


def price_of(kind: str) -> Price | None:
    """List price of a kind of machine (cloud.google.com/tpu/pricing and /compute/gpus-pricing,
    cheapest US region); None where there is none."""
    return (CHIPS.get(kind) or GPUS[kind]).price if kind in CHIPS or kind in GPUS else None


def chip_of(device_kind: str) -> Chip | None:
    """The TPU chip of a device kind as JAX spells it."""
    return next((c for c in CHIPS.values() if device_kind in c.device_kinds), None)


def gpu_name(device_kind: str) -> str | None:
    """Our name of the GPU of a device kind as JAX spells it, such as "h100"."""
    return next((name for name, gpu in GPUS.items() if gpu.device_kind == device_kind), None)


def gpu_of(device_kind: str) -> Gpu | None:
    """The GPU of a device kind as JAX spells it."""
    return GPUS.get(gpu_name(device_kind) or "")


def devices_per_chip(device_kind: str) -> int:
    """Devices that JAX sees of one chip; 1 where the kind is not known."""
    chip = chip_of(device_kind)
    return 1 if chip is None else chip.devices_per_chip


def chip_power(device_kind: str) -> Power | None:
    """Published power of a chip or GPU; None where there is none."""
    if (chip := chip_of(device_kind)) is not None:
        return chip.power
    gpu = gpu_of(device_kind)
    return None if gpu is None else Power(None, gpu.most_w, "the limit of its data sheet")


def peak_of(device_kind: str) -> Peak | None:
    """Peak of the device kind as JAX spells it. None where it is not known (every CPU), and MFU is
    then left out rather than guessed."""
    found = chip_of(device_kind) or gpu_of(device_kind)
    return None if found is None else found.peak


@dataclass(frozen=True, kw_only=True)
class Core:
    """One core of a server CPU."""

    flops: float
    """float32 multiply-adds, counted as two operations, per second, that XLA's products reach."""
    memory_bytes_per_s: float


CORE = Core(flops=100e9, memory_bytes_per_s=8e9)
"""A core with AVX-512: so that 135M on two of them gives the 176 tokens a second of
docs/internals/cpu-training.md. Machines differ by a factor of two and more."""


def cores_here() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
