"""Inference over several devices of one machine, spread by the compiler.

    weights cut along heads, mlp and vocab --> a program without a mesh of its own --> the compiler
    adds the sums over devices, and cuts keys and values along heads, too

Nothing has to divide: what does not lies on each device. Kernels, which a compiler cannot cut,
compute heads of their own on each device (`over_heads`), or with a part of each expert
(`over_parts`); of others the plain twin is taken (`by_platform`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from lmwright.core.compute import EARLY
from lmwright.core.param import Tree, is_param
from lmwright.core.sharding import AXES, NO_MESH, SEVERAL, lenient_shardings
from lmwright.errors import UserError

CUT, SAME = "cut", "same"
"""Axes of the devices of a kernel: those that have parts of their own, and others with the same."""
CUT_AXES = ("heads", "kv_heads")
ROOM = 0.75  # of a device's memory, for weights; the rest is for caches and activations


def computing(num_devices: int, device_kind: str | None = None) -> Any:
    """A context in which a program is traced for one device, or to be spread over several; of this
    machine, or of kind `device_kind`."""
    kind = device_kind or jax.devices()[0].device_kind
    if num_devices == 1:
        return use_abstract_mesh(_one_device(kind))
    several = AbstractDevice(kind, num_devices, SEVERAL)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=several))


def _one_device(kind: str) -> AbstractMesh:
    """For a program of one device, whose compiler chooses by platform. Kinds that lack some kernels
    are named, since it does not know them."""
    if kind not in EARLY:
        return NO_MESH
    return AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, ""))


def over_heads(
    local: Callable[..., Array], axes: Sequence[tuple[str, ...]]
) -> Callable[..., Array]:
    """`core.sharding.by_shard` of arrays with these axes in a program that is spread: each device
    computes its part of the heads, of all rows; of a count that does not divide over all devices,
    the same as others."""
    specs = tuple(P(*(CUT if name in CUT_AXES else None for name in names)) for names in axes)

    def run(*arrays: Any) -> Array:
        num_heads, num_kv_heads = (a.shape[2] for a in arrays[:2])
        ways = _ways_of(num_heads)
        times = math.lcm(num_kv_heads, ways) // num_kv_heads  # keys of few heads are repeated
        arrays = tuple(
            jnp.repeat(a, times, names.index("kv_heads")) if "kv_heads" in names else a
            for names, a in zip(axes, arrays, strict=True)
        )
        return _by_each(ways, local, specs, specs[0])(*arrays)

    return run


def over_parts(
    local: Callable[..., Array], w: dict[str, Any], axes: Mapping[str, int], *arrays: Array
) -> Array:
    """Sum over devices of `local(w, *arrays, ways=)` in a program that is spread. Each device has
    a part of the trees in w that are named in `axes`, along an axis counted from the last one, and
    all else whole. `ways` is the number of parts: what each of them would add is divided by it."""

    def spec(a: Array, axis: int | None) -> P:
        return P(*(CUT if axis == i else None for i in range(-a.ndim, 0)))

    (size,) = {a.shape[axes[name]] for name in axes for a in jax.tree.leaves(w[name]) if a.ndim}
    ways = _ways_of(size)
    own = {name: jax.tree.map(partial(spec, axis=axes.get(name)), leaf) for name, leaf in w.items()}

    def summed(w: dict[str, Any], *arrays: Array) -> Array:
        return lax.psum(local(w, *arrays, ways=ways), CUT)

    return _by_each(ways, summed, (own, *(P() for _ in arrays)), P())(w, *arrays)


def _ways_of(size: int) -> int:
    """Devices over which so many divide, of those that the program is spread over."""
    return math.gcd(size, jax.sharding.get_abstract_mesh().abstract_device.num_cores)


def _by_each(
    ways: int, local: Callable[..., Array], in_specs: Any, out_specs: P
) -> Callable[..., Array]:
    """`local` as a program of one device, run by each with what it holds of arrays that are cut
    along CUT in so many ways."""
    devices = jax.sharding.get_abstract_mesh().abstract_device

    def alone(*arrays: Any) -> Array:
        with use_abstract_mesh(_one_device(devices.device_kind)):
            return local(*arrays)

    sizes, auto = (ways, devices.num_cores // ways), (AxisType.Auto,) * 2
    mesh = AbstractMesh(sizes, (CUT, SAME), axis_types=auto)
    return jax.shard_map(alone, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def num_devices_of(w: Tree) -> int:
    """Devices that hold the weights together."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(w) if isinstance(leaf, jax.Array)]
    return max((len(sharding.device_set) for sharding in shardings), default=1)


def spread_shardings(spec: Tree, devices: list[Any]) -> Tree:
    """Shardings of a spec tree over devices."""
    axes = (1,) * (len(AXES) - 1)
    return lenient_shardings(spec, Mesh(np.array(devices).reshape(*axes, -1), AXES))


def count_devices(model: Any, asked: int | None, where: str, itemsize: int = 2) -> int:
    """The number of this machine's devices that share a model's weights: as many as are `asked`
    for, else one, or all of them where one has too little memory for weights of `itemsize` bytes.
    Raises UserError for more devices than there are, and where several are too small."""
    if asked == 1:
        return 1
    there, spec = jax.local_devices(), model.spec()
    if asked is not None:
        refuse_missing(asked)
        return asked
    if len(there) == 1 or one_has_room(model, itemsize):
        return 1
    limit = there[0].memory_stats()["bytes_limit"]
    if (part := _largest_part(spec, there, itemsize)) > limit:
        raise UserError(
            f"{where}: the weights take {part / 2**30:.1f} GiB on each of {len(there)} devices, "
            f"which have {limit / 2**30:.1f}; take a larger machine"
        )
    return len(there)


def refuse_missing(asked: int) -> None:
    """Raises UserError for more devices than there are."""
    if asked > len(there := jax.local_devices()):
        raise UserError(
            f"--devices {asked}: this machine has {len(there)} ({there[0].device_kind}); give fewer"
        )


def one_has_room(model: Any, itemsize: int) -> bool:
    """True where one device has memory for all weights of a model, of `itemsize` bytes, or does not
    say how much it has."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return limit is None or _largest_part(model.spec(), [device], itemsize) <= ROOM * limit


def _largest_part(spec: Tree, devices: list[Any], itemsize: int) -> int:
    """Bytes of the weights on one device."""
    shardings = spread_shardings(spec, devices)
    parts = jax.tree.map(
        lambda param, sharding: math.prod(sharding.shard_shape(param.shape)),
        spec, shardings, is_leaf=is_param,
    )  # fmt: skip
    return int(sum(jax.tree.leaves(parts))) * itemsize
