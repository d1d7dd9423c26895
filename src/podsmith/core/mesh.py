"""Mesh: devices laid out along the six axes, from what the run asks for."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import Mesh as DeviceMesh

from podsmith.core.sharding import AXES
from podsmith.errors import UserError
from podsmith.run import Mesh

READY = ("data", "fsdp", "tensor")


def mesh_shape(mesh: Mesh, num_devices: int) -> dict[str, int]:
    """Sizes of all axes for `num_devices`. Raises UserError where no such mesh exists."""
    said = {axis: getattr(mesh, axis) for axis in AXES}
    for axis, size in said.items():
        if axis not in READY and size != 1:
            raise UserError(
                f"mesh.{axis}: {size} is not available yet; use {', '.join(READY)} and leave it 1"
            )
    open_axes = [axis for axis, size in said.items() if size == "rest"]
    if len(open_axes) > 1:
        raise UserError(f'mesh: only one axis can be "rest", not {", ".join(open_axes)}')
    fixed = math.prod(size for size in said.values() if size != "rest")
    if num_devices % fixed or (not open_axes and fixed != num_devices):
        nearest = max(d for d in range(1, num_devices + 1) if num_devices % d == 0 and d <= fixed)
        raise UserError(
            f"mesh: {fixed} devices asked for, {num_devices} are there; "
            f"the product must be {num_devices} or, with one axis left as rest, a divisor of it "
            f"(nearest: {nearest})"
        )
    return {a: num_devices // fixed if size == "rest" else size for a, size in said.items()}


def make_mesh(shape: dict[str, int], devices: Sequence[jax.Device]) -> DeviceMesh:
    """A device mesh in the order of AXES, sharding left to the compiler (auto)."""
    sizes = tuple(shape[axis] for axis in AXES)
    if devices[0].platform == "tpu":
        from jax.experimental.mesh_utils import create_device_mesh

        array = create_device_mesh(sizes, devices=devices)
    else:
        array = np.asarray(devices, dtype=object).reshape(sizes)
    return DeviceMesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))
