"""Conversations to ids, with a mark on each token that is learned.

    conversation --template--> text, spans --tokenizer--> ids, letters of each id
                                                          learned: it overlaps a span

The ids are those of the whole text, as transformers gives them. A text that does not end in
a special token gets the one that ends a document, so that the model learns to stop.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lmwright.config.run import Chat
from lmwright.data.text.chat import UnusableError
from lmwright.data.text.chat_markers import marker_pattern
from lmwright.data.text.chat_template import ChatTemplate, Span, Turns
from lmwright.data.tokens.tokenizer import TextTokenizer

LEARNED, BEGINS, LIKED = 1, 2, 4


@dataclass(frozen=True)
class Example:
    """Ids [tokens] of one conversation; `learned` is true where a token is to be predicted."""

    ids: np.ndarray  # uint32
    learned: np.ndarray  # bool
    text_bytes: int
    """UTF-8 bytes of the learned text."""
    cut: bool = False
    second: int | None = None
    """Position at which the rejected answer's conversation begins, in a pair."""
    liked: bool | None = None
    """True for an answer rated good, False for a bad one, None without a rating."""

    @property
    def marks(self) -> np.ndarray:
        """Mark uint8 of each token: LEARNED if it is learned, BEGINS where another conversation
        begins. The first token of a rated one, which nothing predicts, is LIKED or not marked."""
        marks = self.learned.astype(np.uint8) * LEARNED
        if self.second is not None:
            marks[self.second] |= BEGINS
        if self.liked is not None:
            marks[0] = LIKED * self.liked
        return marks


