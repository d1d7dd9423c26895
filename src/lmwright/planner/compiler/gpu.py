"""XLA's compiler for NVIDIA GPUs, on a host without one: JAX's CUDA plugin compiles for a card that
is described to it.

What a card would try out is not tried: which of several products or tiles is fastest. Memory does
not depend on that but for workspaces.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lmwright.errors import UserError, install
from lmwright.hardware.devices import GPUS, Gpu
from lmwright.kernels.select import KERNELS
from lmwright.planner.analytic.machine import Machine

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
# no card is looked for, and libraries that only run on one need not be there
ENVIRONMENT = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "CUDA_VISIBLE_DEVICES": ""}
# versions of cuDNN and of CUDA that the card is said to have; the compiler reads the capability
DNN, RUNTIME = (9, 10), (12, 9)


def has_cuda_compiler() -> bool:
    """True if JAX's plugin for CUDA is installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(plugin) is not None for plugin in PLUGINS)


def require_cuda_compiler() -> None:
    """Raises UserError where JAX's plugin for CUDA is not installed."""
    if not has_cuda_compiler():
        raise UserError(
            f"the compiler for CUDA is not installed; {install('cuda13')} (no GPU is needed)"
        )


def devices_of(machine: Machine) -> Sequence[Any]:
    """JAX's devices of a machine with GPUs, for compiling alone."""
    from jax.experimental import topologies

    shape = (1, machine.num_groups, machine.group_size)  # partitions, hosts, cards of a host
    return topologies.get_topology_desc(
        platform="cuda",
        topology="x".join(map(str, shape)),
        target_config=description(GPUS[machine.kind]),
    ).devices


@dataclass(frozen=True)
class DefaultDevice:
    """The part of a JAX device that libraries of kernels read."""

    device_kind: str
    compute_capability: str
    core_count: int
    platform: str = "gpu"


def without_card(machine: Machine, options: Mapping[str, str]) -> dict[str, str]:
    """More options for the compiler where there is no card: for sums in order, it would look for
    the sizes of its own products in Triton on one."""
    in_order = machine.platform == "gpu" and KERNELS["sums in order"](options)
    return {"xla_gpu_enable_triton_gemm": "False"} if in_order else {}


@contextmanager
def as_default_device(machine: Machine) -> Iterator[None]:
    """Lets libraries of kernels, which ask JAX for its default device, see a card of the machine
    while a program is traced for it. Nothing changes for a machine without GPUs."""
    if machine.kind not in GPUS:
        yield
        return
    from jax.extend import backend

    gpu, own = GPUS[machine.kind], backend.get_default_device
    major, minor = gpu.card.capability
    card = DefaultDevice(gpu.device_kind, f"{major}.{minor}", gpu.card.cores)
    backend.get_default_device = lambda: card
    try:
        with _known_to_pallas(card):
            yield
    finally:
        backend.get_default_device = own


@contextmanager
def _known_to_pallas(card: DefaultDevice) -> Iterator[None]:
    """Lets Pallas lower for a card that is not in its own list: JAX from 0.11 on takes only the
    compute capability of a device that is there."""
    try:
        from jax._src.pallas.triton import gpu_info
    except ImportError:  # earlier versions of JAX do not ask
        yield
        return
    name = "_get_device_arch_name"  # JAX's own, which may go: it then answers as if not told
    own = getattr(gpu_info, name, None)
    setattr(gpu_info, name, lambda device_kind: card.compute_capability)
    try:
        yield
    finally:
        setattr(gpu_info, name, own)


def description(gpu: Gpu) -> str:
    """The card as the compiler takes it: XLA's GpuTargetConfigProto as text."""
    card, (major, minor) = gpu.card, gpu.card.capability
    numbers = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": card.threads_per_core,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_core": card.shared_bytes,
        "shared_memory_per_block_optin": card.shared_bytes - 1024,
        "core_count": card.cores,
        "fpus_per_core": card.lanes_per_core,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": int(gpu.hbm_bytes_per_s),
        "l2_cache_size": card.cache_bytes,
        "clock_rate_ghz": card.clock_ghz,
        "device_memory_size": gpu.peak.hbm_bytes,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    lines = [f"{name}: {value}" for name, value in numbers.items()]
    lines.append(f"cuda_compute_capability {{ major: {major} minor: {minor} }}")
    version = lambda name, pair: f"{name} {{ major: {pair[0]} minor: {pair[1]} }}"  # noqa: E731
    return "\n".join([
        f"gpu_device_info {{ {' '.join(lines)} }}",
        'platform_name: "CUDA"',
        version("dnn_version_info", DNN),
        version("runtime_version", RUNTIME),
        f'device_description_str: "{gpu.device_kind}"',
    ])  # fmt: skip
