"""Generation: batches of prompts continued with a kv cache.

    prompts --encode, pad left--> prefill --> decode, a few steps a call --> text streams
                                                ^------------- cache --------------+

A row's tokens depend on its own prompt, the seed and its number, not on the rows beside it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmwright.core.compute import DTYPES, Compute
from lmwright.core.param import Tree
from lmwright.core.spread import computing, num_devices_of
from lmwright.core.ternary import cast_as_trained
from lmwright.data.tokens.tokenizer import TextTokenizer
from lmwright.errors import UserError
from lmwright.evals.compute import spread, text_compute
from lmwright.evals.fill import Filling, fill_rows, mask_of
from lmwright.evals.sampling import Method, Sampling, choose
from lmwright.evals.text_stream import TextStream
from lmwright.formats.tokenizer_files import prompt_prefix
from lmwright.models import cached
from lmwright.models.decoder import Decoder

__all__ = ["Generation", "Sampling", "generate"]

# decode steps in one call; a finished row computes at most so many in vain
STEPS = 16
SHOWN_STEPS = {"gpu": 8, "early gpu": 8}  # by kernels, of text that is shown meanwhile; others: 1
BATCH_ROWS = 32

Prompt = str | Sequence[int]
OnText = Callable[[int, str], None]


class ContextFullError(UserError):
    """A prompt leaves no room for an answer in the model's context."""


@dataclass(frozen=True)
class Generation:
    """One continued prompt."""

    text: str
    """The continuation alone."""
    tokens: tuple[int, ...]
    """Ids of the continuation, without the id that ends a text."""
    prompt_tokens: int
    finish: Literal["end", "stop", "length", "context"]
    """Reason why the text ended: the model ended it; a stop string; max_new_tokens; the context was
    full."""


@dataclass
class _Row:
    """One prompt that is being continued."""

    number: int
    ids: list[int]
    limit: int
    stream: TextStream
    tokens: list[int]
    finish: str | None = None

    def push(self, token: int, end_ids: frozenset[int], full: str) -> str:
        """Appends one token; returns the text that has become final."""
        if token in end_ids:
            self.finish = "end"
            return self.stream.finish()
        self.tokens.append(token)
        text = self.stream.push(token)
        if self.stream.stopped:
            self.finish = "stop"
        elif len(self.tokens) == self.limit:
            text += self.stream.finish()
            self.finish = "stop" if self.stream.stopped else full
        return text


def generate(
    model: Decoder,
    w: Tree,
    tokenizer: TextTokenizer,
    prompts: Sequence[Prompt],
    settings: Sampling,
    compute: Compute | None = None,
    on_text: OnText | None = None,
    *,
    prefix: Sequence[int] | None = None,
    end_ids: Sequence[int] = (),
    batch_rows: int = BATCH_ROWS,
    filling: Filling | None = None,
) -> list[Generation]:
    """Continues each prompt, given as text or as ids; `filling` is for models that fill in masks.

    `prefix` goes before each text; None takes what the tokenizer's file says. `end_ids` end a
    text beside the tokenizer's own. `on_text(row, text)` is called as text becomes certain.
    Raises UserError for a prompt that leaves no room in the context.
    """
    compute = compute or text_compute(model, w, num_steps(prompts, settings, batch_rows))
    run_batch = _run_batch
    if filling := filling_for(model, filling, settings):
        run_batch = partial(_fill_batch, filling, mask_of(tokenizer))
    num_devices = num_devices_of(w)
    compute = spread(compute, num_devices)
    prefix = prompt_prefix(tokenizer) if prefix is None else tuple(prefix)
    ends = frozenset({*end_ids, *settings.ends(tokenizer)})
    rows = [
        row_of(number, prompt, model, tokenizer, settings, prefix)
        for number, prompt in enumerate(prompts)
    ]
    # Rows need not divide over a mesh, so activations are left to the compiler here.
    with computing(num_devices):
        w = cast_as_trained(model.spec(), w, DTYPES[compute.precision])
        if compute.unroll:
            w = cached.layers_apart(model, w)
        for start in range(0, len(rows), batch_rows):
            run_batch(model, w, compute, rows[start : start + batch_rows], settings, ends, on_text)
    return [
        Generation(row.stream.text, tuple(row.tokens), len(row.ids), row.finish) for row in rows
    ]


