"""Sample: a part of a source, measured in tokens.

    files --drawn order--> parts --each from its start--> documents, until their tokens are enough

Only needed files are opened, which depends on the tokens of those before them. The last one is read
up to the document with which the sample is complete.
"""

import functools
import itertools
import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lmwright.config.run import Data, Source
from lmwright.data.draw import Done, Fixed
from lmwright.data.manifest import read_manifest
from lmwright.data.sources.file import File, Slice
from lmwright.data.sources.files import cut_file, group_parts
from lmwright.data.text.parts import COUNTED, Counting, Part
from lmwright.data.tokens.encode import Encoder, choose_route, make_encoder, one_thread
from lmwright.data.tokens.facts import facts_of
from lmwright.data.tokens.tokenizer import load_tokenizer
from lmwright.errors import UserError

BATCH_DOCS = 64


def is_sampled(data: Data) -> bool:
    """True if a part of any source is asked for."""
    return any(source.sample_tokens for source in data.sources)


def counting_of(data: Data, folder: Path) -> Counting | None:
    """Settings for counting tokens, by the tokenizer stage; None if no sample is asked for."""
    if not is_sampled(data):
        return None
    made = read_manifest(folder / "tokenizer")
    facts = facts_of(made, data.tokenize)
    around = (data.tokenize.prepend == "bos") + (data.tokenize.append == "eos")
    return Counting(
        str(folder / "tokenizer"), facts["tokenizer_fingerprint"], data.tokenize.route, around
    )


def draw_parts(files: Sequence[File], source: Source, part_bytes: int) -> list[tuple[Slice, ...]]:
    """Slices of a sampled source, about `part_bytes` of text each, in the order in which they are
    read. Files here are cut before; those elsewhere are not looked into."""
    pieces: list[tuple[Slice, int]] = []
    for file in files:
        if "://" in file.path:
            pieces.append((Slice(file), file.size or part_bytes))
        else:
            pieces += cut_file(file, source, part_bytes)

    def lot(piece: tuple[Slice, int]) -> bytes:
        name = f"{source.sample_seed}\0{piece[0].file.name}\0{piece[0].start}"
        return xxhash.xxh3_128_digest(name.encode())

    return group_parts(sorted(pieces, key=lot), part_bytes)


