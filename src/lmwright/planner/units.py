"""Units: bytes, seconds and settings as people read them, small ones too."""

from lmwright.config.run import Train
from lmwright.hardware.chips import GIB

MIB = 2**20
SMALL = 0.1  # of a second; below, milliseconds


def memory_size(size: float, whole: float | None = None, width: int = 0) -> str:
    """Bytes as GiB, or MiB where the whole that they are a part of has less than one GiB."""
    unit, unit_bytes = memory_unit(size if whole is None else whole)
    return f"{size / unit_bytes:{width}.2f} {unit}"


def memory_unit(size: float) -> tuple[str, int]:
    """The unit of a size, and its bytes."""
    return ("GiB", GIB) if size >= GIB else ("MiB", MIB)


def duration(seconds: float, step_s: float, width: int = 0) -> str:
    """Seconds of a part of a step, or milliseconds where the whole step takes few."""
    unit, per_s = step_unit(step_s)
    return f"{seconds * per_s:{width}.3f} {unit}"


def step_unit(step_s: float) -> tuple[str, int]:
    """The unit of a step's time, and how many of them a second has."""
    return ("s", 1) if step_s >= SMALL else ("ms", 1000)


def short_duration(seconds: float) -> str:
    """Seconds with three digits, or all before the point; milliseconds where there are few."""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= SMALL else f"{1000 * seconds:.3g} ms"


def mesh_text(sizes: dict[str, int]) -> str:
    """The mesh axes that have several devices, as text."""
    text = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    return text or "of one device"


HOST_SHARE = 0.8
"""Fraction of the host's memory that may be pinned for devices: the rest is for Python, data and
saves."""


def fits_host(host_bytes: float, memory_bytes: float | None) -> bool:
    """True if what a device keeps on its host fits into its part of the host's memory."""
    return memory_bytes is None or host_bytes <= HOST_SHARE * memory_bytes


def host_lines(host_bytes: float, memory_bytes: float | None) -> list[str]:
    """The line of a report about the host's memory; none where nothing is put there."""
    if not host_bytes:
        return []
    line = f"  {memory_size(host_bytes, width=8)}  of the host's memory for each device"
    if memory_bytes is None:
        return [line]
    line += f", which has {memory_size(memory_bytes)}"
    over = "" if fits_host(host_bytes, memory_bytes) else f": more than {HOST_SHARE:.0%} of it"
    return [line + over]


def saves_text(train: Train) -> str:
    """Settings by which a run stores what its backward pass reads, as text."""
    inputs = train.block_inputs
    fewer = "" if inputs == "exact" else f", block inputs in {inputs}, which changes gradients"
    return f"remat {train.fixed_remat}{fewer}"


def bus_line(moved_bytes: float, step_s: float, bytes_per_s: float, exposed_s: float) -> str:
    """The line about transfers of a step between a device and its host, `moved_bytes` both ways
    together: their time on the bus, and the seconds that arithmetic does not hide."""
    each_way = moved_bytes / 2
    return (
        f"  {memory_size(each_way, width=8)}  to the host and back in a step: "
        f"{each_way / step_s / 1e9:.2g} of {bytes_per_s / 1e9:.0f} GB/s each way, "
        f"{duration(exposed_s, step_s)} of it exposed"
    )
