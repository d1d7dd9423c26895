"""Whole matrices of experts, of which devices hold parts.

    parts of [E, D, F], cut over fsdp and context --in the dtype of activations--> whole matrices
    gradients of these --summed in float32--> gradients of the parts

The backward pass gathers them again: no layer keeps them.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.compute import LANES
from lmwright.core.leaves import Lora, Quantized, dequantize
from lmwright.core.ragged import Parts, Read, Turned
from lmwright.core.weight import Weight

SHARDS = ("fsdp", "context")  # over which an expert's weights are cut, beside its width
CUT = {"up": 1, "gate": 1, "down": 2}
"""Axis of the weights [E, D, F] or [E, F, D] that is cut over them."""


def reads(w: dict[str, Any], dtype: jnp.dtype) -> dict[str, Read | Parts]:
    """Reads by which products get whole matrices in `dtype` of a device's parts; none on one
    device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return {}
    found: dict[str, Read | Parts] = {}
    for name, axis in CUT.items():
        read, leaf = partial(_gathered, axis=axis, dtype=dtype), w.get(name)
        base = partial(_gathered_integers, axis=axis, dtype=dtype) if _has_integers(leaf) else read
        found[name] = base
        if isinstance(leaf, Lora):  # one of its factors has the axis that is cut
            found[name] = Parts(base, *((read, None) if axis == 1 else (None, read)))
    return found


def _has_integers(leaf: Weight) -> bool:
    return isinstance(leaf.base if isinstance(leaf, Lora) else leaf, Quantized)


def _gathered_integers(w: Quantized, axis: int, dtype: jnp.dtype) -> Array:
    """The matrices in `dtype` of which devices hold parts of the integers."""
    values = lax.all_gather(w.values, SHARDS, axis=axis, tiled=True)
    return dequantize(replace(w, values=values), dtype)


def whole(w: dict[str, Any], dtype: jnp.dtype) -> dict[str, Any]:
    """The weights w with whole matrices in place of this device's parts."""
    found = reads(w, dtype)
    return {name: _read_whole(leaf, found.get(name)) for name, leaf in w.items()}


def _read_whole(leaf: Weight, read: Read | Parts | None) -> Weight:
    if not isinstance(read, Parts):
        return read(leaf) if read else leaf
    base, a, b = (
        part(factor) if part else factor
        for part, factor in zip(read, (lax.stop_gradient(leaf.base), leaf.a, leaf.b), strict=True)
    )
    return replace(leaf, base=base, a=a, b=b)


def reads_of_rows(w: dict[str, Any], x: Array) -> dict[str, Read | Parts]:
    """`reads` for products of rows x. TPUs write parts that are gathered within their vectors once
    more unless they fill whole ones: these are turned before, which is a fraction of the work."""
    if not (found := reads(w, x.dtype)):
        return {}
    down = found["down"]
    if _has_integers(w["down"]):
        return found
    base = w["down"].base if isinstance(down, Parts) else w["down"]
    if (part := base.shape[2]) < x.shape[-1] and part % LANES:
        turned = Turned(partial(_gathered_turned, dtype=x.dtype))
        found["down"] = down._replace(base=turned) if isinstance(down, Parts) else turned
    return found


def _gathered_turned(w: Array, dtype: jnp.dtype) -> Array:
    """[E, D, F] of parts [E, F, D / ways]."""
    return _gathered(w.swapaxes(1, 2), 1, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(w: Array, axis: int, dtype: jnp.dtype) -> Array:
    """float32 numbers of `dtype`: a product reads them as they came, and gives float32 back."""
    return lax.all_gather(w.astype(dtype), SHARDS, axis=axis, tiled=True).astype(jnp.float32)


def _gathered_fwd(w: Array, axis: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    return _gathered(w, axis, dtype), jnp.zeros(0, w.dtype)


def _gathered_bwd(axis: int, dtype: jnp.dtype, empty: Array, g: Array) -> tuple[Array]:
    summed = lax.psum_scatter(g, SHARDS, scatter_dimension=axis, tiled=True)
    return (summed.astype(empty.dtype),)


_gathered.defvjp(_gathered_fwd, _gathered_bwd)
