"""Inference over several devices of one machine, spread by the compiler.

    weights cut along heads, mlp and vocab --> a program without a mesh of its own --> the compiler
    adds the sums over devices, and cuts keys and values along heads, too

Nothing has to divide: what does not lies on each device. Kernels, which a compiler cannot cut, are
left out (`SPREAD`).
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, use_abstract_mesh

from lmwright.core.param import Tree, is_param
from lmwright.core.sharding import AXES, NO_MESH, lenient_shardings
from lmwright.errors import UserError

SPREAD = AbstractMesh((), (), abstract_device=AbstractDevice("several", None, "several"))
"""Tells `by_platform` that several devices compute: it takes plain operations."""
ROOM = 0.75  # of a device's memory, for weights; the rest is for caches and activations


def computing(num_devices: int) -> Any:
    """A context in which a program is traced for one device, or to be spread over several."""
    return use_abstract_mesh(SPREAD if num_devices > 1 else NO_MESH)


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
