"""Exchange: choices of tokens put in the order of their experts, on the devices that have them.

    tokens x choices --sort--> by expert --all-to-all--> where the experts are --sort--> by expert

What arrives has room for the worst case, in which all tokens choose the experts of one device,
because shapes do not depend on choices. On TPUs only rows that are there travel; elsewhere, for
lack of a ragged all-to-all, the room itself does.
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


def _is_ragged() -> bool:
    return jax.sharding.get_abstract_mesh().abstract_device.platform == "tpu"


@dataclass(frozen=True)
class Exchange:
    """One way there and back for k choices of each of N tokens, over `ways` devices."""

    order: Array
    """[N k]: choices sorted by expert."""
    place: Array
    """[N, k]: where each choice is in that order."""
    counts: Array
    """[E]: choices of each expert."""
    ids: Array
    """[N, k]: experts; E for none."""
    ways: int

    @classmethod
    def of(cls, ids: Array, num_experts: int, ways: int) -> "Exchange":
        """The exchange for ids [N, k] of chosen experts; the id `num_experts` stands for no
        choice."""
        order, place = _sorted(ids.reshape(-1))
        counts = jnp.sum(ids[..., None] == jnp.arange(num_experts), axis=(0, 1), dtype=jnp.int32)
        return cls(order, place.reshape(ids.shape), counts, ids, ways)

    def there(self, x: Array) -> tuple[Array, Array]:
        """Rows of x [N, D], one for each choice of an expert of this device, in the order of the
        experts, and the number of rows of each expert; rows after those mean nothing."""
        if self.ways == 1:
            return moved(x, self.order // self.ids.shape[1], self.place), self.counts
        num, k = self.ids.shape
        order, place, sizes, arriving = self._arrivals()
        if _is_ragged():
            starts, sent = self._parts()
            rows = moved(x, self.order // k, self.place)
            arrived = self._ragged(
                rows, self.ways * self.room, starts, sent, self._ours(), arriving
            )
        else:
            slot, choice = self._slots()
            rows = moved(x, jnp.where(choice < num * k, choice // k, num), slot)
            arrived = lax.all_to_all(rows, AXIS, 0, 0, tiled=True)
        return moved(arrived, order, place[:, None]), sizes

    def back(self, y: Array) -> Array:
        """Results of those rows by choice, [N, k, D]; zeros where no expert was chosen."""
        if self.ways == 1:
            y = moved(y, self.place.reshape(-1), self.order[:, None])
            return y.reshape(*self.ids.shape, -1)
        order, place, _, arriving = self._arrivals()
        y = moved(y, place, order[:, None])
        if _is_ragged():
            starts, sent = self._parts()
            to = lax.all_to_all(starts, AXIS, 0, 0, tiled=True)
            rooms = jnp.arange(self.ways) * self.room
            y = self._ragged(y, self.order.size, rooms, arriving, to, sent)
            y = moved(y, self.place.reshape(-1), self.order[:, None])
        else:
            y = lax.all_to_all(y, AXIS, 0, 0, tiled=True)
            slot, choice = self._slots()
            y = moved(y, slot.reshape(-1), choice[:, None])
        return y.reshape(*self.ids.shape, -1)

    @property
    def room(self) -> int:
        """Rows for what one device may send to another."""
        num, k = self.ids.shape
        return num * min(k, self.counts.shape[0] // self.ways)

    def _parts(self) -> tuple[Array, Array]:
        """Start and number of the choices of each device in the sorted order."""
        sent = jnp.sum(self.counts.reshape(self.ways, -1), axis=1)
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

    def _slots(self) -> tuple[Array, Array]:
        """Slot of each choice [N, k] in the send buffer, and the choice in each slot."""
        num, k = self.ids.shape
        starts, sent = self._parts()
        device = self.ids // (self.counts.shape[0] // self.ways)
        ours = device * self.room + self.place - jnp.take(starts, device, mode="clip")
        slot = jnp.where(device < self.ways, ours, self.ways * self.room)
        within = jnp.arange(self.room)
        at = jnp.where(within < sent[:, None], starts[:, None] + within, num * k)
        choice = jnp.take(self.order, at.reshape(-1), mode="fill", fill_value=num * k)
        return slot, choice

    def _arrivals(self) -> tuple[Array, Array, Array, Array]:
        """Order of the received rows sorted by expert, the place of each row in it, the number of
        rows of each expert, and the number that each device sends."""
        counts = lax.all_to_all(self.counts.reshape(self.ways, -1), AXIS, 0, 0, tiled=True)
        ends = jnp.cumsum(counts, axis=1)  # [devices, experts here]
        expert = jnp.sum(jnp.arange(self.room)[:, None] >= ends[:, None, :], axis=-1)
        return *_sorted(expert.reshape(-1)), jnp.sum(counts, axis=0), ends[:, -1]
