"""Text of a masked diffusion model (LLaDA, https://arxiv.org/abs/2502.09992): masks after a prompt
are filled in, block by block, the surest first.

    prompt [M M M M | M M M M]     all masks of a block are predicted
    prompt [M a M c | M M M M]     those with the highest probability stay, the others are masks
    prompt [b a d c | M M M M]     the next block

A block takes `steps` passes over the whole text, and each pass fills an equal share of its masks.
A row's tokens depend on its own prompt, the seed and its number, not on the rows beside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmwright.core.compute import LANES, Compute
from lmwright.core.contract import Batch, Model
from lmwright.core.param import Tree
from lmwright.data.tokens.tokenizer import TextTokenizer
from lmwright.errors import UserError
from lmwright.evals.decoding import row_keys
from lmwright.evals.sampling import Sampling, refuse_wrong
from lmwright.kernels import select
from lmwright.nn.intervals import Interval, blocks_reach
from lmwright.objectives.diffusion import at_own_places
from lmwright.objectives.masking import MASK


@dataclass(frozen=True)
class Filling:
    """Settings of text that is filled in."""

    block_tokens: int | None = None
    """Tokens of a block; None takes all of the text as one."""
    steps: int | None = None
    """Passes for each block; None takes one for each of its tokens."""
    first: Literal["surest", "random"] = "surest"
    """Predictions that stay: those with the highest probability, or random ones."""
    threshold: float | None = None
    """Probability above which all predictions stay, whatever their share of a pass."""
    guidance: float = 0.0
    """Weight of the difference that the prompt makes (https://arxiv.org/abs/2410.18514)."""
    sees: Literal["text", "prefix", "blocks"] = "text"
    """Later blocks: seen as masks (`text`, LLaDA) or not at all (`prefix`, LLaDA 2); with `blocks`,
    those before see no later one either, as in block diffusion."""

    def __post_init__(self) -> None:
        wrong = {
            "block_tokens": (self.block_tokens is not None and self.block_tokens < 1, "at least 1"),
            "steps": (self.steps is not None and self.steps < 1, "at least 1"),
            "threshold": (
                self.threshold is not None and not 0 < self.threshold < 1,
                "above 0 and below 1",
            ),
            "guidance": (not 0 <= self.guidance < float("inf"), "0 or more"),
        }
        refuse_wrong(self, wrong)
        if self.threshold is not None and self.first == "random":
            raise UserError(
                "threshold: has no effect where predictions are kept at random; leave it out"
            )

    def check(self, settings: Sampling) -> None:
        """Raises UserError for settings that do not go together."""
        if settings.top_k is not None or settings.top_p is not None:
            raise UserError(
                "top_k, top_p: have no effect on a model that fills in masks; use temperature"
            )
        most = settings.max_new_tokens
        if self.block_tokens is not None and self.block_tokens > most:
            raise UserError(
                f"block_tokens: {self.block_tokens} is more than max_new_tokens {most}; use at "
                "most that"
            )
        block = self.block_tokens or most
        if self.steps is not None and self.steps > block:
            raise UserError(
                f"steps: {self.steps} is more than the {block} tokens of a block; use at most that"
            )
        if self.sees == "prefix" and block == most:
            raise UserError("sees: 'prefix' has no effect with a single block; set block_tokens")
        if self.sees == "blocks" and self.block_tokens is None:
            raise UserError("sees: 'blocks' needs block_tokens; set it to that of the training")


class _Program(NamedTuple):
    """Everything that a compiled block depends on, beside the shapes of its arrays."""

    model: Any
    compute: Compute
    block: int
    steps: int
    mask: int
    first: str
    sees: str
    samples: bool
    guided: bool


class _Knobs(NamedTuple):
    temperature: np.float32
    guidance: np.float32
    threshold: np.float32


def mask_of(tokenizer: TextTokenizer) -> int:
    """Id of the mask token. Raises UserError where there is none."""
    if tokenizer.mask_id is None:
        raise UserError(
            "the tokenizer has no mask token, which this model fills in; add it by: "
            f"lmwright vocab MODEL OUT --special --add '{MASK}'"
        )
    return tokenizer.mask_id


def fill_rows(
    model: Model,
    w: Tree,
    compute: Compute,
    rows: Sequence[Any],
    settings: Sampling,
    filling: Filling,
    mask: int,
    take: Callable[[Any, list[int]], None],
) -> None:
    """Fills in the text of each row, which has `number`, `ids` of its prompt, `limit` of new tokens
    and `finish`; `take(row, tokens)` is called after each block and may set `finish`."""
    most = max(row.limit for row in rows)
    block = min(filling.block_tokens or most, most)
    program = _Program(
        model, compute, block, min(filling.steps or block, block), mask, filling.first,
        filling.sees, settings.temperature > 0, filling.guidance > 0,
    )  # fmt: skip
    knobs = _Knobs(*map(np.float32, (settings.temperature, filling.guidance,
                                     filling.threshold or np.inf)))  # fmt: skip
    tokens, starts, stops = _canvas(rows, mask, compute)
    keys = row_keys(settings.seed, [row.number for row in rows], len(tokens))
    for number in range(-(-most // block)):
        begins = starts + number * block
        tokens = _fill_block(
            program, w, tokens, starts, stops, np.minimum(begins, stops), keys, np.int32(number),
            knobs,
        )  # fmt: skip
        written = np.asarray(tokens)
        for row, text, begin, stop in zip(rows, written, begins, stops, strict=False):
            if row.finish is None and begin < stop:
                take(row, text[begin : min(begin + block, stop)].tolist())
        if all(row.finish is not None for row in rows):
            return


def _canvas(
    rows: Sequence[Any], mask: int, compute: Compute
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompts with masks behind, int32 [B, T], and where the masks begin and end, [B]; sizes are
    rounded up, so that there are few programs."""
    num_rows = _power(len(rows))
    width = max(len(row.ids) + row.limit for row in rows)
    least = LANES if compute.platform == "tpu" else 16
    width = -(-width // LANES) * LANES if width > LANES else max(least, _power(width))
    tokens = np.full((num_rows, width), mask, np.int32)
    starts, stops = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row.ids)] = row.ids
        starts[i], stops[i] = len(row.ids), len(row.ids) + row.limit
    return tokens, starts, stops


def _power(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


@partial(jax.jit, static_argnums=0)
def _fill_block(
    program: _Program,
    w: Tree,
    tokens: Array,
    starts: Array,
    stops: Array,
    begins: Array,
    keys: Array,
    number: Array,
    knobs: _Knobs,
) -> Array:
    """Tokens [B, T] with the masks of one block filled in; the block of a row begins at `begins`
    and ends with the row's text, at `stops`, at the latest."""
    p = program
    places = begins[:, None] + jnp.arange(p.block)  # [B, block]
    inside = places < stops[:, None]
    at = jnp.arange(tokens.shape[1])
    ends = stops if p.sees == "text" else jnp.minimum(begins + p.block, stops)
    ids = jnp.broadcast_to(at < ends[:, None], tokens.shape).astype(jnp.int32)
    places = jnp.minimum(places, tokens.shape[1] - 1)
    hidden = _hidden(p, starts, ends, tokens.shape)
    share, rest = jnp.divmod(jnp.sum(inside, axis=1), p.steps)

    def masks(tokens: Array) -> Array:
        return inside & (jnp.take_along_axis(tokens, places, axis=1) == p.mask)

    def one(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        step, tokens = carry
        logits = _logits(p, w, tokens, ids, places, hidden)  # [B, block, V]
        if p.guided:
            without = jnp.where(at < starts[:, None], p.mask, tokens)
            plain = _logits(p, w, without, ids, places, hidden)
            logits = plain + (knobs.guidance + 1) * (logits - plain)
        noise = jax.vmap(jax.random.fold_in, (0, None))(keys, number * p.steps + step)
        chosen, chance = _predict(p, logits, noise, knobs.temperature)
        open_ = masks(tokens)
        sure = jnp.where(open_, chance, -jnp.inf)
        rank = jnp.argsort(jnp.argsort(-sure, axis=1), axis=1)
        count = jnp.maximum(share + (step < rest), jnp.sum(sure > knobs.threshold, axis=1))
        stays = open_ & (rank < count[:, None])
        old = jnp.take_along_axis(tokens, places, axis=1)
        new = jnp.where(stays, chosen, old)
        rows = jnp.arange(len(tokens))[:, None]
        # places beyond the end of a text are left alone
        target = jnp.where(inside, places, tokens.shape[1])
        return step + 1, tokens.at[rows, target].set(new, mode="drop")

    def more(carry: tuple[Array, Array]) -> Array:
        return (carry[0] < p.steps) & jnp.any(masks(carry[1]))

    return jax.lax.while_loop(more, one, (jnp.int32(0), jnp.asarray(tokens)))[1]


def _hidden(
    p: _Program, starts: Array, ends: Array, shape: tuple[int, ...]
) -> Callable[..., tuple[Array, Any]]:
    """The model's `hidden`; with `blocks` each block sees those before it and itself alone, and the
    prompt is blocks of its own."""
    if p.sees != "blocks":
        run: Callable[..., tuple[Array, Any]] = p.model.hidden
        return run
    at = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    prompt, begin = at < starts[:, None], starts[:, None]
    end = lambda at: (at // p.block + 1) * p.block  # noqa: E731
    end = jnp.where(prompt, jnp.minimum(end(at), begin), begin + end(at - begin))
    seen = Interval(jnp.zeros_like(at), jnp.minimum(end, ends[:, None]))
    attend, reach = select.attend(p.compute), blocks_reach(p.block)
    kernel = lambda q, k, v, ids, scoring: attend(q, k, v, seen, scoring, reach)  # noqa: E731
    return partial(p.model.hidden_by, kernel)


def _logits(
    p: _Program, w: Tree, tokens: Array, ids: Array, places: Array,
    hidden: Callable[..., tuple[Array, Any]],
) -> Array:  # fmt: skip
    """float32 [B, block, V] at places [B, block]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape) * ids
    batch = Batch(tokens, ids, positions, jnp.zeros(tokens.shape, jnp.float32))
    x, _ = hidden(w, batch, p.compute)
    x = at_own_places(p.model, x, positions)
    logits: Array = p.model.logits(w, jnp.take_along_axis(x, places[..., None], axis=1))
    return logits


def _predict(p: _Program, logits: Array, keys: Array, temperature: Array) -> tuple[Array, Array]:
    """A token for each place of a block [B, block], never the mask, and what it is ranked by: its
    probability, or a random number."""
    without = logits.at[..., p.mask].set(-jnp.inf)
    if p.samples:
        shape = logits.shape[1:]
        noise = jax.vmap(lambda key: jax.random.gumbel(jax.random.fold_in(key, 0), shape))(keys)
        without = without + temperature * noise
    chosen = jnp.argmax(without, axis=-1).astype(jnp.int32)
    if p.first == "random":
        shape = logits.shape[1:2]
        draw = lambda key: jax.random.uniform(jax.random.fold_in(key, 1), shape)  # noqa: E731
        return chosen, jax.vmap(draw)(keys)
    chance = jax.nn.softmax(logits, axis=-1)
    return chosen, jnp.take_along_axis(chance, chosen[..., None], axis=-1)[..., 0]
