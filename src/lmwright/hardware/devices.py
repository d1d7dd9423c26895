"""Devices of the analytic model other than TPU chips: GPUs, CPU cores, data-center networks.

Peaks and memory of the devices themselves are in `hardware.chips`. Rates are the vendors',
one way, in bytes per second; the GPUs' efficiencies are assumed, the core's rates come from one
measured run.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU and what joins it to others."""

    device_kind: str
    """Key of `hardware.chips.PEAKS`."""
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    """NVLink (PCIe for the L4) to the GPUs of its node, all links together."""
    network_bytes_per_s: float
    """Its share of the node's network."""
    per_node: int = 8


# https://www.nvidia.com/en-us/data-center/{a100,h100,h200,dgx-b200,l4}; NVLink figures there
# count both directions. Networks are those of the DGX systems: HDR 200, NDR 400 Gbit/s a GPU.
GPUS = {
    "a100": Gpu(device_kind="NVIDIA A100-SXM4-80GB", hbm_bytes_per_s=2039e9,
                link_bytes_per_s=300e9, network_bytes_per_s=25e9),
    "a100-40gb": Gpu(device_kind="NVIDIA A100-SXM4-40GB", hbm_bytes_per_s=1555e9,
                     link_bytes_per_s=300e9, network_bytes_per_s=25e9),
    "h100": Gpu(device_kind="NVIDIA H100 80GB HBM3", hbm_bytes_per_s=3350e9,
                link_bytes_per_s=450e9, network_bytes_per_s=50e9),
    "h200": Gpu(device_kind="NVIDIA H200", hbm_bytes_per_s=4800e9,
                link_bytes_per_s=450e9, network_bytes_per_s=50e9),
    "b200": Gpu(device_kind="NVIDIA B200", hbm_bytes_per_s=8000e9,
                link_bytes_per_s=900e9, network_bytes_per_s=50e9),
    "l4": Gpu(device_kind="NVIDIA L4", hbm_bytes_per_s=300e9,
              link_bytes_per_s=32e9, network_bytes_per_s=3e9),
}  # fmt: skip
GPU_MATMUL_EFFICIENCY = 0.65
GPU_ATTENTION_EFFICIENCY = 0.4

GPU_MEMORY_SHARE = 0.75
"""Of a GPU's memory, JAX takes this unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."""

# Per TPU chip. v5e and v6e: https://cloud.google.com/tpu/docs/v5e (6.4 Tbit/s a pod of 256),
# https://cloud.google.com/tpu/docs/v6e (25.6); v4 and v5p: 200 Gbit/s a host of four chips;
# the others are assumed equal to a neighbor.
NETWORK_BYTES_PER_S = {
    "v2": 3.1e9,
    "v3": 3.1e9,
    "v4": 6.25e9,
    "v5e": 3.1e9,
    "v5p": 6.25e9,
    "v6e": 12.5e9,
    "7x": 12.5e9,
}


@dataclass(frozen=True, kw_only=True)
class Core:
    """One core of a server CPU."""

    flops: float
    """float32 multiply-adds, counted as two operations, per second, that XLA's products reach."""
    memory_bytes_per_s: float


CORE = Core(flops=100e9, memory_bytes_per_s=8e9)
"""A core with AVX-512: so that 135M on two of them gives the 176 tokens a second of
docs/internals/cpu-training.md. Machines differ by a factor of two and more."""
