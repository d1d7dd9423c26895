"""Mixture of experts: tokens go to their experts' MLPs and come back as a weighted sum.

    x [B, T, D] --+--> rows, sorted by expert --> ragged MLP --> back in place --> sum by share
                  |    (no token is dropped)
                  +--> C slots for each expert of each row --> MLP of [E, B C, D] --> sum
                       (`capacity_factor`; tokens without a slot are dropped and counted)

Biases are a product of marks [rows, E] with them: TPUs would gather them row by row.

Over the mesh axis `expert`, each device holds some experts: rows go where their experts are and
come back (`nn.exchange`). Weights that are cut over fsdp and context are gathered
in the activations' dtype, and their gradients summed in float32. Rows that take no part
(padding) come back as zeros and fill no expert.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from lmwright.core.compute import GATE
from lmwright.core.frozen import drawn_for, in_lanes
from lmwright.core.in_stack import InStack, as_copied
from lmwright.core.leaves import Int4, Lora, Quantized, Rounded, has_adapters
from lmwright.core.ragged import Parts, Read, dot_ragged
from lmwright.core.rounded import met
from lmwright.core.rounding import int8_shifted
from lmwright.core.sharding import ACTIVATIONS, SEVERAL, WEIGHTS, partition, platform
from lmwright.core.spread import over_parts
from lmwright.core.weight import Weight, as_array, dot
from lmwright.nn.exchange import apply_experts, moved
from lmwright.nn.expert_parts import SHARDS, reads_of_rows, whole
from lmwright.nn.lanes import all_at_once, groups, numbered
from lmwright.nn.mlp import GATED, Mlp, activate, gated
from lmwright.nn.swiglu_oai import SwigluOai, swiglu_oai

EXPERT, TENSOR = "expert", "tensor"
ROWS = ("data", "fsdp", "expert", "context")  # whose devices have rows of their own

Experts = dict[str, Any]
"""up and, for gated MLPs, gate [E, D, F]; down [E, F, D]. Where they add biases, up_bias and
gate_bias [E, F], down_bias [E, D]."""
ExpertMlp = Mlp | SwigluOai
TWO_INPUTS = (*GATED, "swiglu_oai")
WIDTH = {"up": -1, "gate": -1, "down": -2, "up_bias": -1, "gate_bias": -1}
"""Their axis of the experts' width."""


@dataclass(frozen=True)
class Dispatch:
    """Number of experts, their nonlinearity, and their capacity: that many times an even share, or
    unlimited."""

    num_experts: int
    mlp: ExpertMlp = "swiglu"
    capacity_factor: float | None = None
    rounds: bool = False
    """True if the inputs of `down` are rounded to 8 bits before plain weights take them."""
    lanes: int = 1
    """Adapters at once, whose factors lie side by side (`nn.lanes`)."""


def mixture(
    x: Array, experts: Array, shares: Array, real: Array, w: Experts, dispatch: Dispatch
) -> tuple[Array, Array]:
    """[B, T, D] sums of the experts' outputs by share, and float32 [B, T] counts of choices
    that were dropped; x [B, T, D], experts int32 and shares float32 [B, T, k], `real` [B, T]
    False where a token takes no part."""
    if dispatch.capacity_factor is None and in_lanes():
        return all_at_once(partial(_mixture, dispatch))(w, x, experts, shares, real)
    return _mixture(dispatch, 1, w, x, experts, shares, real)