class ChatEncoder:
    """Encodes conversations for rows of `seq_len` tokens. `end_id` may end a text."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: TextTokenizer,
        chat: Chat,
        seq_len: int,
        end_id: int | None,
    ):
        self.template, self.tokenizer, self.chat = template, tokenizer, chat
        self.seq_len, self.end_id = seq_len, end_id
        self._endings = tuple(tokenizer.special_tokens)
        longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
        patterns = [*map(re.escape, longest_first), marker_pattern(template)]
        self._forged = re.compile("|".join(filter(None, patterns)) or "(?!)")

    def encode(self, conversation: dict[str, Any]) -> Example | None:
        """Example for a conversation; None if it is too long and dropped. Raises UnusableError if
        the template refuses it, if it spells a special token, or if it has nothing to learn. A
        preference becomes one example of two conversations, which share a row."""
        return self.encode_sized(conversation)[0]

    def encode_sized(self, conversation: dict[str, Any]) -> tuple[Example | None, int]:
        """Example as `encode` returns it, and the row length that the whole conversation needs."""
        if "rejected" not in conversation:
            whole = self._whole(conversation)
            return self._fit(whole, self.seq_len), len(whole.ids)
        chosen = self._whole(conversation)
        rejected = self._whole({**conversation, "messages": conversation["rejected"]})
        room, size = self.seq_len, len(chosen.ids) + len(rejected.ids)
        if size > room:
            room //= 2
        pair = [self._fit(each, room) for each in (chosen, rejected)]
        return None if None in pair else _join_examples(*pair), size

    def _whole(self, conversation: dict[str, Any]) -> Example:
        """Example for a conversation of any length."""
        if self.chat.special_text == "refuse":
            self._refuse_special(conversation)
        turns = self.template.turns(conversation)
        liked = conversation.get("liked")
        # an answer that is rated is one turn: it changes places with others (objectives/kto.py)
        every = self.chat.train_on == "all" and liked is None
        learned_ones = _learned(turns, conversation)
        spans: Sequence[Span] = [
            span for span, turn in zip(turns.turns, turns.of, strict=True)
            if turn in learned_ones and (every or turn == turns.of[-1])
        ]  # fmt: skip
        to_end = bool(spans) and spans[-1] == turns.turns[-1]
        ends = turns.text.rstrip().endswith(self._endings)
        if self.end_id is not None and not ends and to_end:
            spans = _to_the_end(turns.text, spans)
        ids, offsets = self.tokenizer.encode_offsets(turns.text)
        learned = overlaps(offsets, spans)
        spoken = "".join(turns.text[a:b] for a, b in spans)
        if self.end_id is not None and not ends:
            ids = np.append(ids, np.uint32(self.end_id))
            learned = np.append(learned, to_end)
        if not learned[1:].any():
            raise UnusableError("the chat template leaves nothing to learn")
        return Example(ids, learned, len(spoken.encode()), liked=liked)

    def _fit(self, example: Example, room: int) -> Example | None:
        size, T = len(example.ids), room
        if size <= T:
            return example
        if self.chat.too_long == "drop":
            return None
        window = slice(size - T, None) if self.chat.too_long == "cut-left" else slice(0, T)
        learned = example.learned[window]
        if not learned[1:].any():
            cure = "raise data.pack.seq_len"
            if self.chat.too_long == "cut-right":
                cure += ' or set data.chat.too_long = "cut-left"'
            raise UnusableError(
                f"none of its {size} tokens would be learned after truncation to {T}; {cure}"
            )
        # bytes are not known token by token
        share = int(learned.sum()) / max(1, int(example.learned.sum()))
        size = round(example.text_bytes * share)
        return replace(example, ids=example.ids[window], learned=learned, text_bytes=size, cut=True)

    def _refuse_special(self, conversation: dict[str, Any]) -> None:
        for part in ("messages", "tools"):
            for place, text in enumerate(_texts(conversation.get(part)), 1):
                if not (match := self._forged.search(text)):
                    continue
                special = match[0] in self.tokenizer.special_tokens
                what = "the special token " if special else ""
                why = "" if special else ", which the chat template writes around turns,"
                raise UnusableError(
                    f"its text spells {what}{match[0].strip()!r}{why} (text {place} of its "
                    f"{part}); data.chat.special_text = 'parse' takes it as it is written"
                )


def _learned(turns: Turns, conversation: dict[str, Any]) -> set[int]:
    """Numbers of the assistant's turns but those whose message has the `weight` 0 (as in OpenAI's
    fine-tuning files). Raises UnusableError where a turn is missing."""
    messages = conversation["messages"][conversation.get("first", 0) :]
    weights = [m.get("weight", 1) for m in messages if m["role"] == "assistant"]
    if all(weights):
        return set(turns.of)
    if len(weights) != len(set(turns.of)):
        raise UnusableError(
            "the chat template leaves out a turn of the assistant, so that it is not known which "
            "turns have the weight 0"
        )
    return {turn for turn, weight in enumerate(weights) if weight}


def _to_the_end(text: str, spans: Sequence[Span]) -> Sequence[Span]:
    """Spans including the blanks after the last turn, which the model has to write too before it
    may end the text."""
    start, stop = spans[-1]
    return spans if text[stop:].strip() else [*spans[:-1], (start, len(text))]


def _join_examples(chosen: Example, rejected: Example) -> Example:
    return Example(
        np.concatenate([chosen.ids, rejected.ids]),
        np.concatenate([chosen.learned, rejected.learned]),
        chosen.text_bytes + rejected.text_bytes,
        cut=chosen.cut or rejected.cut,
        second=len(chosen.ids),
    )


def _texts(value: Any) -> list[str]:
    """Every text in a JSON value, keys included."""
    if isinstance(value, str):
        return [value]
    inner = value if isinstance(value, list) else ()
    if isinstance(value, dict):
        inner = [part for pair in value.items() for part in pair]
    return [text for part in inner for text in _texts(part)]


def overlaps(offsets: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Mask bool [tokens] of the tokens that share a character with a span.

    offsets: int [tokens, 2], letters start..stop-1 of each token. A token without letters
    counts where it lies inside a span.
    """
    start, stop = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    mask = np.zeros(len(offsets), bool)
    for a, b in spans:
        mask |= (start < b) & (stop > a)
    return mask
