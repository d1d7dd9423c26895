"""dots: products of the same activations with several weights, such as those of q, k and v."""

import jax
from jax import Array

from lmwright.core.compute import OPERAND
from lmwright.core.leaves import TYPED
from lmwright.core.sharding import constrain
from lmwright.core.weight import PRODUCTS, Weight, as_array, dot, name_of, name_result


def dots(x: Array, *products: tuple[str, Weight] | tuple[str, Weight, str]) -> tuple[Array, ...]:
    """`dot(eqn, x, w)` for each (eqn, w) or (eqn, w, name); x [B, T, D]."""
    eqns, weights = [product[0] for product in products], [product[1] for product in products]
    names = [product[2] if len(product) > 2 else name_of(product[0]) for product in products]
    mesh, x = jax.sharding.get_abstract_mesh(), name_result(x, OPERAND)
    typed = any(isinstance(w, TYPED) for w in weights)
    if mesh.empty or mesh.shape["tensor"] == 1 or typed:
        narrow = PRODUCTS["narrow"](x, weights) if typed else [None] * len(weights)
        each = zip(eqns, weights, names, narrow, strict=True)
        return tuple(dot(eqn, x, w, name=name, narrow=xa) for eqn, w, name, xa in each)
    x = constrain(x, "batch stream embed")  # which is what the backward pass keeps
    cast = tuple(as_array(w, x.dtype).astype(x.dtype) for w in weights)
    outputs = PRODUCTS["fan"](tuple(eqns), x, cast)
    return tuple(name_result(y, name) for y, name in zip(outputs, names, strict=True))