def _mixture(
    dispatch: Dispatch, lanes: int, w: Experts, x: Array, experts: Array, shares: Array, real: Array
) -> tuple[Array, Array]:
    dispatch = replace(dispatch, lanes=lanes)
    mesh = jax.sharding.get_abstract_mesh()
    if platform() == SEVERAL and dispatch.capacity_factor is None:
        if not any(isinstance(leaf, Lora | Rounded) for leaf in w.values()):
            return _spread(x, experts, shares, real, w, dispatch)
    if mesh.empty or mesh.size == 1:
        return _local(x, experts, shares, real, w, dispatch=dispatch, ways=1, tensor=1)
    act = lambda axes: partition(tuple(axes.split()), ACTIVATIONS)  # noqa: E731
    tokens, choices = act("batch seq"), act("batch seq experts")
    arrows = {"up": "experts embed mlp", "gate": "experts embed mlp", "down": "experts mlp embed"}
    arrows |= dict.fromkeys(("up_bias", "gate_bias"), "experts mlp") | {"down_bias": "experts norm"}
    x, w, rounds = _plain(x, w)
    specs = {name: _specs(leaf, *arrows[name].split()) for name, leaf in w.items()}
    dispatch = replace(dispatch, rounds=rounds)
    local = partial(_local, dispatch=dispatch, ways=mesh.shape[EXPERT], tensor=mesh.shape[TENSOR])
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(act("batch seq embed"), choices, choices, tokens, specs),
        out_specs=(act("batch stream embed"), tokens),
        check_vma=False,
    )(x, experts, shares, real, w)


def _spread(
    x: Array, experts: Array, shares: Array, real: Array, w: Experts, dispatch: Dispatch
) -> tuple[Array, Array]:
    """The mixture in a program that is spread over devices: each has a part of every expert's
    width, and a token's sum goes over them once, not that of each choice."""
    w = {n: a if isinstance(a, InStack) else as_array(a, x.dtype) for n, a in w.items()}

    def local(w: Experts, *arrays: Array, ways: int) -> Array:
        if "down_bias" in w:
            w = w | {"down_bias": w["down_bias"] / ways}
        return _by_rows(*arrays, w, dispatch, 1)[0]

    y = over_parts(local, w, {n: a for n, a in WIDTH.items() if n in w}, x, experts, shares, real)
    return y.astype(x.dtype), jnp.zeros(experts.shape[:2], jnp.float32)


def _plain(x: Array, w: Experts) -> tuple[Array, Experts, bool]:
    """x as `up` and `gate` read it, the weights as arrays, and whether inputs are rounded: each
    device computes with parts of what has scales as a whole."""
    rounded = next((a for a in w.values() if isinstance(a, Rounded)), None)
    if rounded is None:
        return x, {n: _readable(a, x.dtype, n == "down") for n, a in w.items()}, False
    # gradients are summed in the dtype of the weights
    wide = {name: as_array(a, jnp.float32) for name, a in w.items()}
    return met(x, rounded, (2,)), wide, rounded.activations == "int8"


def _readable(leaf: Weight, dtype: jnp.dtype, is_down: bool) -> Weight:
    """A leaf of which devices can hold parts: an array, integers, or one of these with an adapter
    beside it."""
    if isinstance(leaf, Lora) and leaf.magnitude is None:
        return replace(leaf, base=_readable(leaf.base, dtype, is_down))
    if not isinstance(leaf, Quantized):
        return as_array(leaf, dtype)
    tensor = jax.sharding.get_abstract_mesh().shape[TENSOR]
    if is_down and isinstance(leaf, Int4) and leaf.scale.shape[1] % tensor:
        return lax.stop_gradient(as_array(leaf, dtype))  # inputs of one scale lie on two devices
    return leaf


def _specs(leaf: Weight, *axes: str) -> Any:
    """PartitionSpecs of a leaf of these axes: of an adapter both factors, as what they stand
    beside; of integers the scales only by experts and the width."""
    whole = partition(axes, WEIGHTS)
    everywhere = jax.tree.map(lambda _: PartitionSpec(), leaf)
    if isinstance(leaf, Lora):
        batch, inputs, outputs = axes
        a, b = (partition((batch, *one), WEIGHTS) for one in ((inputs, "rank"), ("rank", outputs)))
        return replace(everywhere, base=_specs(leaf.base, *axes), a=a, b=b)
    if isinstance(leaf, Quantized):
        names = axes if isinstance(leaf, Int4) else (axes[0], axes[2])
        own = (None if entry == SHARDS else entry for entry in partition(names, WEIGHTS))
        return replace(everywhere, values=whole, scale=PartitionSpec(*own))
    return whole


