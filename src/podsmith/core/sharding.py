"""Sharding: two tables keyed by axis name, one for weights and one for activations.

A weight's axes come from its arrow; an activation's from `constrain(x, "batch seq embed")`.
A name that is in no table is an error, not silent replication.
"""

from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podsmith.core.param import Param, Tree, map_params
from podsmith.errors import UserError

AXES = ("data", "stage", "fsdp", "expert", "context", "tensor")  # outermost first

Entry = None | str | tuple[str, ...]

WEIGHTS: dict[str, Entry] = {
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    "head_dim": None,
    "norm": None,
    "layers": None,
    "blocks": None,
}

ACTIVATIONS: dict[str, Entry] = {
    "batch": ("data", "fsdp", "expert"),
    "seq": "context",
    "embed": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": "tensor",
}


def partition(axes: tuple[str, ...], table: dict[str, Entry]) -> PartitionSpec:
    """PartitionSpec of named axes; each mesh axis is used once, by the first that asks."""
    used: set[str] = set()
    entries = []
    for name in axes:
        if name not in table:
            raise ValueError(f"axis {name!r} is in no sharding table")
        entry = table[name]
        wanted = (entry,) if isinstance(entry, str) else entry or ()
        free = tuple(a for a in wanted if a not in used)
        used.update(free)
        entries.append(free if len(free) > 1 else free[0] if free else None)
    return PartitionSpec(*entries)


def weight_shardings(spec: Tree, mesh: Mesh) -> Tree:
    """NamedShardings of a spec tree. Raises UserError where a dimension does not divide."""

    def one(param: Param) -> NamedSharding:
        parts = partition(param.axes, WEIGHTS)
        for name, size, entry in zip(param.axes, param.shape, parts, strict=True):
            ways = _ways(mesh, entry)
            if size % ways:
                raise UserError(
                    f"mesh.{entry}: {ways} does not divide the {size} of axis {name!r} "
                    f"({param.arrow!r}); choose a divisor of {size}"
                )
        return NamedSharding(mesh, parts)

    return map_params(one, spec)


def lenient_shardings(spec: Tree, mesh: Mesh) -> Tree:
    """The same, with dimensions that do not divide left whole."""

    def one(param: Param) -> NamedSharding:
        entries = partition(param.axes, WEIGHTS)
        fit = [
            entry if size % _ways(mesh, entry) == 0 else None
            for size, entry in zip(param.shape, entries, strict=True)
        ]
        return NamedSharding(mesh, PartitionSpec(*fit))

    return map_params(one, spec)


def _ways(mesh: Mesh, entry: Entry) -> int:
    names = (entry,) if isinstance(entry, str) else entry or ()
    ways = 1
    for name in names:
        ways *= mesh.shape[name]
    return ways


def batch_ways(mesh: Mesh) -> int:
    """How many pieces the batch is cut into."""
    return _ways(mesh, ACTIVATIONS["batch"])


def batch_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Sharding of [*leading, B, T] token arrays."""
    return NamedSharding(mesh, PartitionSpec(*[None] * leading, ACTIVATIONS["batch"], None))


def constrain(x: Array, axes: str) -> Array:
    """Pins the sharding of an activation; without a mesh of several devices, `x` itself."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition(tuple(axes.split()), ACTIVATIONS))


def replicated(mesh: Mesh, tree: Any) -> Any:
    """The same fully replicated sharding for every leaf."""
    return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), tree)
