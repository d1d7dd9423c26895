"""Prompts as rows that are being continued: their ids, what was written, why it ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lmwright.data.tokens.tokenizer import TextTokenizer
from lmwright.errors import UserError
from lmwright.evals.sampling import NO_TOKEN, Sampling
from lmwright.evals.text_stream import TextStream
from lmwright.formats.proof import NOT_FINITE
from lmwright.models.decoder import Decoder

Prompt = str | Sequence[int]
OnText = Callable[[int, str], None]


class ContextFullError(UserError):
    """A prompt leaves no room for an answer in the model's context."""


@dataclass
class PromptRow:
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


def row_of(
    number: int,
    prompt: Prompt,
    model: Decoder,
    tokenizer: TextTokenizer,
    settings: Sampling,
    prefix: tuple[int, ...],
) -> PromptRow:
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
    return PromptRow(number, ids, min(room, settings.max_new_tokens), stream, [])


def take(
    row: PromptRow, new: list[int], settings: Sampling, ends: frozenset[int], on_text: OnText | None
) -> None:
    """Appends new tokens to a row until it ends; `on_text(number, text)` is given what has become
    final. Raises UserError for a model whose logits were not finite."""
    full = "length" if row.limit == settings.max_new_tokens else "context"
    for token in new:
        if row.finish is not None:
            return
        if token == NO_TOKEN:
            raise UserError(NOT_FINITE.format("logits"))
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
