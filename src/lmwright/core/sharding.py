"""Sharding: two tables keyed by axis name, one for weights and one for activations.

A weight's axes come from its arrow; an activation's from `constrain(x, "batch seq embed")`.
A name that is in no table is an error, not silent replication.

    data     rows                            crosses slices; weights are whole on each copy
    stage    layers
    fsdp     rows; weights along `embed`     gathered for use
    expert   as fsdp, but experts stay apart: no gather
    context  tokens of a row; weights as fsdp
    tensor   heads, mlp, vocab; the residual stream (`stream`) is cut along tokens in between

The mesh is made here too, with devices along these six axes as the run asks. Code that depends on
the platform asks the mesh for the kind of its devices.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)
from jax.tree_util import DictKey, tree_map_with_path

from lmwright.config.registry import Registry
from lmwright.config.run import Mesh as MeshSizes
from lmwright.core.param import Param, Tree, is_param, map_params
from lmwright.errors import UserError

AXES = ("data", "stage", "fsdp", "expert", "context", "tensor")  # outermost first
NO_MESH = AbstractMesh((), ())  # for what one device computes by itself
SEVERAL = "several"  # the platform where the compiler spreads a program
SPREAD = Registry("lmwright.core", {"over heads": "spread.over_heads"})
PIECES = 8  # of a sum over devices, so that no copy of all of it exists

Entry = None | str | tuple[str, ...]

WEIGHTS: dict[str, Entry] = {
    "embed": ("fsdp", "expert", "context"),
    "vocab": "tensor",
    "distances": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "gate_up": None,
    "qkv": None,
    "experts": "expert",
    "head_dim": None,
    "norm": None,
    "layers": "stage",
    "blocks": None,
    "gates": None,
    "rank": None,
}

ACTIVATIONS: dict[str, Entry] = {
    "stages": "stage",
    "batch": ("data", "fsdp", "expert"),
    "seq": "context",
    "stream": ("context", "tensor"),
    "embed": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "gate_up": None,
    "qkv": None,
    "distances": None,
    "vocab": "tensor",
    "gates": None,
    "rank": None,
    "experts": None,  # of a token: all of them, or the ones it chose
}


def partition(axes: tuple[str, ...], table: dict[str, Entry]) -> PartitionSpec:
    """PartitionSpec of named axes; each mesh axis is used once, by the first that asks."""
    used: set[str] = set()
    entries = []
    for name in axes:
        if name not in table:
            raise ValueError(f"axis {name!r} is in no sharding table")
        wanted = (entry,) if isinstance(entry := table[name], str) else entry or ()
        free = tuple(a for a in wanted if a not in used)
        used.update(free)
        entries.append(free if len(free) > 1 else free[0] if free else None)
    return PartitionSpec(*entries)


def weight_shardings(spec: Tree, mesh: Mesh) -> Tree:
    """NamedShardings of a spec tree; layers apart from most (`core.stack`) that do not divide over
    stages lie on each. Raises UserError where another dimension does not divide."""

    def one(path: tuple, param: Param) -> NamedSharding:
        parts = list(partition(param.axes, WEIGHTS))
        if param.axes[:1] == ("layers",) and DictKey("layers") not in path:
            parts[0] = parts[0] if param.shape[0] % _ways(mesh, parts[0]) == 0 else None
        for name, size, entry in zip(param.axes, param.shape, parts, strict=True):
            refuse_uneven(mesh, entry, size, f"{size} of axis {name!r} ({param.arrow!r})")
        return NamedSharding(mesh, PartitionSpec(*parts))

    return tree_map_with_path(one, spec, is_leaf=is_param)


def lenient_shardings(spec: Tree, mesh: Mesh) -> Tree:
    """Shardings in which dimensions that do not divide are left unsharded."""

    def one(param: Param) -> NamedSharding:
        entries = partition(param.axes, WEIGHTS)
        fit = [
            entry if size % _ways(mesh, entry) == 0 else None
            for size, entry in zip(param.shape, entries, strict=True)
        ]
        return NamedSharding(mesh, PartitionSpec(*fit))

    return map_params(one, spec)


def axes_of(entry: Entry) -> tuple[str, ...]:
    """The mesh axes of an entry of the tables."""
    return (entry,) if isinstance(entry, str) else entry or ()


def _ways(mesh: Mesh | AbstractMesh, entry: Entry) -> int:
    return math.prod(1 if mesh.empty else mesh.shape[name] for name in axes_of(entry))


def refuse_uneven(mesh: Mesh, entry: Entry, size: int, what: str) -> None:
    """Raises UserError, with the nearest counts that are possible, where the axes of an entry
    together do not divide `size`."""
    ways = _ways(mesh, entry)
    if size % ways == 0:
        return
    cut = [name for name in axes_of(entry) if mesh.shape[name] > 1]
    fit = [d for d in range(1, min(size, mesh.size) + 1) if size % d == 0 and mesh.size % d == 0]
    nearest = sorted(sorted(fit, key=lambda d: abs(d - ways))[:2])
    raise UserError(
        f"mesh.{' x mesh.'.join(cut)}: {ways} does not divide the {what}; on {mesh.size} "
        f"devices the nearest that {'does' if len(nearest) == 1 else 'do'}: "
        f"{', '.join(map(str, nearest))}"
    )


def context_ways() -> int:
    """Number of shards of the rows in the program being traced."""
    return _ways(jax.sharding.get_abstract_mesh(), "context")


def tensor_ways() -> int:
    """Number of shards of heads and of mlps in the program being traced."""
    return _ways(jax.sharding.get_abstract_mesh(), "tensor")


def batch_ways(mesh: Mesh | AbstractMesh) -> int:
    """Number of shards of the batch."""
    return _ways(mesh, ACTIVATIONS["batch"])


def batch_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Sharding of [*leading, B, T] token arrays."""
    tokens = partition(("batch", "seq"), ACTIVATIONS)
    return NamedSharding(mesh, PartitionSpec(*[None] * leading, *tokens))


