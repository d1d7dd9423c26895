"""Encode: text to ids with the fastest library that gives exactly the same ids.

Three routes: `tiktoken` (byte-level BPE), `sentencepiece` (imported models), `tokenizers`
(anything). tiktoken merges the two neighbors whose bytes together have the lowest rank;
`tokenizers` merges the pair that stands first in a list. The two agree on every text if

- each merged token is made, when its own bytes are encoded alone, from a pair in the list
  (inside a token's bytes everything happens as it would alone, so no other pair can occur),
- those pairs stand in the list in the order of the tokens' ids, and
- a whole piece that is a token is reached by merging (or `ignore_merges` says so).

`bpe_ranks` checks all three; the split into pieces is matched against known splits, and the
whole is compared on a probe text before `auto` takes it.
"""

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lmwright.data.tokens.bpe import GPT2_SPLIT, byte_letters, merges_of
from lmwright.data.tokens.probe import PROBE
from lmwright.data.tokens.tokenizer import TextTokenizer
from lmwright.errors import UserError

# Digits are cut out one by one first, then GPT-2's split: spaces before a digit stay together.
DIGITS_THEN_GPT2 = r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"


def make_encoder(tokenizer: TextTokenizer, route: str) -> "Encoder":
    """Encoder of a route that `choose_route` returned, or of one that needs no proof."""
    if route == "tiktoken":
        return TiktokenEncoder(tokenizer)
    if route == "sentencepiece":
        return SentencePieceEncoder(tokenizer)
    return Encoder(tokenizer)


def choose_route(tokenizer: TextTokenizer, route: str = "auto") -> str:
    """Fastest route with ids equal to those of `tokenizers`, or the named one after a check.

    Raises UserError if the named route cannot give the tokenizer's ids.
    """
    if route == "tokenizers":
        return route
    wanted = (route,)
    if route == "auto":
        # Two cuts of equal score are settled by rounding in Unigram: no proof is possible.
        unigram = tokenizer.spec["model"]["type"] == "Unigram"
        wanted = ("tiktoken",) if unigram else ("tiktoken", "sentencepiece")
    for name in wanted:
        why_not = _refuse(tokenizer, name)
        if why_not is None:
            return name
        if route != "auto":
            raise UserError(
                f"data.tokenize.route={route!r} does not fit this tokenizer: {why_not}; "
                "leave it at 'auto'"
            )
    return "tokenizers"


def _refuse(tokenizer: TextTokenizer, route: str) -> str | None:
    """Reason why a route would not give the ids of `tokenizers`; None if it does."""
    try:
        if route == "tiktoken":
            bpe_ranks(tokenizer.spec, prove=True)
        encoder = make_encoder(tokenizer, route)
    except CannotConvertError as e:
        return str(e)
    reference = Encoder(tokenizer)
    for ours, theirs in zip(
        encoder.encode_batch(PROBE), reference.encode_batch(PROBE), strict=True
    ):
        if not np.array_equal(ours, theirs):
            return "it gives other ids on a probe text"
    return None


class CannotConvertError(Exception):
    """The tokenizer has no equivalent in the other library; the text says why."""


class Encoder:
    """Encodes data with the `tokenizers` library: special tokens in a text are ordinary text."""

    def __init__(self, tokenizer: TextTokenizer):
        self._backend = tokenizer.plain

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, uint32 [tokens], without additions."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, np.uint32) for e in encodings]


class SentencePieceEncoder(Encoder):
    """The `sentencepiece` library on the model that the tokenizer was imported from."""

    def __init__(self, tokenizer: TextTokenizer):
        import sentencepiece

        if tokenizer.sentencepiece is None:
            raise CannotConvertError("it was not imported from a sentencepiece model")
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.sentencepiece)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(self._processor.encode(t), np.uint32) for t in texts]


class TiktokenEncoder(Encoder):
    """The `tiktoken` library on ranks taken from tokenizer.json."""

    def __init__(self, tokenizer: TextTokenizer):
        import tiktoken

        super().__init__(tokenizer)
        spec = tokenizer.spec
        # The library's own normalizer: Unicode versions differ between libraries.
        self._normalizer = tokenizer.backend.normalizer
        ranks = bpe_ranks(spec, prove=False)
        self._encoding = tiktoken.Encoding(
            "lmwright", pat_str=split_pattern(spec), mergeable_ranks=ranks, special_tokens={}
        )
        self._beyond = _beyond(spec) if max(ranks.values()) >= _beyond(spec) else None
        self._words = words = _find_matched_words(spec)
        longest_first = sorted(words, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if words else None

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self._encode(t) for t in texts]

    def _encode(self, text: str) -> np.ndarray:
        if self._cut is None:
            return self._piece(text)
        pieces = [p for p in self._cut.split(text) if p]
        ids = [
            np.array([self._words[p]], np.uint32) if p in self._words else self._piece(p)
            for p in pieces
        ]
        return np.concatenate([np.zeros(0, np.uint32), *ids])

    def _piece(self, text: str) -> np.ndarray:
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        try:
            ids = self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:
            # Its regex gives up on blanks by the hundred thousand.
            return super().encode_batch([text])[0]
        if self._beyond is not None and ids.size and ids.max() >= self._beyond:
            return super().encode_batch([text])[0]
        return ids


