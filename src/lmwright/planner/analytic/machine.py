"""Machine: equal devices and what joins them, as the analytic model sees them.

    v4-32, tpu:v4-32, 2xv5e-256     TPU slices, see hardware.slices
    gpu:h200x8, gpu:h100x64         GPUs, eight to a node
    cpu:8                           eight cores of one host: one JAX device
    cpu                             the cores of this host
    kaggle                          a v5e-8 in sessions of nine hours

A kind is what is bought: a TPU generation, a GPU, `cpu`.
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, combinations

from lmwright.errors import UserError
from lmwright.hardware.chips import GIB
from lmwright.hardware.devices import (
    CORE,
    GPU_ATTENTION_EFFICIENCY,
    GPU_MATMUL_EFFICIENCY,
    GPU_MEMORY_SHARE,
    GPUS,
    cores_here,
)
from lmwright.hardware.slices import Slice, parse_slice
from lmwright.planner.compiler.links import links_of

VECTOR_BYTES_PER_CYCLE = 585  # of a TensorCore; benchmarks/plan_quick.py

# names of cards themselves first: "rtx4090" is no 4090 cards of the name "rt"
_GPU = re.compile(rf"({'|'.join(GPUS)}|[a-z0-9-]+?)(?:x(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates are of one device, one way, in bytes or operations per second."""

    name: str
    kind: str
    """Generation or GPU: the key of the price table."""
    platform: str
    """JAX's name for it: tpu, gpu or cpu."""
    num_chips: int
    """Number of units paid for by the hour: chips, GPUs, cores."""
    num_devices: int
    num_groups: int = 1
    """Slices or nodes: within one, devices have links; between them, the network."""
    flops: float
    vector_bytes_per_s: float
    """Bytes per second that the vector units process, at most the rate of the memory."""
    memory_bytes_per_s: float
    matmul_efficiency: float
    attention_efficiency: float
    link_bytes_per_s: float
    """Rate of one link; a GPU's links count as one."""
    network_bytes_per_s: float
    host_bytes_per_s: float = 16e9
    """Rate between a device and the memory of its host."""
    host_memory_bytes: float | None = None
    """Memory of the host for each device; None where that is not known."""
    usable_bytes: int | None = None
    """Memory of a device that a program may use; None where it is the host's."""
    shape: tuple[int, ...] = ()
    """Devices along each axis of one slice's torus; empty where there is none."""
    where: Slice | None = None
    """The TPU slice that it is, if it is one."""
    device_kind: str = ""
    """JAX's name of GPUs that are there, which may not be in the tables."""
    packed_share: float | None = None
    """Time of attention in a run's packed rows, as a share of that in rows of one document; None
    where that is not known."""

    @property
    def unit(self) -> str:
        """Unit that is counted and paid for."""
        return {"tpu": "chip", "gpu": "GPU", "cpu": "core"}[self.platform]

    @property
    def group_size(self) -> int:
        """Devices of one slice or node."""
        return self.num_devices // self.num_groups

    def links(self, ways: int) -> float:
        """Links on which a device receives from `ways` devices of its slice or node."""
        return links_of(ways, self.where) if self.where else 1.0

    def fits_torus(self, sizes: Mapping[str, int]) -> bool:
        """True if each mesh axis is a product of whole torus axes once `data` has taken the slices;
        otherwise axes share links. Also true without a torus."""
        if not self.shape:
            return True
        within = dict(sizes)
        within["data"] //= math.gcd(within["data"], self.num_groups)
        return _assignable(tuple(n for n in within.values() if n > 1), self.shape)


def _assignable(sizes: tuple[int, ...], sides: tuple[int, ...]) -> bool:
    if not sizes:
        return True
    first, rest = sizes[0], sizes[1:]
    axes, counts = range(len(sides)), range(1, len(sides) + 1)
    for indices in chain.from_iterable(combinations(axes, count) for count in counts):
        if math.prod(sides[i] for i in indices) == first:
            left = tuple(side for i, side in enumerate(sides) if i not in indices)
            if _assignable(rest, left):
                return True
    return False


@dataclass(frozen=True)
class Alias:
    """A place that people name instead of its machine."""

    name: str
    hours: float
    """Length of one session."""
    note: str


KAGGLE = Alias(
    "v5e-8", 9.0, "kaggle: a v5e-8 with sessions of 9 hours; free there, so the cost is what the "
    "same chips cost elsewhere"
)  # fmt: skip


def known_as(text: str) -> Alias | None:
    """The machine and session that a place offers; None where `text` is a machine itself."""
    return KAGGLE if text.strip().lower() == "kaggle" else None


