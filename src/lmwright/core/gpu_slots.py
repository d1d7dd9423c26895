"""Slots for the gradients of unrolled layers on GPUs, which wait for memory.

`core.weight.dot` casts a float32 weight to the activations' bfloat16, so its gradient is made in
bfloat16 and widened. Gradients of layers are stacked before they are widened, in half the bytes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from lmwright.core.param import Tree
from lmwright.core.stack import joint_gradients, unstacked

# of a layer's weight: on an H100 a 1B model took 2 % less time with copies of 32 MiB, a 135M
# model 2 % more with those of 2 MiB
LARGE_BYTES = 2**24
# what JAX calls arrays that gradients are asked of
DIFFERENTIATED = ("JVPTracer", "LinearizeTracer")
CALLS = ("jit", "pjit", "remat", "remat2", "checkpoint")
SAME_NUMBERS = ("reshape", "transpose", "squeeze", "expand_dims", "copy")


def slots_of(
    block: Callable[..., Any], layers: Tree, x: Array, *side: Any, summed: bool
) -> list[list[Array]]:
    """Slices [1, ...] of each leaf of stacked `layers`, whose gradients are stacked in the dtype in
    which `block` makes them: once, not in each pass that reads them, unless they are `summed` over
    microbatches, which does so by itself."""
    leaves = cast_as_gradients(block, layers, x, *side)
    return [_unstacked(leaf) for leaf in (leaves if summed else joint_gradients(*leaves))]


def cast_as_gradients(block: Callable[..., Any], layers: Tree, x: Array, *side: Any) -> list[Array]:
    """Leaves of stacked `layers`, each in the dtype of the gradient that `block` of a layer gives:
    what is stacked for them lies in this dtype."""
    leaves = jax.tree.leaves(layers)
    if not any(type(leaf).__name__ in DIFFERENTIATED for leaf in leaves):
        return leaves
    layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), layers)
    dtypes = gradient_dtypes(block, layer, x, *side)
    return [a.astype(dtype) for a, dtype in zip(leaves, dtypes, strict=True)]


def gradient_dtypes(block: Callable[..., Any], layer: Tree, x: Array, *side: Any) -> list[Any]:
    """The dtype in which the gradient of each leaf of `layer` (shapes of one layer's weights) is
    computed in the backward pass of `block(layer, x, *side)`."""
    leaves, tree = jax.tree.flatten(layer)
    wide = [i for i, leaf in enumerate(leaves) if leaf.dtype == jnp.float32]

    def gradients(given: list[Array], x: Array, *side: Any) -> list[Array]:
        def run(given: list[Array]) -> Any:
            every = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
            for i, a in zip(wide, given, strict=True):
                every[i] = a
            return block(jax.tree.unflatten(tree, every), x, *side)

        out, back = jax.vjp(run, given)
        return back(jax.tree.map(jnp.ones_like, out))[0]

    shapes = [jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in wide]
    traced = jax.make_jaxpr(gradients)(shapes, *map(_shapes_of, (x, *side))).jaxpr
    found = [leaf.dtype for leaf in leaves]
    for i, result in zip(wide, traced.outvars, strict=True):
        found[i] = _made_in(traced, result)
    return found


def _shapes_of(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), tree)


def _made_in(jaxpr: Any, result: Any) -> Any:
    """The dtype that a result of a program had before it was widened for the last time."""
    made_by = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    while not isinstance(result, core.Literal) and (eqn := made_by.get(result)):
        if eqn.primitive.name == "convert_element_type":
            return eqn.invars[0].aval.dtype
        if eqn.primitive.name in SAME_NUMBERS:
            result = eqn.invars[0]
        elif eqn.primitive.name in CALLS:
            inner = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
            return _made_in(inner, inner.outvars[eqn.outvars.index(result)])
        else:
            break
    return result.aval.dtype


def _unstacked(layers: Array) -> list[Array]:
    """`core.stack.unstacked`, by whichever way to stack the gradients is faster: large ones are
    copied behind the products that follow them."""
    large = layers.nbytes >= LARGE_BYTES * len(layers)
    return unstacked_in_place(layers) if large else unstacked(layers)


@jax.custom_vjp
def unstacked_in_place(layers: Array) -> list[Array]:
    """`core.stack.unstacked`, whose gradients are written into their stack one after the other."""
    return unstacked(layers)


def _unstacked_fwd(layers: Array) -> tuple[list[Array], None]:
    return unstacked_in_place(layers), None


def _unstacked_bwd(_: None, gradients: list[Array]) -> tuple[Array]:
    first = gradients[0]
    shape = (len(gradients), *first.shape[1:])
    if jax.sharding.get_abstract_mesh().size < 2:
        stack = lax.empty(shape, first.dtype)
    else:  # zeros are sharded as gradients are; without a barrier the first would be padded
        stack = lax.optimization_barrier(jnp.zeros(shape, first.dtype))
    for index in reversed(range(len(gradients))):
        stack = lax.dynamic_update_slice_in_dim(stack, gradients[index], index, axis=0)
    return (stack,)


unstacked_in_place.defvjp(_unstacked_fwd, _unstacked_bwd)
