"""The weights that training starts from, where they are not left to chance, and what tells them
from others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from lmwright.core.param import Tree, first_difference, walk
from lmwright.errors import UserError
from lmwright.formats.load import load_model
from lmwright.formats.open import RUN, Place
from lmwright.formats.run_dir import load_run_weights


def refuse_unlike(place: Place, spec: Tree) -> None:
    """UserError unless the weights of a place have the names and shapes of `spec`."""
    shapes = ({name: p.shape for name, p in walk(tree)} for tree in (spec, place.model.spec()))
    if difference := first_difference(*shapes):
        name, want, have = difference
        raise UserError(
            f"{name} is {have} in {place.path} and {want} in this run's model; "
            "leave [model] out, or change only what no weight depends on"
        )


def host_weights(place: Place) -> Tree:
    """float32 host arrays. Raises UserError where they cannot be read."""
    if place.kind == RUN:  # of which no tokenizer is wanted
        _, w = load_run_weights(place.path, place.step)
    else:
        w = load_model(place.path).weights
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), w)


def placed_weights(place: Place, shardings: Tree) -> Tree:
    """float32 arrays on devices as `shardings` say; files are read tensor by tensor, so that no
    host holds them all."""
    if place.kind != RUN:
        return load_model(place.path).load(dtype=jnp.float32, shardings=shardings)

    def put(leaf: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(put, host_weights(place), shardings)


def weights_hash(w: Tree, rounded_to: Any = None) -> str:
    """Hash of all weights by their names, as float32 or first rounded to a dtype."""
    digest = xxhash.xxh3_128()
    for name, array in walk(w):
        add_to_hash(digest, name, array if rounded_to is None else array.astype(rounded_to))
    return digest.hexdigest()


def add_to_hash(digest: xxhash.xxh3_128, name: str, array: np.ndarray) -> None:
    """One weight more, as float32."""
    digest.update(name.encode())
    digest.update(np.ascontiguousarray(array, np.float32).data)