def _local(
    x: Array, experts: Array, shares: Array, real: Array, w: Experts,
    *, dispatch: Dispatch, ways: int, tensor: int,
) -> tuple[Array, Array]:  # fmt: skip
    """One device's part, of `ways` along expert and `tensor` along tensor: its own tokens and
    experts, an even part of the experts' width."""
    w = _dropping_here(w)
    if tensor > 1 and "down_bias" in w:  # which each adds to its part of the sum
        w = w | {"down_bias": w["down_bias"] / tensor}
    by = _by_rows
    if dispatch.capacity_factor is not None:
        by, w = _by_capacity, {name: as_copied(a) for name, a in w.items()}
    y, dropped = by(x, experts, shares, real, w, dispatch, ways)
    if tensor > 1:  # each has summed over its part of the width
        y = lax.psum_scatter(y, TENSOR, scatter_dimension=1, tiled=True)
    return y.astype(x.dtype), dropped


def _dropping_here(w: Experts) -> Experts:
    """Weights whose adapters drop inputs of this device's own: `down` also by its width."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or not has_adapters(w):
        return w
    w = drawn_for(lax.axis_index(ROWS), w)
    return w | {"down": drawn_for(lax.axis_index(TENSOR), w["down"])}


def _by_rows(
    x: Array, experts: Array, shares: Array, real: Array, w: Experts, dispatch: Dispatch, ways: int
) -> tuple[Array, Array]:
    b, t, k = experts.shape
    num, ids = dispatch.num_experts * dispatch.lanes, numbered(experts, dispatch.lanes)
    ids = jnp.where(real.reshape(-1, 1), ids.reshape(b * t, k), num)
    # the backward pass gathers matrices again: no layer keeps them
    mlp = partial(_mlp_of_rows, dispatch, reads_of_rows(w, x) if ways == 1 else {})
    rows = x.reshape(b * t, -1), ids, shares.reshape(b * t, k)
    read = partial(whole, dtype=x.dtype)
    y = apply_experts(mlp, *rows, w, num, ways, read)
    return y.reshape(x.shape), jnp.zeros((b, t), jnp.float32)


def _mlp_of_rows(
    dispatch: Dispatch, reads: dict[str, Read | Parts],
    rows: Array, sizes: Array, w: Experts, shares: Array | None = None,
) -> Array:  # fmt: skip
    sizes, own = groups(sizes, dispatch.lanes, rows.shape[0])
    plus = _Biases.of(w, sizes, rows.shape[0])

    def product(eqn: str, rows: Array, matrix: str, name: str | None = None) -> Array:
        read = reads.get(matrix)
        return dot_ragged(eqn, rows, w[matrix], sizes, name=name, read=read, own=own)

    gate = None
    if dispatch.mlp in TWO_INPUTS:
        rows, again = _twice(rows)
        gate = plus(product("td,edf->tf", again, "gate", GATE), "gate_bias")
    up = plus(product("td,edf->tf", rows, "up"), "up_bias")
    h = _inner(up, gate, dispatch)
    if shares is not None:
        h = (h * shares[:, None]).astype(h.dtype)
    return plus(product("tf,efd->td", h, "down"), "down_bias", shares)


class _Biases(NamedTuple):
    """Biases of rows that lie in groups by expert."""

    w: Experts
    marks: Array | None
    """bool [rows, E]: the expert of each row; none of those after the last group. None where there
    are no biases."""

    @classmethod
    def of(cls, w: Experts, sizes: Array, num_rows: int) -> "_Biases":
        """The biases among weights w, for groups of `sizes` [E]."""
        if "down_bias" not in w:
            return cls(w, None)
        ends, row = jnp.cumsum(sizes), jnp.arange(num_rows)[:, None]
        return cls(w, (row >= ends - sizes) & (row < ends))

    def __call__(self, y: Array, name: str, shares: Array | None = None) -> Array:
        """y [rows, F] with the bias of its expert, times `shares` [rows] if there are any."""
        if self.marks is None:
            return y
        marks = self.marks.astype(y.dtype)
        if shares is not None:
            marks = (marks * shares[:, None]).astype(y.dtype)
        added = dot("te,ef->tf", marks, self.w[name].astype(y.dtype))
        # rows of no expert are what memory held, and so are their gradients
        real = jnp.any(self.marks, axis=1, keepdims=True)
        return y + jnp.where(real, added, 0)


@jax.custom_vjp
def _twice(x: Array) -> tuple[Array, Array]:
    """`x` for two products, whose gradients are added up in float32: TPUs take half as long again
    to add them as bfloat16."""
    return x, x


def _twice_fwd(x: Array) -> tuple[tuple[Array, Array], None]:
    return (x, x), None


def _twice_bwd(_: None, g: tuple[Array, Array]) -> tuple[Array]:
    first, second = (each.astype(jnp.float32) for each in g)
    return ((first + second).astype(g[0].dtype),)


_twice.defvjp(_twice_fwd, _twice_bwd)


def _inner(up: Array, gate: Array | None, dispatch: Dispatch) -> Array:
    """Input of `down`."""
    if gate is None:
        h = activate(dispatch.mlp, up)
    elif dispatch.mlp == "swiglu_oai":
        h = swiglu_oai(gate, up)
    else:
        h = gated(dispatch.mlp, gate, up)
    if dispatch.rounds:  # a token's values are cut over devices
        h = int8_shifted(h, (h.ndim - 1,), TENSOR).astype(h.dtype)
    return h


def _by_capacity(
    x: Array, experts: Array, shares: Array, real: Array, w: Experts, dispatch: Dispatch, ways: int
) -> tuple[Array, Array]:
    """Each row of the batch (its piece on a device) gives each expert the same number of slots,
    which tokens take in their order, so that none depends on later ones."""
    (b, t, k), num = experts.shape, dispatch.num_experts
    slots = min(t, math.ceil(dispatch.capacity_factor * t * k / num))
    wants = (experts[..., None] == jnp.arange(num)) & real[..., None, None]  # [b, t, k, E]
    queue = jnp.cumsum(wants.reshape(b, t * k, num), axis=1, dtype=jnp.int32) - 1
    queue = queue.reshape(wants.shape)
    placed = wants & (queue < slots)
    at = jnp.sum(jnp.where(placed, jnp.arange(num) * slots + queue, 0), axis=-1)  # [b, t, k]
    inside = jnp.any(placed, axis=-1)
    end = num * slots
    at = jnp.where(inside, at, end)

    def one(x: Array, at: Array) -> tuple[Array, Array]:
        token = jnp.broadcast_to(jnp.arange(t)[:, None], at.shape)
        source = jnp.full(end + 1, t).at[at].set(token)[:end]  # of each slot
        choice = jnp.full(end + 1, t * k).at[at].set(jnp.arange(t * k).reshape(t, k))[:end]
        return moved(x, source, at), choice

    rows, choice = jax.vmap(one)(x, at)
    rows = rows.reshape(b, num, slots, -1).swapaxes(0, 1)
    if ways > 1:
        rows = lax.all_to_all(rows, EXPERT, 0, 1, tiled=True)  # [E here, b of all, C, D]
    there = rows.shape
    w = whole(w, x.dtype)
    rows = _mlp_of_slots(rows.reshape(there[0], -1, there[-1]), w, dispatch).reshape(there)
    if ways > 1:
        rows = lax.all_to_all(rows, EXPERT, 1, 0, tiled=True)
    rows = rows.swapaxes(0, 1).reshape(b, end, -1)
    y = jax.vmap(moved)(rows, at.reshape(b, t * k), choice[..., None]).reshape(b, t, k, -1)
    y = jnp.sum(y.astype(jnp.float32) * (shares * inside)[..., None], axis=2)
    return y, jnp.sum(real[..., None] & ~inside, axis=-1, dtype=jnp.float32)


def _mlp_of_slots(rows: Array, w: Experts, dispatch: Dispatch) -> Array:
    def plus(y: Array, name: str) -> Array:
        return y + w[name][:, None].astype(y.dtype) if name in w else y

    up = plus(dot("ecd,edf->ecf", rows, w["up"]), "up_bias")
    gate = None
    if dispatch.mlp in TWO_INPUTS:
        gate = plus(dot("ecd,edf->ecf", rows, w["gate"], name=GATE), "gate_bias")
    return plus(dot("ecf,efd->ecd", _inner(up, gate, dispatch), w["down"]), "down_bias")
