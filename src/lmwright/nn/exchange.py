"""Exchange: choices of tokens put in the order of their experts, on the devices that have them.

    Here       tokens x choices --sort--> by expert --> products --> sums of each token's choices

    Ragged     tokens x choices --sort--> by expert --all-to-all--> where the experts are --sort-->
               by expert --> products --all-to-all--> sums

    Gathered   tokens of all devices --sort--> this device's experts --> products --> sums over
               these experts --all-to-all--> sums over all

TPUs send only the rows that are there (`Ragged`). For lack of such a collective elsewhere, each
device gets the tokens of all, which takes less than room for all choices of all.
What arrives has room for the worst case, in which all tokens choose the experts of one device,
because shapes do not depend on choices.
All moves are gathers, and so are their gradients, which know the way back.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

AXIS = "expert"


@jax.custom_vjp
def moved(x: Array, index: Array, back: Array) -> Array:
    """Rows of x [N, D] at `index` [M], zeros where it is N. `back` [N, C] gives the places in the
    result to which each row went, M for none; the gradient sums those, in float32."""
    return _taken(x, index)


def _taken(x: Array, index: Array) -> Array:
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def _moved_fwd(x: Array, index: Array, back: Array) -> tuple[Array, Array]:
    return _taken(x, index), back


def _moved_bwd(back: Array, g: Array) -> tuple[Array, None, None]:
    sums = jnp.sum(_taken(g, back).astype(jnp.float32), axis=1)
    return sums.astype(g.dtype), None, None


moved.defvjp(_moved_fwd, _moved_bwd)


def _sorted(ids: Array) -> tuple[Array, Array]:
    """The order in which ids [N] are sorted, and each one's place in it."""
    order = jnp.argsort(ids, stable=True)
    return order, jnp.argsort(order)


def exchange(ids: Array, num_experts: int, ways: int) -> "Here | Ragged | Gathered":
    """The exchange for ids [N, k] of chosen experts over `ways` devices; the id `num_experts`
    stands for no choice."""
    if ways == 1:
        return Here.of(ids, num_experts)
    return (Ragged if _is_ragged() else Gathered).of(ids, num_experts, ways)


def _is_ragged() -> bool:
    return jax.sharding.get_abstract_mesh().abstract_device.platform == "tpu"


def _counts(ids: Array, num_experts: int) -> Array:
    """[E]: choices of each expert."""
    return jnp.sum(ids[..., None] == jnp.arange(num_experts), axis=(0, 1), dtype=jnp.int32)


def _by_share(y: Array, shares: Array) -> Array:
    """float32 [N, D]: results y [N, k, D] times shares [N, k], summed over choices."""
    return jnp.sum(y.astype(jnp.float32) * shares[..., None], axis=1)


