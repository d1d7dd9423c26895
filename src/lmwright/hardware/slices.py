"""Topology: the name of a TPU slice, as people and clouds write it, to chips on a torus.

    v4-32        32 TensorCores, 16 chips 2x2x4      v5e-8       8 chips 2x4
    v4:2x2x4     the same, said outright             2xv5e-256   two slices

The number counts TensorCores (two a chip) for v2, v3, v4, v5p and 7x, and chips for v5e and
v6e (https://cloud.google.com/tpu/docs/system-architecture-tpu-vm).
"""

import difflib
import math
import re
from dataclasses import dataclass

from lmwright.errors import UserError
from lmwright.hardware.chips import CHIPS, Chip

ALIASES = {alias: chip.name for chip in CHIPS.values() for alias in chip.aliases}

_NAME = re.compile(r"(?:(\d+)x(?=v|tpu|7x))?([a-z0-9]+?)(?:-(\d+)|:([\dx]+))")


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Chips of one or several equal slices."""

    generation: str
    shape: tuple[int, ...]
    """Chips along each torus axis of one slice."""
    num_slices: int = 1

    @property
    def family(self) -> Chip:
        return CHIPS[self.generation]

    @property
    def num_chips(self) -> int:
        """Number of chips of all slices together."""
        return math.prod(self.shape) * self.num_slices

    @property
    def num_devices(self) -> int:
        """JAX devices of all slices together."""
        return self.num_chips * self.family.devices_per_chip

    @property
    def num_hosts(self) -> int:
        """Hosts of one slice, as the Cloud TPU API gives them."""
        chips, cloud = math.prod(self.shape), self.family.cloud
        alone = (4,) if cloud is None else cloud.alone
        return 1 if chips in alone else -(-chips // 4)

    @property
    def name(self) -> str:
        """The name clouds use where the shape has one, the shape otherwise."""
        chips = math.prod(self.shape)
        if self.family.layouts.get(chips) == self.shape:
            text = f"{self.generation}-{chips * self.family.count}"
        else:
            text = f"{self.generation}:{'x'.join(map(str, self.shape))}"
        return text if self.num_slices == 1 else f"{self.num_slices}x{text}"


def names_of(generation: str) -> list[str]:
    """The named slices of a generation, smallest first."""
    family = CHIPS[generation]
    return [f"{generation}-{chips * family.count}" for chips in family.layouts]


def parse_slice(text: str, others: str = "GPUs like gpu:h100x8, processors like cpu:8") -> Slice:
    """The slice that `text` names. Raises UserError with the nearest names otherwise, or with the
    `others` that may be named in its place."""
    word = text.strip().lower().removeprefix("tpu:")
    match = _NAME.fullmatch(word)
    generation = ALIASES.get(match[2], match[2]) if match else ""
    if generation not in CHIPS:
        raise UserError(f"--on {text}: unknown machine; {_nearest(word, others)}")
    slices = int(match[1] or 1)
    family = CHIPS[generation]
    if slices < 1:
        raise UserError(f"--on {text}: at least one slice is needed")
    if match[4]:
        return Slice(generation=generation, shape=_shape(text, match[4], family), num_slices=slices)
    chips, odd = divmod(int(match[3]), family.count)
    if odd or chips not in family.layouts:
        what = "TensorCores, two a chip" if family.count == 2 else "chips"
        raise UserError(
            f"--on {text}: {generation} has no slice of {match[3]} (the number counts {what}); "
            f"{_nearest_sizes(generation, int(match[3]))}, or give a shape as in "
            f"{generation}:{'x'.join(map(str, family.layouts[8 if 8 in family.layouts else 16]))}"
        )
    return Slice(generation=generation, shape=family.layouts[chips], num_slices=slices)


def _shape(text: str, shape_text: str, family: Chip) -> tuple[int, ...]:
    try:
        shape = tuple(int(side) for side in shape_text.split("x"))
    except ValueError:
        shape = ()
    sides = len(next(iter(family.layouts.values())))
    if len(shape) != sides or min(shape, default=0) < 1:
        example = "x".join(map(str, list(family.layouts.values())[1]))
        raise UserError(
            f"--on {text}: a {family.device_kind} slice has {sides} dimensions; write it as "
            f"{example}"
        )
    _refuse_shape(text, shape, family)
    return shape


def _refuse_shape(text: str, shape: tuple[int, ...], family: Chip) -> None:
    """Raises UserError for a shape that no slice has: it has a name, is a part of one host, or,
    on a torus of three axes, has multiples of 4 on each, the smallest first."""
    chips, known = math.prod(shape), list(family.layouts.values())
    part_of_host = chips <= 4 and max(shape) <= 2
    cubes = len(shape) == 3 and all(n % 4 == 0 for n in shape) and list(shape) == sorted(shape)
    if shape in known or part_of_host or (cubes and chips <= family.pod_chips):
        return
    named = sorted(known, key=lambda shape: abs(math.prod(shape) - chips))[:3]
    nearest = ", ".join("x".join(map(str, shape)) for shape in sorted(named, key=math.prod))
    rule = "; larger ones have multiples of 4, the smallest first" if len(shape) == 3 else ""
    raise UserError(
        f"--on {text}: there is no {family.device_kind} slice of this shape; nearest: "
        f"{nearest}{rule}"
    )


def _nearest(word: str, others: str) -> str:
    every = [name for generation in CHIPS for name in names_of(generation)]
    close = difflib.get_close_matches(word, every, n=3)
    if close:
        return f"nearest: {', '.join(close)}"
    return f"TPU slices look like v4-32 or v5e-8, {others}"


def _nearest_sizes(generation: str, size: int) -> str:
    names = sorted(names_of(generation), key=lambda n: abs(int(n.split("-")[1]) - size))[:3]
    return f"nearest: {', '.join(sorted(names, key=lambda n: int(n.split('-')[1])))}"


def topology_request(where: Slice) -> dict:
    """Keyword arguments of `jax.experimental.topologies.get_topology_desc`."""
    sides = (*where.shape, 1)[:3]
    request = {
        "platform": "tpu",
        "topology_name": f"{where.family.compiler_name}:{'x'.join(map(str, where.shape))}",
        "chips_per_host_bounds": (*(min(side, 2) for side in sides[:2]), 1),
    }
    if where.family.chip_config:
        request["chip_config_name"] = where.family.chip_config
    if where.num_slices > 1:
        request["num_slices"] = where.num_slices
    return request