class SampleDraw:
    """Choice of the parts that samples need, and of all parts of the other sources."""

    def __init__(self, parts: Sequence[Part]):
        self._parts = parts
        whole = [part.number for part in parts if part.most_tokens is None]
        self._whole = Fixed(parts, whole)
        self._samples: dict[str, list[Part]] = {}
        self.chosen: list[int] = []
        """What `used` returned last."""
        for part in parts:
            if part.most_tokens is not None:
                self._samples.setdefault(part.name, []).append(part)

    def next(self, done: Done, running: Set[int]) -> tuple[int, Any] | None:
        """The next part to read. Raises UserError where a source has fewer tokens than its
        sample."""
        for parts in self._samples.values():
            if (drawn := self._next_of(parts, done, running)) is not None:
                return drawn.number, drawn
        return self._whole.next(done, running)

    def _next_of(self, parts: Sequence[Part], done: Done, running: Set[int]) -> Part | None:
        known = [_tokens(done[p.number]) for p in parts if p.number in done]
        usual = sum(known) / len(known) if known else None
        wanted, have, complete = parts[0].most_tokens, 0.0, True
        for part in parts:
            left = wanted - have
            if part.number in done:
                have += _tokens(done[part.number])
                if have < wanted:
                    continue
                if not complete:  # earlier ones are running
                    return None
                # the last one, which has enough without its end
                again = _most(done[part.number]) != left and part.number not in running
                return replace(part, most_tokens=int(left)) if again else None
            complete = False
            if part.number not in running:
                return part
            if usual is None:  # the first one says how many there are in each
                return None
            have += usual
            if have >= wanted:
                return None
        if complete and parts[0].portion is not None:
            raise UserError(
                f"data.sources: {parts[0].name}: portion {parts[0].portion + 1} has only "
                f"{int(have):,} of its {wanted:,} tokens, and no text is left; lower sample_tokens"
            )
        if complete:
            raise UserError(
                f"data.sources: {parts[0].name}: sample_tokens = {wanted:,}, but all of it has "
                f"{int(have):,} tokens; leave sample_tokens out to read all"
            )
        return None

    def used(self, done: Done) -> list[int]:
        numbers = self._whole.used(done)
        for parts in self._samples.values():
            ends = itertools.accumulate(_tokens(done[p.number]) for p in _first(parts, done))
            count = next(i for i, end in enumerate(ends, 1) if end >= parts[0].most_tokens)
            numbers = [*numbers, *(part.number for part in parts[:count])]
        self.chosen = sorted(numbers)
        return self.chosen

    def expected(self, done: Done) -> int:
        total = self._whole.expected(done)
        for parts in self._samples.values():
            known = [_tokens(done[p.number]) for p in parts if p.number in done]
            enough = len(known) * parts[0].most_tokens / sum(known) if sum(known) else 1
            total += max(len(known), min(len(parts), -int(-enough // 1)))
        return total

    def left(self, done: Done) -> int:
        return len(self._parts) - len(done)


def _first(parts: Sequence[Part], done: Done) -> Iterator[Part]:
    """Parts up to the first that is not done."""
    return itertools.takewhile(lambda part: part.number in done, parts)


def _tokens(counts: dict[str, Any]) -> int:
    (entry,) = counts[COUNTED].values()
    return entry["tokens"]


def _most(counts: dict[str, Any]) -> int:
    (entry,) = counts[COUNTED].values()
    return entry["most_tokens"]


@dataclass
class Document:
    """Text of one row of a slice; None for a row that is bad or empty."""

    piece: Slice
    row: Any
    text: str | None


class Sampler:
    """Documents of a part until they have the tokens that it is to have."""

    def __init__(self, part: Part):
        self._part, self.tokens = part, 0

    def take(self, documents: Iterator[Document]) -> Iterator[Document]:
        """Documents up to the tokens of the sample; all of them, where the part is of no sample."""
        if self._part.most_tokens is None:
            yield from documents
            return
        encoder = _encoder(self._part.counting)
        while batch := list(itertools.islice(documents, BATCH_DOCS)):
            for document, size in zip(batch, self._sizes(encoder, batch), strict=True):
                yield document
                self.tokens += size
                if self.tokens >= self._part.most_tokens:
                    return

    def _sizes(self, encoder: Encoder, batch: Sequence[Document]) -> np.ndarray:
        """Tokens of each document with those around it; int64 [documents]."""
        sizes = np.zeros(len(batch), np.int64)
        texts = [i for i, document in enumerate(batch) if self._counts(document)]
        with one_thread():
            ids = encoder.encode_batch([batch[i].text for i in texts])
        sizes[texts] = [len(each) + self._part.counting.around for each in ids]
        if self._part.portion is not None:  # whose rows are known before
            fewest, most = self._part.source.min_tokens, self._part.source.max_tokens
            sizes[sizes < (fewest or 0)] = 0
            sizes[sizes > (most or sys.maxsize)] = 0
        return sizes

    def _counts(self, document: Document) -> bool:
        """True for a text that is trained on; unless a portion is made, also a held-out one."""
        if document.text is None:
            return False
        if self._part.portion is None:
            return True
        return not self._part.holds_out(xxhash.xxh3_128_digest(document.text.encode()))

    def counts(self) -> dict[str, Any]:
        if self._part.most_tokens is None:
            return {}
        entry = {"tokens": int(self.tokens), "most_tokens": self._part.most_tokens}
        return {COUNTED: {self._part.name: entry}}


@functools.lru_cache(1)
def _encoder(counting: Counting) -> Encoder:
    tokenizer = load_tokenizer(counting.folder)
    return make_encoder(tokenizer, choose_route(tokenizer, counting.route))


def gather_samples(parts: Sequence[Part], used: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Facts about the samples, whose counts are taken out of those of the parts: tokens, and how
    many parts of how many were read."""
    facts: dict[str, Any] = {}
    for counts in used:
        for name, entry in counts.pop(COUNTED, {}).items():
            fact = facts.setdefault(name, {"tokens": 0, "parts": 0})
            fact["tokens"] += entry["tokens"]
            fact["parts"] += 1
    for name, fact in facts.items():
        fact["of_parts"] = sum(part.name == name for part in parts)
    return {COUNTED: facts} if facts else {}
