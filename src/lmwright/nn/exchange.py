"""Exchange: choices of tokens, computed by the devices that have their experts.

    tokens x choices --sort--> by expert --C for each device, all-to-all--> where the experts are
      --sort--> by expert --> products --> back in place --all-to-all--> sums of each token

C is half of what a device would send to another if all choices were spread evenly. Rounds of this
go on until the device with the most has sent all, so none is dropped, and memory and work follow
the choices that there are, not the worst case, in which all are sent to one device.
The backward pass goes in the same rounds and computes the products again, whatever `train.remat`
says: to keep their results would take room for the worst case.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.core.compute import LANES
from lmwright.core.frozen import apart, drawn_for, together
from lmwright.core.param import Tree
from lmwright.core.sharding import platform

AXIS = "expert"
SCOPE = re.compile(r"rounds_(\d+)_(\d+)")
"""Scope of the loops of rounds: how many a plan reckons with, and how many percent of the rows in
them are choices."""
UNEVEN = 1.25  # as many times an even share goes from one device to another, says a plan
TILE = 512  # rows of all devices in a round are a multiple of it, as kernels like them

Products = Callable[..., Array]
"""`products(rows, sizes, w, shares)`: results [M, D] of rows [M, D] in groups of these sizes, one
for each expert of this device; times `shares` [M] if they are given."""

Read = Callable[[Tree], Tree]


@jax.custom_vjp
def moved(x: Array, index: Array, back: Array) -> Array:
    """Rows of x [N, D] at `index` [M], zeros where it is N. `back` [N, C] gives the places in the
    result to which each row went, M for none; the gradient sums those, in float32."""
    return _taken(x, index)


def _taken(x: Array, index: Array) -> Array:
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def _at(x: Array, index: Array) -> Array:
    """Rows of x at `index`, all of which are there."""
    return x.at[index].get(mode="promise_in_bounds")


def _moved_fwd(x: Array, index: Array, back: Array) -> tuple[Array, Array]:
    return moved(x, index, back), back


def _moved_bwd(back: Array, g: Array) -> tuple[Array, None, None]:
    rows = _taken(g, back)
    return jnp.sum(rows.astype(jnp.float32), axis=1).astype(g.dtype), None, None


moved.defvjp(_moved_fwd, _moved_bwd)


def _sorted(ids: Array) -> tuple[Array, Array]:
    """The order in which ids [N] are sorted, and each one's place in it."""
    order = jnp.argsort(ids, stable=True)
    return order, jnp.argsort(order)


def apply_experts(
    products: Products,
    x: Array,
    ids: Array,
    shares: Array,
    w: Tree,
    num_experts: int,
    ways: int,
    read: Read = lambda w: w,
) -> Array:
    """float32 [N, D]: for each of the tokens x [N, D], the sum of the results of its chosen
    experts, ids [N, k], times shares [N, k]. The id `num_experts` stands for no choice. The experts
    and their weights w are cut over `ways` devices; these read `read(w)` in all rounds."""
    if ways == 1:
        here = Here.of(ids, num_experts)
        ours = _at(jnp.where(here.real, shares, 0).reshape(-1), here.order)
        # a share is given to the inputs of the last product, whose results then need not be kept
        return _to_tokens(products(_to_choices(x, here), here.counts, w, ours), here)
    way, width = Way.of(ids, num_experts, ways), x.shape[1]
    if not _is_ragged() or not (more := -width % (2 * LANES)):
        return _in_rounds(products, read, x, shares, w, way)

    def filled_up(rows: Array, *args: Array) -> Array:
        return _filled_up(products(rows[:, :width], *args), more)

    return _in_rounds(filled_up, read, _filled_up(x, more), shares, w, way)[:, :width]


def _filled_up(rows: Array, more: int) -> Array:
    """Rows with zeros at their end, so that TPUs need not turn them around (`_packed`)."""
    return jnp.pad(rows, ((0, 0), (0, more)))


def _is_ragged() -> bool:
    return platform() == "tpu"


