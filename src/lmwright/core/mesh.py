"""Mesh: devices laid out along the six axes, from what the run asks for."""

import math
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import Mesh as DeviceMesh

from lmwright.config.run import Mesh
from lmwright.core.sharding import AXES
from lmwright.errors import UserError


def mesh_shape(mesh: Mesh, num_devices: int, num_slices: int = 1) -> dict[str, int]:
    """Sizes of all axes for `num_devices` of so many slices. Raises UserError where no such
    mesh exists.

    Of several slices, `data` takes those that `stage` does not, unless it is set or no axis
    is left as rest: no other axis may cross them.
    """
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    rest = mesh.rest_axis()
    if sizes["data"] == 1 and rest not in (None, "stage"):
        sizes["data"] = num_slices // math.gcd(num_slices, sizes["stage"])
    fixed = math.prod(size for size in sizes.values() if size != "rest")
    if num_devices % fixed or (rest is None and fixed != num_devices):
        nearest = max(d for d in range(1, num_devices + 1) if num_devices % d == 0 and d <= fixed)
        raise UserError(
            f"mesh: {fixed} devices asked for, {num_devices} are there; "
            f"the product must be {num_devices} or, with one axis left as rest, a divisor of it "
            f"(nearest: {nearest})"
        )
    return {a: num_devices // fixed if size == "rest" else size for a, size in sizes.items()}


def make_mesh(shape: dict[str, int], devices: Sequence[jax.Device]) -> DeviceMesh:
    """A device mesh in the order of AXES, sharding left to the compiler (auto).

    Raises UserError where an axis other than data and stage would cross slices, whose network
    is a hundred times slower than the links within one.
    """
    sizes = tuple(shape[axis] for axis in AXES)
    if devices[0].platform == "tpu":
        array = _tpu_devices(shape, devices)
    else:
        array = np.asarray(devices, dtype=object).reshape(sizes)
    return DeviceMesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _tpu_devices(shape: dict[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Devices such that neighbors on an axis are neighbors on the torus."""
    from jax.experimental import mesh_utils

    num_slices = num_slices_of(devices)
    across = slices_of(shape, num_slices)
    within = [shape[axis] // across.get(axis, 1) for axis in AXES]
    if num_slices == 1:
        make = partial(mesh_utils.create_device_mesh, within, devices)
    else:
        outer = [across.get(axis, 1) for axis in AXES]
        make = partial(mesh_utils.create_hybrid_device_mesh, within, outer, devices)
    try:
        return make()
    except NotImplementedError:  # not a product of whole torus axes: some links are shared
        return make(allow_split_physical_axes=True)


def num_slices_of(devices: Sequence[jax.Device]) -> int:
    """Number of TPU slices that the devices belong to; 1 for other devices."""
    if devices[0].platform != "tpu":
        return 1
    return len({getattr(device, "slice_index", 0) for device in devices})


def slices_of(shape: dict[str, int], num_slices: int) -> dict[str, int]:
    """Number of slices that each of data and stage crosses; data takes as many as it can."""
    data = math.gcd(shape["data"], num_slices)
    stage = num_slices // data
    if shape["stage"] % stage:
        fit = math.lcm(shape["data"], num_slices // math.gcd(num_slices, shape["stage"]))
        raise UserError(
            f"mesh.data: {shape['data']} and mesh.stage: {shape['stage']} cannot be cut over "
            f"{num_slices} slices, and no other axis may cross them (the network between slices "
            f"is slow); nearest: mesh.data={fit}"
        )
    return {"data": data, "stage": stage}