def num_steps(prompts: Sequence[Any], settings: Sampling, batch_rows: int = BATCH_ROWS) -> int:
    """Number of tokens that are decoded one after the other."""
    return -(-len(prompts) // batch_rows) * settings.max_new_tokens


def filling_for(model: Any, filling: Filling | None, settings: Sampling) -> Filling | None:
    """Settings by which masks are filled in; None for a model that fills in none. Raises UserError
    for settings that do not fit it."""
    if model.fills_masks:
        filling = filling or Filling()
        filling.check(settings)
    elif filling is not None:
        given = [name for name, value in vars(filling).items() if value != getattr(Filling, name)]
        raise UserError(
            f"{', '.join(given)}: for models that fill in masks, which {model.kind!r} does not; "
            "leave it out"
        )
    return filling


def _fill_batch(
    filling: Filling, mask: int, model: Any, w: Tree, compute: Compute, rows: list[_Row],
    settings: Sampling, ends: frozenset[int], on_text: OnText | None,
) -> None:  # fmt: skip
    take = lambda row, new: _take(row, new, settings, ends, on_text)  # noqa: E731
    fill_rows(model, w, compute, rows, settings, filling, mask, take)


def row_of(
    number: int,
    prompt: Prompt,
    model: Decoder,
    tokenizer: TextTokenizer,
    settings: Sampling,
    prefix: tuple[int, ...],
) -> _Row:
    """A prompt that is about to be continued, with its ids. Raises UserError where the context or
    the vocabulary has no room for it."""
    ids = list(prompt)
    if isinstance(prompt, str):
        ids = [*prefix, *tokenizer.encode(prompt, parse_special=True)]
    where = f"prompt {number + 1}"
    if not ids:
        # documents are separated by the id that ends them
        first = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if first is None:
            raise UserError(f"{where}: is empty, and the tokenizer has no token to start from")
        ids = [first]
    if max(ids) >= model.vocab_size or min(ids) < 0:
        raise UserError(
            f"{where}: holds id {max(ids)}, the model has {model.vocab_size}; "
            f"use the tokenizer that the model was trained with"
        )
    room = model.seq_len - len(ids)
    if room < 1:
        raise ContextFullError(
            f"{where}: has {len(ids)} tokens and the model's context is {model.seq_len}; "
            f"shorten it to leave room for an answer"
        )
    decode = partial(tokenizer.decode, skip_special=True)
    stream = TextStream(decode, ids, settings.stop)
    return _Row(number, ids, min(room, settings.max_new_tokens), stream, [])


def _run_batch(
    model: Decoder,
    w: Tree,
    compute: Compute,
    rows: list[_Row],
    settings: Sampling,
    ends: frozenset[int],
    on_text: OnText | None,
) -> None:
    steps = SHOWN_STEPS.get(compute.kernels, 1) if on_text else STEPS
    tokens, valid = pad_prompts([row.ids for row in rows])
    length = bucket(tokens.shape[1] + -(-max(row.limit for row in rows) // steps) * steps)
    logits, cache = _prefill(model, compute, length, w, tokens, valid)
    keys = _row_keys(settings.seed, [row.number for row in rows], len(tokens))
    knobs = (
        np.float32(settings.temperature or 1.0),
        np.int32(min(settings.top_k or model.vocab_size, model.vocab_size)),
        np.float32(settings.top_p or 1.0),
    )
    step, most = 0, max(row.limit for row in rows)
    waiting: deque[Array] = deque()
    ahead = 1 if jax.default_backend() == "cpu" else 2  # a card computes while the host reads
    while any(row.finish is None for row in rows):
        while len(waiting) < ahead and step < most:
            new, logits, cache = _decode(
                model, compute, steps, settings.method, w, logits, cache, keys, np.int32(step),
                knobs,
            )  # fmt: skip
            waiting.append(new)
            step += steps
        for row, row_tokens in zip(rows, np.asarray(waiting.popleft()), strict=False):
            _take(row, row_tokens.tolist(), settings, ends, on_text)


def _take(
    row: _Row, new: list[int], settings: Sampling, ends: frozenset[int], on_text: OnText | None
) -> None:
    full = "length" if row.limit == settings.max_new_tokens else "context"
    for token in new:
        if row.finish is not None:
            return
        text = row.push(token, ends, full)
        if text and on_text:
            on_text(row.number, text)


def bucket(size: int) -> int:
    """Length rounded up to a power of two from 16 to 128, then to a multiple of 128: few shapes, so
    few compilations."""
    if size > 128:
        return -(-size // 128) * 128
    return max(16, 1 << (size - 1).bit_length())


def pad_prompts(ids: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as `pad_left` has them; B and T are rounded up."""
    return pad_left(ids, 1 << (len(ids) - 1).bit_length(), bucket(max(map(len, ids))))


def pad_left(
    ids: Sequence[Sequence[int]], num_rows: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as int32 [B, T] padded on the left, and bool [B, T] where they are."""
    tokens = np.zeros((num_rows, width), np.int32)
    valid = np.zeros((num_rows, width), bool)
    for row, each in enumerate(ids):
        tokens[row, width - len(each) :] = each
        valid[row, width - len(each) :] = True
    return tokens, valid


def _row_keys(seed: int, numbers: list[int], num_rows: int) -> Array:
    numbers = np.asarray(numbers + [0] * (num_rows - len(numbers)), np.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _prefill(
    model: Decoder, compute: Compute, length: int, w: Tree, tokens: Array, valid: Array
) -> tuple[Array, Tree]:
    """Logits [B, V] after the prompts [B, T], and their kv cache of `length`."""
    cache = cached.new_cache(model, tokens.shape[0], length, compute)
    hidden, cache = cached.extend(model, w, tokens, valid, cache, compute, empty_cache=True)
    return model.logits(w, hidden[:, -1:])[:, 0], cache


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(6,))
def _decode(
    model: Decoder, compute: Compute, steps: int, method: Method, w: Tree, logits: Array,
    cache: Tree, keys: Array, first: Array, knobs: tuple[Array, Array, Array],
) -> tuple[Array, Array, Tree]:  # fmt: skip
    """`steps` new tokens [B, steps], the logits [B, V] after them and the longer cache."""

    def one(carry: tuple[Array, Tree], step: Array) -> tuple[tuple[Array, Tree], Array]:
        logits, cache = carry
        token = choose(logits, jax.vmap(jax.random.fold_in, (0, None))(keys, step), method, *knobs)
        valid = jnp.ones((token.shape[0], 1), bool)
        hidden, cache = cached.extend(model, w, token[:, None], valid, cache, compute)
        return (model.logits(w, hidden)[:, 0], cache), token

    (logits, cache), tokens = jax.lax.scan(one, (logits, cache), first + jnp.arange(steps))
    return tokens.T, logits, cache