def split_pattern(spec: dict[str, Any]) -> str:
    """Regular expression that splits a text as the pre-tokenizer of a tokenizer.json does."""
    pre = spec.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", []) if pre.get("type") == "Sequence" else [pre]
    kinds = [s.get("type") for s in steps]
    if not kinds or kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        raise CannotConvertError("it is not a byte-level BPE without a leading space")
    gpt2 = steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and gpt2:
        return GPT2_SPLIT
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and gpt2:
        return DIGITS_THEN_GPT2
    if kinds == ["Split", "ByteLevel"] and not gpt2:
        split = steps[0]
        regex = split["pattern"].get("Regex")
        if regex and split.get("behavior") == "Isolated" and not split.get("invert"):
            return regex
    raise CannotConvertError(f"its pre-tokenizer ({', '.join(map(str, kinds))}) is not known")


def bpe_ranks(spec: dict[str, Any], *, prove: bool) -> dict[bytes, int]:
    """Token bytes to id of a byte-level BPE; CannotConvertError if tiktoken would differ."""
    model = spec["model"]
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model["type"] != "BPE" or any(model.get(k) for k in odd):
        raise CannotConvertError("it is not a plain byte-level BPE")
    split_pattern(spec)
    byte_of = {letter: i for i, letter in enumerate(byte_letters())}
    special = {t["content"] for t in spec["added_tokens"]}
    ranks: dict[bytes, int] = {}
    for text, i in model["vocab"].items():
        if text not in special:
            try:
                ranks[bytes(byte_of[c] for c in text)] = i
            except KeyError:
                raise CannotConvertError(f"its token {text!r} is not made of bytes") from None
    if prove:
        _prove(ranks, model, byte_of)
    # tiktoken needs every byte; an id from here on tells that `tokenizers` knows better.
    beyond = _beyond(spec)
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    return ranks | {bytes([b]): beyond + i for i, b in enumerate(missing)}


def _beyond(spec: dict[str, Any]) -> int:
    """First id that the tokenizer does not use."""
    added = (t["id"] for t in spec["added_tokens"])
    return 1 + max(max(spec["model"]["vocab"].values()), *added, 0)


def _prove(ranks: dict[bytes, int], model: dict[str, Any], byte_of: dict[str, int]) -> None:
    place = {}
    for i, (left, right) in enumerate(merges_of(model)):
        place[bytes(byte_of[c] for c in left), bytes(byte_of[c] for c in right)] = i
    last = -1
    for token, _ in sorted(ranks.items(), key=lambda e: e[1]):
        if len(token) == 1:
            continue
        pair = _last_pair(token, ranks)
        if pair is None:
            if not model.get("ignore_merges"):
                raise CannotConvertError(f"its token {token!r} cannot be reached by merging")
            continue
        if pair not in place or place[pair] < last:
            raise CannotConvertError(f"its merges build {token!r} in another order")
        last = place[pair]


def _last_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that merge into `token` last; None if merging ends before."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pair_ranks = [ranks.get(a + b) for a, b in itertools.pairwise(parts)]
        known = [r for r in pair_ranks if r is not None]
        if not known:
            return None
        at = pair_ranks.index(min(known))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _find_matched_words(spec: dict[str, Any]) -> dict[str, int]:
    """Added tokens that are not special: `tokenizers` matches them in any text."""
    words = {}
    for token in spec["added_tokens"]:
        if token["special"]:
            continue
        if token["single_word"] or token["lstrip"] or token["rstrip"]:
            raise CannotConvertError(f"its added token {json.dumps(token['content'])} strips")
        if token["normalized"] and spec["normalizer"]:
            raise CannotConvertError(f"its added token {json.dumps(token['content'])} is changed")
        words[token["content"]] = token["id"]
    return words


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Turns off threads of the tokenizers library, because parts already run in parallel."""
    name = "TOKENIZERS_PARALLELISM"
    old = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old
