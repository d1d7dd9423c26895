"""Links: how fast a collective's bytes reach a device of a group, over the torus of chips.

A slice is a torus where its sides allow it and a grid otherwise:

    o - o - o - o -.      an axis that wraps: bytes come in over two links
    '--------------'
    o - o - o - o         one that does not: the chip at the end has a single link

Meshes are laid out on whole torus axes (`jax.experimental.mesh_utils`), so that a group is
taken to span the axes whose sides multiply to its size, as many of them as can be.
"""

import itertools
import math
import re
from functools import cache

from lmwright.hardware.slices import Slice
from lmwright.planner.compiler.hlo import Computation, Instruction, placed_arrays, usual_share

# what the compiler says of a collective that goes around one ring through all its devices
_RING = re.compile(r'"emitter":"1D|"strategy":"(?:StrategyRing|UniDirection1DRing)')
CUBE = 4  # v4, v5p and 7x are built of 4x4x4 cubes, and wrap where they are whole


@cache
def links_of(group: int, where: Slice) -> float:
    """Links over which one device of a group of `group` devices receives."""
    per_chip = where.family.devices_per_chip
    chips = max(1, group // per_chip)
    axes = spanned(chips, where)
    if axes is None:
        return 1.0
    return max(1, sum(2 if wraps(side, where) else 1 for side in axes)) / per_chip


def spanned(chips: int, where: Slice) -> tuple[int, ...] | None:
    """Sides of the torus axes that a group of `chips` covers; None where no axes multiply to
    it."""
    sides = [side for side in where.shape if side > 1]
    for count in range(len(sides), 0, -1):
        for axes in itertools.combinations(sides, count):
            if math.prod(axes) == chips:
                return axes
    return () if chips == 1 else None


def wraps(side: int, where: Slice) -> bool:
    """True if a torus axis of this length is a ring."""
    if where.family.pod_side:
        return side == where.family.pod_side
    return all(length % CUBE == 0 for length in where.shape)


def transfer_s(
    kind: str, step: Instruction, holder: Computation, where: Slice, link_bytes_per_s: float
) -> float:
    """Seconds that a collective's bytes need on the links of one device."""
    given = sum(holder.by_name[o].nbytes for o in step.operands if o in holder.by_name)
    if kind == "ragged-all-to-all":  # of the smaller one, as many rows as usually are in a round
        rows, into = (holder.by_name[o].nbytes for o in step.operands[:2])
        given = min(rows, into) * usual_share(step)
    if kind == "collective-permute":
        return given / link_bytes_per_s
    group = group_size(step, where.num_devices)
    share = (group - 1) / max(group, 1)
    if kind.endswith("all-to-all"):
        return all_to_all_s(given, group, where, link_bytes_per_s)
    received = {
        "all-gather": step.nbytes * share if step.opcode == kind else given * (group - 1),
        "reduce-scatter": given * share,
        # scattered as it is given, then gathered as it is kept, which may be narrower
        "all-reduce": (given + min(given, step.nbytes)) * share,
    }[kind]
    links = links_of(group, where)
    if _RING.search(step.rest):
        links = min(links, 2 / where.family.devices_per_chip)
    return received / (links * link_bytes_per_s)


def all_to_all_s(given: float, group: int, where: Slice, link_bytes_per_s: float) -> float:
    """Seconds of an all-to-all of `given` bytes of each device of a group: half of what leaves a
    half of the longest axis crosses its middle."""
    axes = spanned(max(1, group // where.family.devices_per_chip), where) or (group,)
    side = max(axes, default=1)
    return given * side / (8 if wraps(side, where) else 4) / link_bytes_per_s


def group_size(step: Instruction, devices: int) -> int:
    """Devices that take part in a collective together; all of them if it does not say."""
    text = step.rest.split("replica_groups=")[-1] if "replica_groups=" in step.rest else ""
    if text.startswith("mesh["):  # mesh['a'=2,'b'=8] {'b'}: the named axes
        sizes = {k: int(v) for k, v in re.findall(r"'(\w+)'=(\d+)", text.split("]")[0])}
        named = re.findall(r"'(\w+)'", text.split("]")[1].split("}")[0])
        return math.prod(sizes[name] for name in named)
    if match := re.match(r"\[(\d+),(\d+)\]", text):  # [groups, members]<=[...]
        return int(match[2])
    if match := re.match(r"\{\{([\d,]+)\}", text):
        return len(match[1].split(","))
    return devices


HOST_MEMORY = "S(5)"  # in a layout


def host_bytes(step: Instruction, holder: Computation) -> tuple[str, int] | None:
    """(way, bytes) of an instruction that starts a transfer to or from the host's memory."""
    if not step.opcode.endswith("-start") or HOST_MEMORY not in step.shape:
        return None
    kind = step.opcode.removesuffix("-start")
    if kind == "dynamic-update-slice":
        piece = holder.by_name.get(step.operands[1])
        return "to host", piece.nbytes if piece else 0
    if kind not in ("dynamic-slice", "copy"):
        return None
    parts = placed_arrays(step.shape)
    if kind == "copy":  # (result, operand, context)
        return ("to host" if HOST_MEMORY in parts[0][0] else "from host"), parts[0][1]
    return "from host", next(size for text, size in parts if HOST_MEMORY not in text)
