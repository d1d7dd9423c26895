"""Inference by several devices, each of which has all weights and computes rows of its own.

    arrays [N, ...] --one of N for each device--> the program of one device --> arrays [N, ...]

The other way, weights that lie on several devices together, is `core.spread`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from lmwright.core.param import Tree, map_params
from lmwright.core.spread import computing, num_devices_of, one_has_room, refuse_missing

COPIES = "copies"
"""The only axis of the mesh."""
T = TypeVar("T")


def copies_shardings(spec: Tree, num_copies: int) -> Tree:
    """Shardings of a spec tree: whole on each of so many devices of this machine."""
    mesh = Mesh(np.array(jax.local_devices()[:num_copies]), (COPIES,))
    return map_params(lambda _: NamedSharding(mesh, P()), spec)


def count_copies(model: Any, asked: int | None, itemsize: int = 2) -> int:
    """The number of this machine's devices that have a copy of the weights each: as many as are
    `asked` for, else all (of CPUs, which are one, one); one where it has too little memory for
    weights of `itemsize` bytes. Raises UserError for more than there are."""
    there = jax.local_devices()
    if asked is None:
        asked = 1 if there[0].platform == "cpu" else len(there)
    refuse_missing(asked)
    return asked if one_has_room(model, itemsize) else 1


def num_copies_of(w: Tree) -> int:
    """Devices that have all weights each."""
    return 1 if (mesh := _mesh_of(w)) is None else mesh.size


def one_copy(w: Tree) -> Tree:
    """The weights on one of the devices that have all of them."""
    return w if _mesh_of(w) is None else jax.tree.map(lambda a: a.addressable_data(0), w)


def num_sharing(w: Tree) -> int:
    """Devices that hold a copy of the weights together."""
    return num_devices_of(w) if num_copies_of(w) == 1 else 1


def computing_with(w: Tree) -> Any:
    """A context in which programs are traced for weights as they lie: on one device, as copies
    (`on_each`), or spread over several."""
    mesh = _mesh_of(w)
    return computing(num_sharing(w)) if mesh is None else use_abstract_mesh(mesh.abstract_mesh)


def on_each(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """`fn(w, ...)` of one device as a function of N, whose results and arguments behind `w`, which
    every device has whole, have an axis N in front. N is 1 unless `computing_with` copies."""

    def one(w: Tree, *args: Tree) -> Tree:
        args = jax.tree.map(lambda a: a[0], args)
        return jax.tree.map(lambda a: a[None], fn(w, *args))

    def each(w: Tree, *args: Tree) -> Tree:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.axis_names != (COPIES,):
            return one(w, *args)

        def alone(w: Tree, *args: Tree) -> Tree:
            with use_abstract_mesh(AbstractMesh((), (), abstract_device=mesh.abstract_device)):
                return one(w, *args)

        specs = (P(), *(P(COPIES) for _ in args))
        run = jax.shard_map(alone, mesh=mesh, in_specs=specs, out_specs=P(COPIES), check_vma=False)
        return run(w, *args)

    return each


def zeros_on_each(shapes: Tree, w: Tree) -> Tree:
    """Zeros [N, ...] of such shapes, one of N beside each copy of the weights."""
    count, mesh = num_copies_of(w), _mesh_of(w)
    place = None if mesh is None else NamedSharding(mesh, P(COPIES))
    return jax.tree.map(lambda a: jnp.zeros((count, *a.shape), a.dtype, device=place), shapes)


def dealt(items: Iterable[T], num_copies: int) -> Iterator[tuple[list[T], list[T]]]:
    """Groups of as many items as there are copies, each as it is and filled up by its first item,
    which devices that have no other compute in vain."""
    rest = iter(items)
    while some := list(islice(rest, num_copies)):
        yield some, some + some[:1] * (num_copies - len(some))


def stacked(trees: Sequence[Tree]) -> Tree:
    """Trees of host arrays of the same shapes as one, with an axis N in front."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def _mesh_of(w: Tree) -> Mesh | None:
    """The mesh of copies; None where there is one of the weights."""
    sharding = getattr(next(iter(jax.tree.leaves(w)), None), "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) and mesh.axis_names == (COPIES,) else None