def constrain(x: Array, axes: str) -> Array:
    """Pins the sharding of an activation; without a mesh of several devices, `x` itself."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition(tuple(axes.split()), ACTIVATIONS))


def gathered(w: Array, axes: str) -> Array:
    """A weight as matmuls read it: whole along the mesh axes over which tokens are cut."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return w
    tokens = {name for axis in ("batch", "seq") for name in axes_of(ACTIVATIONS[axis])}
    cuts = [axes_of(entry) for entry in partition(tuple(axes.split()), WEIGHTS)]
    whole = [tuple(name for name in cut if name not in tokens) or None for cut in cuts]
    return jax.lax.with_sharding_constraint(w, PartitionSpec(*whole))


def token_chunks(a: Array, chunk: int) -> Array:
    """[B, T, ...] to [T/C, B, C, ...]; where rows are cut over devices, a chunk has an equal
    part of each device's tokens."""
    (b, t), ways = a.shape[:2], context_ways()
    pieces = a.reshape(b, ways, t // chunk, chunk // ways, *a.shape[2:])
    return jnp.moveaxis(pieces, 2, 0).reshape(t // chunk, b, chunk, *a.shape[2:])


def join_chunks(a: Array) -> Array:
    """Inverse of `token_chunks`: [T/C, B, C, ...] to [B, T, ...]."""
    (num, b, chunk), ways = a.shape[:3], context_ways()
    pieces = a.reshape(num, b, ways, chunk // ways, *a.shape[3:])
    return jnp.moveaxis(pieces, 0, 2).reshape(b, num * chunk, *a.shape[3:])


@dataclass(frozen=True)
class TokenShards:
    """Token shards of [B, T, ...] as an axis S of their own: what each device sums over its own
    tokens is [S, ...], so that a loop need not add it up over devices at every turn. With one shard
    there is no such axis."""

    rows: int = 1
    tokens: int = 1

    @classmethod
    def of(cls, x: Array) -> "TokenShards":
        """Shards of x [B, T, ...] in the program being traced."""
        mesh = jax.sharding.get_abstract_mesh()
        even = not mesh.empty and x.shape[0] % batch_ways(mesh) == 0
        return cls(batch_ways(mesh), context_ways()) if even else cls()

    @property
    def count(self) -> int:
        """S."""
        return self.rows * self.tokens

    def vjp(self, fn: Callable[..., Any], *args: Any) -> tuple[Any, Callable[..., Any]]:
        """`jax.vjp` of `fn` mapped over the shards, each of which is computed by one device."""
        if self.count == 1:
            return jax.vjp(fn, *args)

        def pull_back(g: Any) -> Any:
            with use_abstract_mesh(NO_MESH):
                return pull(g)

        with use_abstract_mesh(NO_MESH):
            out, pull = jax.vjp(jax.vmap(fn), *args)
        return out, pull_back

    def split(self, a: Array) -> Array:
        """[B, T, ...] to [S, B', T', ...]."""
        if self.count == 1:
            return a
        (b, t), rest = a.shape[:2], a.shape[2:]
        parts = a.reshape(self.rows, b // self.rows, self.tokens, t // self.tokens, *rest)
        return self._pin(jnp.moveaxis(parts, 2, 1).reshape(self.count, -1, *parts.shape[3:]))

    def join(self, a: Array) -> Array:
        """Inverse of `split`."""
        if self.count == 1:
            return a
        (b, t), rest = a.shape[1:3], a.shape[3:]
        parts = jnp.moveaxis(a.reshape(self.rows, self.tokens, b, t, *rest), 1, 2)
        return parts.reshape(self.rows * b, self.tokens * t, *rest)

    def repeat(self, w: Array) -> Array:
        """[S, ...] of an array that every shard reads, or sums to."""
        return w if self.count == 1 else self._pin(jnp.broadcast_to(w, (self.count, *w.shape)))

    def total(self, sums: Array) -> Array:
        """The sum over all shards."""
        if self.count == 1:
            return sums
        if tensor_ways() > 1:
            return jnp.sum(sums, axis=0)
        axis = max(range(1, sums.ndim), key=lambda i: sums.shape[i])
        size = sums.shape[axis] // math.gcd(sums.shape[axis], PIECES)
        piece = lambda i: jax.lax.dynamic_slice_in_dim(sums, i * size, size, axis)  # noqa: E731
        count = sums.shape[axis] // size
        totals = jax.lax.map(lambda i: jnp.sum(piece(i), axis=0), jnp.arange(count))
        return jnp.moveaxis(totals, 0, axis - 1).reshape(sums.shape[1:])

    def _pin(self, a: Array) -> Array:
        tokens = (*axes_of(ACTIVATIONS["batch"]), *axes_of(ACTIVATIONS["seq"]))
        rest = [PartitionSpec.UNCONSTRAINED] * (a.ndim - 1)
        return jax.lax.with_sharding_constraint(a, PartitionSpec(tokens, *rest))


def by_shard(local: Callable[..., Array], *more: str) -> Callable[..., Array]:
    """Attention `local(q, k, v, seen)`, run by every device of the mesh, if it has several, on what
    it holds of q [B, T, N, H], k, v [B, T, K, H], ids or intervals [B, T], and of axes `more`."""
    heads, kv_heads = "batch seq heads head_dim", "batch seq kv_heads head_dim"
    arrays = (heads, kv_heads, kv_heads, "batch seq", *more)
    axes = [tuple(names.split()) for names in arrays]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return SPREAD["over heads"](local, axes) if platform() == SEVERAL else local
    specs = tuple(partition(names, ACTIVATIONS) for names in axes)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)


def mesh_shape(mesh: MeshSizes, num_devices: int, num_slices: int = 1) -> dict[str, int]:
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
            f"mesh: asks for {fixed} devices, and there are {num_devices}; "
            f'the product must be {num_devices} or, with one axis set to "rest", a divisor of it '
            f"(nearest: {nearest})"
        )
    return {a: num_devices // fixed if size == "rest" else size for a, size in sizes.items()}


def make_mesh(shape: dict[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """A device mesh in the order of AXES, sharding left to the compiler (auto).

    Raises UserError where an axis other than data and stage would cross slices, whose network
    is a hundred times slower than the links within one.
    """
    sizes = tuple(shape[axis] for axis in AXES)
    if devices[0].platform == "tpu":
        array = _tpu_devices(shape, devices)
    else:
        array = np.asarray(devices, dtype=object).reshape(sizes)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


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


def device_kind() -> str:
    """Kind of the mesh's devices, such as "TPU v4"; empty without a mesh."""
    return getattr(jax.sharding.get_abstract_mesh().abstract_device, "device_kind", "")


def platform() -> str:
    """Platform of the mesh's devices, such as "gpu"; empty without a mesh."""
    return getattr(jax.sharding.get_abstract_mesh().abstract_device, "platform", "")


def by_platform(*args: Array, default: Callable[..., Any], **branches: Callable[..., Any]) -> Any:
    """Result of the branch for the mesh's platform (`cpu`, `gpu`, `tpu`), or of `default`.

    Without a mesh the compiler chooses. With one it must not: every branch would be traced, and a
    collective inside such a choice may deadlock on CPUs once the program comes from a cache.
    """
    if here := platform():
        return branches.get(here, default)(*args)
    branches = {"cuda" if name == "gpu" else name: run for name, run in branches.items()}
    return lax.platform_dependent(*args, default=default, **branches)
