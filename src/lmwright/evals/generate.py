"""Generation: prompts continued with a kv cache.

    prompts --encode, pad left--> prefill --> decode, a few steps a call --> text streams
                                                ^------------- cache --------------+

A few prompts are one batch; of many, each that ends makes room for the next (`evals.slots`).
A row's tokens depend on its own prompt, the seed and its number, not on the rows beside it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Literal

import numpy as np
from jax import Array

from lmwright.core.compute import DTYPES, Compute
from lmwright.core.copies import computing_with, num_copies_of, num_sharing, one_copy
from lmwright.core.param import Tree
from lmwright.core.ternary import cast_as_trained
from lmwright.data.tokens.tokenizer import TextTokenizer
from lmwright.errors import UserError
from lmwright.evals.compute import spread, text_compute
from lmwright.evals.decoding import calls_ahead, decode, knobs_of, prefill, row_keys
from lmwright.evals.fill import Filling, fill_rows, mask_of
from lmwright.evals.prompt_rows import (
    OnText,
    Prompt,
    PromptRow,
    bucket,
    pad_prompts,
    row_of,
    take,
)
from lmwright.evals.sampling import Sampling
from lmwright.evals.slots import in_slots
from lmwright.formats.tokenizer_files import prompt_prefix
from lmwright.models import cached
from lmwright.models.decoder import Decoder

__all__ = ["Generation", "Sampling", "continued", "generate"]

# decode steps in one call; a finished row computes at most so many in vain
STEPS = 16
SHOWN_STEPS = {"gpu": 8, "early gpu": 8}  # by kernels, of text that is shown meanwhile; others: 1
BATCH_ROWS = 32


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
    batch_rows: int | None = None,
    filling: Filling | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[Generation]:
    """Continues each prompt, given as text or as ids; `filling` is for models that fill in masks.

    `prefix` goes before each text; None takes what the tokenizer's file says. `end_ids` end a
    text beside the tokenizer's own. `on_text(row, text)` is called as text becomes certain,
    `on_done(1)` when a text and all before it have ended.
    Raises UserError for a prompt that leaves no room in the context.
    """
    compute = compute or text_compute(model, w, num_steps(prompts, settings))
    filling = filling_for(model, filling, settings)
    prefix = prompt_prefix(tokenizer) if prefix is None else tuple(prefix)
    rows = [
        row_of(number, prompt, model, tokenizer, settings, prefix)
        for number, prompt in enumerate(prompts)
    ]
    ends = continued(
        model, w, tokenizer, rows, settings, compute, on_text,
        end_ids=end_ids, batch_rows=batch_rows, filling=filling,
    )  # fmt: skip
    found = []
    for row in ends:
        found.append(generation_of(row))
        if on_done:
            on_done(1)
    return found


def continued(
    model: Decoder,
    w: Tree,
    tokenizer: TextTokenizer,
    rows: Iterable[PromptRow],
    settings: Sampling,
    compute: Compute,
    on_text: OnText | None = None,
    *,
    end_ids: Sequence[int] = (),
    batch_rows: int | None = None,
    filling: Filling | None = None,
) -> Iterator[PromptRow]:
    """Continues rows, at most `batch_rows` at a time on a device (None: as many as it has memory
    for), and yields each when it and all before it have ended."""
    if filling is not None:
        w = one_copy(w)  # batches of its own
    compute = spread(compute, num_sharing(w))
    ends = frozenset({*end_ids, *settings.ends(tokenizer)})
    # Rows need not divide over a mesh, so activations are left to the compiler here.
    with computing_with(w):
        w = cast_as_trained(model.spec(), w, DTYPES[compute.precision])
        if compute.unroll:
            w = cached.layers_apart(model, w)
    rows = iter(rows)
    run_batch = _run_batch
    if filling is not None:
        run_batch = partial(_fill_batch, filling, mask_of(tokenizer))
    while batch := list(islice(rows, batch_rows or BATCH_ROWS)):
        more = [] if filling is not None else list(islice(rows, 1))
        if more or num_copies_of(w) > 1:
            rows = chain(batch, more, rows)
            yield from in_slots(model, w, compute, rows, settings, ends, STEPS, batch_rows, on_text)
            return
        with computing_with(w):
            run_batch(model, w, compute, batch, settings, ends, on_text)
        yield from batch


def generation_of(row: PromptRow) -> Generation:
    """The result of a row that has ended."""
    return Generation(row.stream.text, tuple(row.tokens), len(row.ids), row.finish)


def num_steps(prompts: Sequence[Any], settings: Sampling) -> int:
    """Number of tokens that are decoded one after the other."""
    return -(-len(prompts) // BATCH_ROWS) * settings.max_new_tokens


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
    else:
        settings.refuse_idle()
    return filling


def _fill_batch(
    filling: Filling, mask: int, model: Any, w: Tree, compute: Compute, rows: list[PromptRow],
    settings: Sampling, ends: frozenset[int], on_text: OnText | None,
) -> None:  # fmt: skip
    push = lambda row, new: take(row, new, settings, ends, on_text)  # noqa: E731
    fill_rows(model, w, compute, rows, settings, filling, mask, push)


def _run_batch(
    model: Decoder,
    w: Tree,
    compute: Compute,
    rows: list[PromptRow],
    settings: Sampling,
    ends: frozenset[int],
    on_text: OnText | None,
) -> None:
    steps = SHOWN_STEPS.get(compute.kernels, 1) if on_text else STEPS
    tokens, valid = pad_prompts([row.ids for row in rows])
    length = bucket(tokens.shape[1] + -(-max(row.limit for row in rows) // steps) * steps)
    logits, cache = prefill(model, compute, length, w, tokens, valid)
    keys = row_keys(settings.seed, [row.number for row in rows], len(tokens))
    knobs = knobs_of(settings, model)
    step, most = 0, max(row.limit for row in rows)
    waiting: deque[Array] = deque()
    while any(row.finish is None for row in rows):
        while len(waiting) < calls_ahead() and step < most:
            new, logits, cache = decode(
                model, compute, steps, settings.method, w, logits, cache, keys, np.int32(step),
                knobs,
            )  # fmt: skip
            waiting.append(new)
            step += steps
        for row, row_tokens in zip(rows, np.asarray(waiting.popleft()), strict=False):
            take(row, row_tokens.tolist(), settings, ends, on_text)
