"""Many prompts in a few slots: whoever ends makes room for the next.

    slot 1        Once upon a time, there was|
    slot 2   The sea is blue because water ab|
    slot 3   (ended)      <-- What is a tree?|     a new prompt is put before the common end
                                             ^ all rows of the cache go on from here

What lies before a row's own beginning is padding, so a row may move within the cache, and does
where its end is reached. A row's tokens depend on its own prompt, the seed and its number alone.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.copies import computing_with, num_copies_of, num_sharing, on_each, zeros_on_each
from lmwright.core.param import Tree
from lmwright.evals.decoding import (
    Knobs,
    calls_ahead,
    decode_steps,
    keys_of,
    knobs_of,
    prefill,
    rounded_tokens,
    turns_with_length,
)
from lmwright.evals.prompt_rows import OnText, PromptRow, bucket, pad_left, take
from lmwright.evals.sampling import Method, Sampling
from lmwright.models import cached
from lmwright.models.decoder import Decoder

PART = 4  # slots are filled when so many-th of them are free
READ_TOKENS = 2**14  # of prompts that a device reads at a time
ROOM = 0.4  # of a device's free memory, for a cache
FIRST_ROWS = 32  # whose lengths say how long a cache must be; slots, where memory says nothing
MOST_SLOTS = 128


def in_slots(
    model: Decoder,
    w: Tree,
    compute: Compute,
    rows: Iterable[PromptRow],
    settings: Sampling,
    ends: frozenset[int],
    steps: int,
    num_slots: int | None = None,
    on_text: OnText | None = None,
) -> Iterator[PromptRow]:
    """Continues rows, `num_slots` at a time on each device that has the weights, and yields them in
    their order; with None as many as there is memory for. A call of a program makes `steps`
    tokens."""
    order: deque[PromptRow] = deque()

    def coming() -> Iterator[PromptRow]:
        for row in rows:
            order.append(row)
            yield row

    new = coming()
    first = list(islice(new, (num_slots or FIRST_ROWS) * num_copies_of(w)))
    slots = _Slots(model, w, compute, settings, steps, num_slots, first)
    while slots.fill(new):
        for row, tokens in slots.advance():
            take(row, tokens, settings, ends, on_text)
        while order and order[0].finish is not None:
            yield order.popleft()


class _Slots:
    """Slots, the rows in them, and the arrays of each device."""

    def __init__(
        self, model: Decoder, w: Tree, compute: Compute, settings: Sampling, steps: int,
        num_slots: int | None, first: Sequence[PromptRow],
    ):  # fmt: skip
        self.program, self.w, self.settings, self.steps = (model, compute), w, settings, steps
        self.copies, self.given, self.room = num_copies_of(w), num_slots, _room(num_sharing(w))
        self.ahead = calls_ahead()
        self.knobs = knobs_of(settings, model)
        self.held = list(first)
        """Rows that are next."""
        self._begin()

    def _begin(self) -> None:
        """Makes slots for the rows that are next: none is in use."""
        self.cache = self.logits = None  # gives its memory back
        self.filled, self.length = 0, self._length_for(self.held)
        self.num_slots = self._slots_for(self.length)
        self.rows: list[PromptRow | None] = [None] * (self.copies * self.num_slots)
        """Of each slot; slot s of device d is at s x copies + d."""
        self.starts = np.zeros(len(self.rows), np.int64)
        """Places in the cache where rows begin."""
        self.made = np.zeros(len(self.rows), np.int32)
        """Tokens that were asked for."""
        self.waiting: deque[tuple[Array, list[PromptRow | None]]] = deque()
        model, compute = self.program
        logits = jax.ShapeDtypeStruct((self.num_slots, model.vocab_size), jnp.float32)
        cache = _cache_shapes(model, compute, self.num_slots, self.length)
        self.logits, self.cache = zeros_on_each((logits, cache), self.w)

    def fill(self, coming: Iterator[PromptRow]) -> bool:
        """Gives new rows to free slots, if there are enough of them; False if none is in use."""
        while True:
            every, share = range(len(self.rows)), max(1, self.num_slots // PART)
            free = [[at for at in every[d :: self.copies] if self.rows[at] is None]
                    for d in range(self.copies)]  # fmt: skip
            if sum(map(len, free)) < max(1, len(self.rows) // PART):
                return True
            count, busy = sum(len(own[:share]) for own in free), any(self.rows)
            self.held += islice(coming, max(0, count - len(self.held)))
            if not self.held:
                return busy
            if not self._fit(self.held[:count]):
                if busy:
                    return True
                self._begin()
                continue
            new, self.held = self.held[:count], self.held[count:]
            width = bucket(max(len(row.ids) for row in new))
            most = min(share, max(1, READ_TOKENS // width))
            while new:
                self._read(new, [own[:most] for own in free], most, width)
                free = [own[most:] for own in free]

    def _fit(self, rows: Sequence[PromptRow]) -> bool:
        """True unless longer rows need a cache that there is no memory for, or the rest is so much
        shorter that there is memory for more."""
        if (length := self._length_for(rows)) > self.length:
            return self._slots_for(length) >= self.num_slots
        rest = self._length_for([*rows, *filter(None, self.rows)])
        return 2 * rest > self.length or self._slots_for(rest) <= self.num_slots

    def _slots_for(self, length: int) -> int:
        """Slots of each device: a power of two, where memory has to do for rows of a `length`."""
        if self.given is not None:
            return self.given
        if self.room is None:
            return FIRST_ROWS
        row = sum(math.prod(a.shape) * a.dtype.itemsize
                  for a in jax.tree.leaves(_cache_shapes(*self.program, 1, length)))  # fmt: skip
        return 1 << (max(1, min(MOST_SLOTS, self.room // row)).bit_length() - 1)

    def _read(self, new: list[PromptRow], free: list[list[int]], num_rows: int, width: int) -> None:
        """Reads the first of the new rows into free slots, at most `num_rows` of each device."""
        self._make_room(new, width)
        tokens = np.zeros((self.copies, num_rows, width), np.int32)
        valid = np.zeros(tokens.shape, bool)
        slots = np.full(tokens.shape[:2], self.num_slots)  # one that is not there: nothing is put
        for device, own in enumerate(free):
            taken, new[: len(own)] = new[: len(own)], []
            prompts = [row.ids for row in taken]
            tokens[device], valid[device] = pad_left(prompts, num_rows, width)
            slots[device, : len(taken)] = [at // self.copies for at in own[: len(taken)]]
            for at, row in zip(own, taken, strict=False):
                self.rows[at], self.made[at] = row, 0
                self.starts[at] = self.filled - len(row.ids)
        turns = turns_with_length(self.program[0])
        with computing_with(self.w):
            self.logits, self.cache = _read(
                *self.program, self.length if turns else width, self.w, self.logits, self.cache,
                tokens, valid, slots,
            )  # fmt: skip

    def advance(self) -> Iterator[tuple[PromptRow, list[int]]]:
        """New tokens of rows, which are free if they have ended then."""
        while len(self.waiting) < self.ahead and (active := self._active()):
            self._write(active)
        tokens, rows = self.waiting.popleft()
        for at, each in enumerate(np.asarray(tokens).swapaxes(0, 1).reshape(-1, self.steps)):
            if (row := rows[at]) is not None and row.finish is None:
                yield row, each.tolist()
                if row.finish is not None:
                    self.rows[at] = None

    def _active(self) -> list[int]:
        """Slots whose rows need more tokens than were asked for."""
        return [
            at for at, row in enumerate(self.rows) if row is not None and self.made[at] < row.limit
        ]

    def _write(self, active: list[int]) -> None:
        """Asks for the next tokens."""
        if self.filled + self.steps > self.length:
            self._shift(-int(self.starts[active].min()))
        numbers = np.array([0 if row is None else row.number for row in self.rows], np.uint32)
        numbers, made = (a.reshape(-1, self.copies).T.copy() for a in (numbers, self.made))
        with computing_with(self.w):
            tokens, self.logits, self.cache = _write(
                *self.program, self.steps, self.settings.method, self.w, self.logits, self.cache,
                self.settings.seed, numbers, made, self.knobs,
            )  # fmt: skip
        self.waiting.append((tokens, list(self.rows)))
        self.made += self.steps
        self.filled += self.steps

    def _make_room(self, new: Sequence[PromptRow], width: int) -> None:
        """Makes the cache long enough for new rows, and its common end not before theirs."""
        if (length := self._length_for(new)) > self.length:
            with computing_with(self.w):
                self.cache = _longer(*self.program, length - self.length, self.cache)
            self.length = length
        if self.filled < width:
            self._shift(width - self.filled)

    def _length_for(self, rows: Sequence[PromptRow]) -> int:
        most = max((max(bucket(len(row.ids)), len(row.ids) + row.limit) for row in rows), default=1)
        return rounded_tokens(most + (self.ahead + 2) * self.steps, self.program[1])

    def _shift(self, by: int) -> None:
        with computing_with(self.w):
            self.cache = _shift(*self.program, self.cache, np.full(self.copies, by, np.int32))
        self.filled += by
        self.starts += by


def _room(num_sharing: int) -> int | None:
    """Bytes for a cache that so many devices hold together; None where there is no telling."""
    device = jax.local_devices()[0]
    memory = device.memory_stats() or {}
    if device.platform == "cpu" or "bytes_limit" not in memory:
        return None
    free = memory["bytes_limit"] - memory.get("bytes_in_use", 0)
    return int(ROOM * free) * num_sharing


def _cache_shapes(model: Decoder, compute: Compute, rows: int, length: int) -> Tree:
    return jax.eval_shape(lambda: cached.new_cache(model, rows, length, compute))


def _batch_axes(model: Decoder, compute: Compute) -> Tree:
    """For each array of a cache's layers the axis of rows, which that of tokens follows; of one
    without tokens its complement."""

    def axis(one: Any, other: Any) -> int:
        rows, *tokens = (i for i, n in enumerate(one.shape) if other.shape[i] != n)
        return ~rows if not tokens else rows

    some, more = (_cache_shapes(model, compute, *size)["layers"] for size in ((2, 16), (3, 32)))
    return jax.tree.map(axis, some, more)


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4, 5))
def _read(
    model: Decoder, compute: Compute, length: int, w: Tree, logits: Array, cache: Tree,
    tokens: Array, valid: Array, slots: Array,
) -> tuple[Array, Tree]:  # fmt: skip
    """The caches and the logits after them with prompts [N, R, T] put into slots [N, R]."""
    axes = _batch_axes(model, compute)

    def read(
        w: Tree, logits: Array, cache: Tree, tokens: Array, valid: Array, slots: Array
    ) -> tuple[Array, Tree]:
        width = tokens.shape[1]
        start = cache["filled"] - width
        new_logits, new = prefill(model, compute, length, w, tokens, valid)

        # the row that goes into each slot, if any
        of = jnp.full(len(logits), len(slots)).at[slots].set(jnp.arange(len(slots)), mode="drop")
        changed = of < len(slots)

        def put(axis: int, held: Array, rows: Array) -> Array:
            of_rows, at = max(axis, ~axis), [0] * held.ndim
            rows = jnp.take(rows, of, axis=of_rows, mode="clip")
            stretch = held
            if axis >= 0:
                at[axis + 1] = start
                rows = jax.lax.slice_in_dim(rows, 0, width, axis=axis + 1)
                stretch = jax.lax.dynamic_slice(held, at, rows.shape)
            mine = changed.reshape(-1, *[1] * (held.ndim - of_rows - 1))
            return jax.lax.dynamic_update_slice(held, jnp.where(mine, rows, stretch), at)

        seen = jnp.where(changed[:, None], False, cache["valid"])
        return jnp.where(changed[:, None], new_logits[of.clip(0, len(slots) - 1)], logits), {
            "layers": jax.tree.map(put, axes, cache["layers"], new["layers"]),
            "valid": put(0, seen, valid),
            "filled": cache["filled"],
        }

    made: tuple[Array, Tree] = on_each(read)(w, logits, cache, tokens, valid, slots)
    return made


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(5, 6))
def _write(
    model: Decoder, compute: Compute, steps: int, method: Method, w: Tree, logits: Array,
    cache: Tree, seed: Array, numbers: Array, made: Array, knobs: Knobs,
) -> tuple[Array, Array, Tree]:  # fmt: skip
    """`steps` new tokens [N, B, steps] of rows of such numbers [N, B] after those that were made
    [N, B], the logits after them and the longer caches."""

    def write(
        whole: Any, logits: Array, cache: Tree, numbers: Array, made: Array
    ) -> tuple[Array, Array, Tree]:
        w, seed, knobs = whole
        keys = keys_of(seed, numbers)
        return decode_steps(model, compute, steps, method, w, logits, cache, keys, made, knobs)

    new: tuple[Array, Array, Tree] = on_each(write)((w, seed, knobs), logits, cache, numbers, made)
    return new


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _shift(model: Decoder, compute: Compute, cache: Tree, by: Array) -> Tree:
    """The caches with all rows moved by so many places [N] to the right."""
    axes = _batch_axes(model, compute)

    def shift(_: Tree, cache: Tree, by: Array) -> Tree:
        roll = lambda axis, a: a if axis < 0 else jnp.roll(a, by, axis + 1)  # noqa: E731
        filled = cache["filled"] + by
        there = jnp.roll(cache["valid"], by, 1) & (jnp.arange(cache["valid"].shape[1]) < filled)
        layers = jax.tree.map(roll, axes, cache["layers"])
        return {"layers": layers, "valid": there, "filled": filled}

    return on_each(shift)((), cache, by)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _longer(model: Decoder, compute: Compute, by: int, cache: Tree) -> Tree:
    """The caches with room for so many more tokens."""
    axes = _batch_axes(model, compute)

    def longer(_: Tree, cache: Tree) -> Tree:
        def pad(axis: int, a: Array) -> Array:
            behind = [(0, by if i == axis + 1 else 0) for i in range(a.ndim)]
            return a if axis < 0 else jnp.pad(a, behind)

        layers = jax.tree.map(pad, axes, cache["layers"])
        return cache | {"layers": layers, "valid": jnp.pad(cache["valid"], ((0, 0), (0, by)))}

    return on_each(longer)((), cache)