def parse_machine(text: str) -> Machine:
    """The machine that `text` names. Raises UserError with the nearest names otherwise."""
    word = text.strip().lower()
    if alias := known_as(word):
        word = text = alias.name
    if word.startswith("gpu:"):
        return _gpu(text, word.removeprefix("gpu:"))
    if word == "cpu":
        return _cpu(text, str(cores_here()))
    if word.startswith("cpu:"):
        return _cpu(text, word.removeprefix("cpu:"))
    bare = _GPU.fullmatch(word.removeprefix("nvidia-"))
    if bare and bare[1] in GPUS:
        raise UserError(
            f"--on {text}: unknown machine; did you mean gpu:{bare[1]}x{bare[2] or 8}? TPU slices "
            f"look like v4-32 or v5e-8"
        )
    if word in ("gpu", "cuda", "nvidia"):
        raise UserError(f"--on {text}: name the GPU and how many: {_gpus(8)}")
    return machine_of(parse_slice(text))


def _gpus(count: int) -> str:
    return ", ".join(f"gpu:{name}x{count}" for name in GPUS)


def machine_of(where: Slice) -> Machine:
    """A TPU slice as a machine."""
    chip = where.family
    rates, peak, per_chip = chip.rates, chip.peak, chip.devices_per_chip
    return Machine(
        name=where.name,
        kind=where.generation,
        platform="tpu",
        num_chips=where.num_chips,
        num_devices=where.num_devices,
        num_groups=where.num_slices,
        flops=peak.bf16_flops,
        usable_bytes=peak.usable_bytes or peak.hbm_bytes,
        memory_bytes_per_s=rates.hbm_bytes_per_s,
        vector_bytes_per_s=min(
            rates.hbm_bytes_per_s,
            rates.cores * rates.clock_hz * max(1.0, rates.kernel_share) * VECTOR_BYTES_PER_CYCLE,
        ),
        matmul_efficiency=rates.matmul_efficiency,
        attention_efficiency=rates.attention_efficiency,
        link_bytes_per_s=rates.link_bytes_per_s,
        network_bytes_per_s=chip.network_bytes_per_s / per_chip,
        host_bytes_per_s=rates.host_bytes_per_s,
        host_memory_bytes=chip.host_gib * GIB / per_chip,
        shape=tuple(n for n in (*where.shape, per_chip) if n > 1),
        where=where,
    )


def _gpu(text: str, word: str) -> Machine:
    match = _GPU.fullmatch(word)
    name = match[1] if match else word
    if name not in GPUS:
        count = (match[2] if match else None) or "8"
        if len(count) > 3:  # of a name such as rtx4080
            name, count = word, "1"
        close = difflib.get_close_matches(name, GPUS, n=1, cutoff=0.6)
        cure = f"did you mean gpu:{close[0]}x{count}? " if close else ""
        raise UserError(
            f"--on {text}: there is no GPU {name}; {cure}the GPUs are {_gpus(int(count))}"
        )
    gpu, count = GPUS[name], int(match[2] or 1)
    nodes = max(1, math.ceil(count / gpu.per_node))
    if count < 1 or count % nodes or (nodes > 1 and count % gpu.per_node):
        raise UserError(
            f"--on {text}: {count} GPUs do not fill nodes of {gpu.per_node}; nearest: "
            f"gpu:{name}x{max(1, round(count / gpu.per_node)) * gpu.per_node}"
        )
    peak = gpu.peak
    return Machine(
        name=f"gpu:{name}x{count}",
        kind=name,
        platform="gpu",
        num_chips=count,
        num_devices=count,
        num_groups=nodes,
        flops=peak.bf16_flops,
        usable_bytes=int(peak.hbm_bytes * GPU_MEMORY_SHARE),
        vector_bytes_per_s=gpu.hbm_bytes_per_s,
        memory_bytes_per_s=gpu.hbm_bytes_per_s,
        matmul_efficiency=GPU_MATMUL_EFFICIENCY,
        attention_efficiency=GPU_ATTENTION_EFFICIENCY,
        link_bytes_per_s=gpu.link_bytes_per_s,
        network_bytes_per_s=gpu.network_bytes_per_s,
    )


def _cpu(text: str, word: str) -> Machine:
    if not word.isdecimal() or int(word) < 1:
        raise UserError(f"--on {text}: write the number of cores, as in cpu:8")
    cores = int(word)
    return Machine(
        name=f"cpu:{cores}",
        kind="cpu",
        platform="cpu",
        num_chips=cores,
        num_devices=1,
        flops=cores * CORE.flops,
        vector_bytes_per_s=cores * CORE.memory_bytes_per_s,
        memory_bytes_per_s=cores * CORE.memory_bytes_per_s,
        matmul_efficiency=1.0,
        attention_efficiency=0.5,
        link_bytes_per_s=math.inf,
        network_bytes_per_s=math.inf,
    )