@dataclass(frozen=True)
class Here:
    """k choices of each of N tokens, all of experts of this device."""

    order: Array
    """[N k]: choices sorted by expert."""
    place: Array
    """[N, k]: where each choice is in that order."""
    counts: Array
    """[E]: choices of each expert."""

    @classmethod
    def of(cls, ids: Array, num_experts: int) -> "Here":
        """As `exchange`."""
        order, place = _sorted(ids.reshape(-1))
        return cls(order, place.reshape(ids.shape), _counts(ids, num_experts))

    def there(self, x: Array) -> tuple[Array, Array]:
        """Rows of x [N, D], one for each choice of an expert of this device, in the order of the
        experts, and the number of rows of each expert; rows after those mean nothing."""
        return moved(x, self.order // self.place.shape[1], self.place), self.counts

    def sums(self, y: Array, shares: Array) -> Array:
        """float32 [N, D]: for each token, the sum of the results of its choices, which are rows of
        y, times shares [N, k]; no choice adds nothing."""
        y = moved(y, self.place.reshape(-1), self.order[:, None])
        return _by_share(y.reshape(*self.place.shape, -1), shares)


@dataclass(frozen=True)
class Ragged:
    """k choices of each of N tokens, sent over `ways` devices."""

    sorted: Here
    """The choices of this device's tokens, of the experts of all devices."""
    ways: int

    @classmethod
    def of(cls, ids: Array, num_experts: int, ways: int) -> "Ragged":
        """As `exchange`."""
        return cls(Here.of(ids, num_experts), ways)

    def there(self, x: Array) -> tuple[Array, Array]:
        """As `Here.there`."""
        order, place, sizes, arriving = self._arrivals()
        starts, sent = self._parts()
        rows, _ = self.sorted.there(x)
        arrived = self._ragged(rows, self.ways * self.room, starts, sent, self._ours(), arriving)
        return moved(arrived, order, place[:, None]), sizes

    def sums(self, y: Array, shares: Array) -> Array:
        """As `Here.sums`."""
        order, place, _, arriving = self._arrivals()
        y = moved(y, place, order[:, None])
        starts, sent = self._parts()
        to = lax.all_to_all(starts, AXIS, 0, 0, tiled=True)
        rooms = jnp.arange(self.ways) * self.room
        y = self._ragged(y, self.sorted.order.size, rooms, arriving, to, sent)
        return self.sorted.sums(y, shares)

    @property
    def room(self) -> int:
        """Rows for what one device may send to another."""
        num, k = self.sorted.place.shape
        return num * min(k, self.sorted.counts.size // self.ways)

    def _parts(self) -> tuple[Array, Array]:
        """Start and number of the choices of each device in the sorted order."""
        sent = jnp.sum(self.sorted.counts.reshape(self.ways, -1), axis=1)
        return jnp.cumsum(sent) - sent, sent

    def _ours(self) -> Array:
        """Start of this device's rows in what each other device receives."""
        return jnp.full(self.ways, lax.axis_index(AXIS) * self.room)

    @staticmethod
    def _ragged(
        rows: Array, size: int, starts: Array, sent: Array, to: Array, arriving: Array
    ) -> Array:
        """[size, D]: rows sent, as many as they are, from `starts` to `to` there."""
        empty = jnp.zeros((size, rows.shape[1]), rows.dtype)
        where = (a.astype(jnp.int32) for a in (starts, sent, to, arriving))
        return lax.ragged_all_to_all(rows, empty, *where, axis_name=AXIS)

    def _arrivals(self) -> tuple[Array, Array, Array, Array]:
        """Order of the received rows sorted by expert, the place of each row in it, the number of
        rows of each expert, and the number that each device sends."""
        counts = lax.all_to_all(self.sorted.counts.reshape(self.ways, -1), AXIS, 0, 0, tiled=True)
        ends = jnp.cumsum(counts, axis=1)  # [devices, experts here]
        expert = jnp.sum(jnp.arange(self.room)[:, None] >= ends[:, None, :], axis=-1)
        return *_sorted(expert.reshape(-1)), jnp.sum(counts, axis=0), ends[:, -1]


@dataclass(frozen=True)
class Gathered:
    """k choices of each of W N tokens, those of W devices, by the device that has some experts."""

    here: Here
    """Choices of these experts in the order, those of others nowhere."""
    ways: int

    @classmethod
    def of(cls, ids: Array, num_experts: int, ways: int) -> "Gathered":
        """As `exchange`."""
        num = num_experts // ways
        ours = lax.all_gather(ids, AXIS, tiled=True) - lax.axis_index(AXIS) * num  # [W N, k]
        is_ours = (ours >= 0) & (ours < num)
        ours = jnp.where(is_ours, ours, num)
        order, place = _sorted(ours.reshape(-1))
        counts = _counts(ours, num)
        order = order[: ours.shape[0] * min(ours.shape[1], num)]
        order = jnp.where(jnp.arange(order.size) < jnp.sum(counts), order, ours.size)
        place = jnp.where(is_ours, place.reshape(ours.shape), order.size)
        return cls(Here(order, place, counts), ways)

    def there(self, x: Array) -> tuple[Array, Array]:
        """As `Here.there`."""
        return self.here.there(_everyone(x))

    def sums(self, y: Array, shares: Array) -> Array:
        """As `Here.sums`; the sums over the experts of a device travel in the dtype of y."""
        parts = self.here.sums(y, lax.all_gather(shares, AXIS, tiled=True)).astype(y.dtype)
        return _ours(parts)


@jax.custom_vjp
def _everyone(x: Array) -> Array:
    """[W N, D]: rows x [N, D] of all devices; the gradients of all are summed in float32."""
    return lax.all_gather(x, AXIS, tiled=True)


@jax.custom_vjp
def _ours(parts: Array) -> Array:
    """float32 [N, D]: the sum over devices of parts [W N, D], for the tokens of this one."""
    parts = lax.all_to_all(parts.reshape(lax.axis_size(AXIS), -1, parts.shape[1]), AXIS, 0, 0)
    return jnp.sum(parts.astype(jnp.float32), axis=0)


def _everyone_fwd(x: Array) -> tuple[Array, None]:
    return _everyone(x), None


def _everyone_bwd(_: None, g: Array) -> tuple[Array]:
    return (_ours(g).astype(g.dtype),)


def _ours_fwd(parts: Array) -> tuple[Array, Array]:
    return _ours(parts), parts[:0]


def _ours_bwd(like: Array, g: Array) -> tuple[Array]:
    return (_everyone(g.astype(like.dtype)),)


_everyone.defvjp(_everyone_fwd, _everyone_bwd)
_ours.defvjp(_ours_fwd, _ours_bwd)