def _by_share(y: Array, shares: Array) -> Array:
    """float32 [N, D]: results y [N, k, D] times shares [N, k], summed over choices."""
    return jnp.sum(y.astype(jnp.float32) * shares[..., None], axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Here:
    """k choices of each of N tokens of this device."""

    order: Array
    """[N k]: choices sorted by expert."""
    place: Array
    """[N, k]: where each choice is in that order."""
    counts: Array
    """[E]: choices of each expert."""
    real: Array
    """bool [N, k]: False for no choice; these are the last in that order."""

    @classmethod
    def of(cls, ids: Array, num_experts: int) -> "Here":
        """The choices ids [N, k], as `apply_experts` takes them."""
        order, place = _sorted(ids.reshape(-1))
        chosen = ids[..., None] == jnp.arange(num_experts)
        counts = jnp.sum(chosen, (0, 1), dtype=jnp.int32)
        return cls(order, place.reshape(ids.shape), counts, ids < num_experts)

    @property
    def token(self) -> Array:
        """[N k]: token of each choice in that order."""
        return self.order // self.place.shape[1]

    def total(self, rows: Array) -> Array:
        """float32 [N, D]: sums over each token's choices of rows [N k, D] in that order. Those of
        no choice may be anything: products leave memory as it was."""
        own = jnp.where(self.real[..., None], _at(rows, self.place), 0)
        return jnp.sum(own.astype(jnp.float32), axis=1)


@jax.custom_vjp
def _to_choices(x: Array, here: Here) -> Array:
    """[N k, D]: the tokens x [N, D] of all choices, sorted by expert."""
    return _at(x, here.token)


def _to_choices_fwd(x: Array, here: Here) -> tuple[Array, Here]:
    return _to_choices(x, here), here


def _to_choices_bwd(here: Here, g: Array) -> tuple[Array, None]:
    return here.total(g).astype(g.dtype), None


_to_choices.defvjp(_to_choices_fwd, _to_choices_bwd)


@jax.custom_vjp
def _to_tokens(y: Array, here: Here) -> Array:
    """float32 [N, D]: sums of each token's results y [N k, D], which are sorted by expert."""
    return here.total(y)


def _to_tokens_fwd(y: Array, here: Here) -> tuple[Array, tuple[Here, Array]]:
    return here.total(y), (here, jnp.zeros(0, y.dtype))


def _to_tokens_bwd(saved: tuple[Here, Array], g: Array) -> tuple[Array, None]:
    here, empty = saved
    return _at(g.astype(empty.dtype), here.token), None


_to_tokens.defvjp(_to_tokens_fwd, _to_tokens_bwd)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Way:
    """The way of those choices to W devices, each of which has E/W experts, and back."""

    here: Here
    sent: Array
    """[W]: choices for each device, which lie one after the other in the order of `here`."""
    theirs: Array
    """[W, E/W]: choices of each device for each expert of this one."""
    to: Array
    """[W]: where in the order of each device those for this one begin."""

    @classmethod
    def of(cls, ids: Array, num_experts: int, ways: int) -> "Way":
        """The way of choices ids [N, k] to `ways` devices, as `apply_experts` takes them."""
        here = Here.of(ids, num_experts)
        counts = here.counts.reshape(ways, -1)
        sent = jnp.sum(counts, axis=1)
        return cls(here, sent, _swapped(counts), _swapped(_starts(sent)))

    @property
    def most(self) -> int:
        """Choices that one device may send to another in all rounds."""
        (num, k), here = self.here.place.shape, self.theirs.shape[1]
        return num * min(k, here)

    @property
    def slots(self) -> int:
        """C: choices that one device sends to another in a round."""
        step = max(1, TILE // self.sent.size)
        half = -(-self.here.order.size // (2 * self.sent.size * step)) * step
        return min(half, self.most)

    def rounds(self) -> Array:
        """Number of rounds, the same for all devices of the mesh."""
        axes = jax.sharding.get_abstract_mesh().axis_names
        return -(-lax.pmax(jnp.max(self.sent), axes) // self.slots)

    def round(self, number: Array) -> "Round":
        """One of the rounds."""
        ends = jnp.clip(jnp.cumsum(self.theirs, axis=1) - number * self.slots, 0, self.slots)
        expert = jnp.sum(jnp.arange(self.slots)[:, None] >= ends[:, None, :], axis=-1)
        sizes = jnp.sum(jnp.diff(ends, axis=1, prepend=0), axis=0)
        return Round(self, number * self.slots, *_sorted(expert.reshape(-1)), sizes)

    def window(self, first: Array | int, slots: int) -> Array:
        """[W slots]: places in the order of `here` of the choices for each device from its number
        `first` on; N k and more where there are none."""
        at = first + jnp.arange(slots)
        places = _starts(self.sent)[:, None] + at
        nowhere = self.here.order.size + jnp.arange(places.size).reshape(places.shape)
        return jnp.where(at < self.sent[:, None], places, nowhere).reshape(-1)


@dataclass(frozen=True)
class Round:
    """One round: what arrives is C rows [W C, D] of each device."""

    way: Way
    first: Array
    """Number of the first choice for each device."""
    order: Array
    """[W C]: what arrives, sorted by expert."""
    place: Array
    """[W C]: where it is in that order."""
    sizes: Array
    """[E/W]: rows of each expert."""

    def there(self, rows: Array) -> Array:
        """[W C, D]: what arrives of packed rows [N k, ...] in the order of the choices, sorted by
        expert; zeros after the last expert's."""
        way = self.way
        ways, slots = way.sent.size, way.slots
        if _is_ragged():
            empty = jnp.zeros((ways * slots, *rows.shape[1:]), rows.dtype)
            at = jnp.full(ways, lax.axis_index(AXIS) * slots)
            starts = _starts(way.sent) + jnp.minimum(self.first, way.sent)
            arrived = _ragged(rows, empty, starts, self._now(way.sent), at, self._now(self._all()))
        else:
            arrived = _swapped(_taken(rows, way.window(self.first, slots)))
        return _at(arrived, self.order).reshape(self.order.size, -1)

    def back(self, y: Array, into: Array) -> Array:
        """`into`, packed, with the results y [W C, D] of what has arrived."""
        way, y = self.way, _at(y, self.place).reshape(-1, *into.shape[1:])
        if _is_ragged():
            arriving = self._all()
            at = jnp.arange(way.sent.size) * way.slots
            to = way.to + jnp.minimum(self.first, arriving)
            return _ragged(y, into, at, self._now(arriving), to, self._now(way.sent))
        index = way.window(self.first, way.slots)
        return into.at[index].set(_swapped(y), mode="drop", unique_indices=True)

    def _all(self) -> Array:
        """[W]: choices of each device for this one, in all rounds."""
        return jnp.sum(self.way.theirs, axis=1)

    def _now(self, all_rounds: Array) -> Array:
        return jnp.clip(all_rounds - self.first, 0, self.way.slots)


def _starts(sizes: Array) -> Array:
    """Starts of groups of these sizes that lie one after the other."""
    return jnp.cumsum(sizes) - sizes


def _swapped(a: Array) -> Array:
    """`a`, an equal part for each device, with the parts of all devices for this one."""
    return lax.all_to_all(a, AXIS, 0, 0, tiled=True)


def _ragged(
    rows: Array, into: Array, starts: Array, sent: Array, to: Array, arriving: Array
) -> Array:
    where = (a.astype(jnp.int32) for a in (starts, sent, to, arriving))
    return lax.ragged_all_to_all(rows, into, *where, axis_name=AXIS)


def _packed(rows: Array) -> Array:
    """Rows [N, D] in the shape in which TPUs send ragged parts of them, [N, 2, D / 2] in two bytes:
    the compiler would turn them around in each round."""
    if _is_ragged() and rows.dtype.itemsize == 2:
        return rows.reshape(rows.shape[0], 2, -1)
    return rows


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_rounds(products: Products, read: Read, x: Array, shares: Array, w: Tree, way: Way) -> Array:
    here = way.here
    rows = _at(_packed(x), here.token)
    w = _narrow(read(w), x)

    def one(number: Array, y: Array) -> Array:
        now = way.round(number)
        return now.back(products(now.there(rows), now.sizes, drawn_for(number, w)), y)

    y = _loop(way, one, jnp.zeros_like(rows))
    return _by_share(_at(y.reshape(-1, x.shape[1]), here.place), shares)


def _narrow(w: Tree, x: Array) -> Tree:
    """Weights as products read them, once for all rounds; what drops inputs stays as it is."""
    is_weight = lambda a: a.ndim > 1 and jnp.issubdtype(a.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda a: a.astype(x.dtype) if is_weight(a) else a, w)


def _loop(way: Way, one: Callable[[Array, Any], Any], carry: Any) -> Any:
    choices, ways = way.here.order.size, way.sent.size
    usual = math.ceil(UNEVEN * choices / ways / way.slots)
    with jax.named_scope(f"rounds_{usual}_{100 * choices // (ways * usual * way.slots)}"):
        return lax.fori_loop(0, way.rounds(), one, carry)


def _in_rounds_fwd(
    products: Products, read: Read, x: Array, shares: Array, w: Tree, way: Way
) -> tuple[Array, tuple[Any, ...]]:
    return _in_rounds(products, read, x, shares, w, way), (x, shares, w, way)


def _in_rounds_bwd(
    products: Products, read: Read, saved: tuple[Any, ...], g: Array
) -> tuple[Any, ...]:
    x, shares, w, way = saved
    as_read, (given, fixed) = jax.eval_shape(read, w), apart(w)

    def read_trained(trained: list[Array]) -> tuple[list[Array], list[Array]]:
        return apart(read(together(w, trained, fixed)))

    whole, back, frozen = jax.vjp(read_trained, given, has_aux=True)
    narrow, frozen = _narrow(whole, x), _narrow(frozen, x)
    here, slots = way.here, way.slots
    most = -(-way.most // slots) * slots  # whole rounds
    rows, pulls = (_at(_packed(a), here.token) for a in (x, g.astype(x.dtype)))
    window = way.window(0, most)
    # their numbers for all rounds at once
    arrived = _swapped(_taken(_at(shares.reshape(-1), here.order), window))
    arrived = arrived.reshape(-1, most)

    def one(number: Array, carry: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
        dx, dshares, dw = carry
        now = way.round(number)
        ours = lax.dynamic_slice_in_dim(arrived, now.first, slots, axis=1).reshape(-1)

        def compute(rows: Array, ours: Array, trained: list[Array]) -> Array:
            now_read = drawn_for(number, together(as_read, trained, frozen))
            # a share is given to the inputs of the last product: its results are not needed then
            return products(rows, now.sizes, now_read, ours)

        wide = [a.astype(jnp.float32) for a in narrow]  # and so are their gradients
        _, pull = jax.vjp(compute, now.there(rows), _at(ours, now.order), wide)
        drows, dours, more = pull(now.there(pulls))
        dours = _at(dours, now.place).reshape(-1, slots)
        dshares = lax.dynamic_update_slice_in_dim(dshares, dours, now.first, axis=1)
        dw = jax.tree.map(jnp.add, dw, more)
        return now.back(drows, dx), dshares, dw

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), whole)
    dx, dshares, dw = _loop(way, one, (jnp.zeros_like(rows), jnp.zeros_like(arrived), zeros))
    dx = _at(dx.reshape(-1, x.shape[1]), here.place)
    dx = jnp.sum(dx.astype(jnp.float32), axis=1).astype(x.dtype)
    dshares = _swapped(dshares).reshape(-1)
    ours = jnp.zeros(here.order.size, jnp.float32)
    ours = ours.at[window].set(dshares, mode="drop", unique_indices=True)
    (dw,) = back([b.astype(a.dtype) for a, b in zip(whole, dw, strict=True)])
    return dx, _at(ours, here.place), together(w, dw, [None] * len(fixed)), None


_in_rounds.defvjp(_in_rounds_fwd, _in_rounds_bwd)
