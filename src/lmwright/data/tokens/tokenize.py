"""Tokenize: normalized text to flat token files, document boundaries kept.

    normalize/part --row groups--> texts --encode--> [bos] ids [eos] --> part-00000.tokens.bin
                                                                         part-00000.docs.npy
    labeled texts --encode, cut--> the same -----------------> part-00000.classes.npy
    related texts --encode, cut--> the same, begins -------------------> part-00000.learned.bin
    conversations --template, encode--> ids, learned ------------------> part-00000.learned.bin

Tokens are little-endian uint16, or uint32 for a vocabulary beyond 65,536. The table of
documents is int64 [documents, 2]: end in tokens, utf-8 bytes of the text (of what is learned
of a conversation). Where there are conversations, each token has a byte: `Example.marks`; so it
has in related texts, of which a group is a document: `Group.marks`.
"""

import contextlib
import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lmwright.config.rows import ANSWERED, QUESTIONS, TAGGED
from lmwright.config.run import Chat, Tokenize
from lmwright.data.bad_examples import BadWriter, bad_file, gather_bad_examples
from lmwright.data.dropped import read_made, row_groups
from lmwright.data.manifest import Manifest, read_manifest, refuse_altered, save_array
from lmwright.data.progress import Progress
from lmwright.data.rows.lengths import bucket
from lmwright.data.sources.files import cut_row_groups
from lmwright.data.stage import find_finished_stage, run_stage
from lmwright.data.text.chat import UnusableError
from lmwright.data.text.chat_encode import LEARNED, ChatEncoder
from lmwright.data.text.chat_template import chosen_template
from lmwright.data.text.labeled import texts_of
from lmwright.data.tokens.answers import AnswerColumn, question_line
from lmwright.data.tokens.around import ids_between
from lmwright.data.tokens.classes import Labels, rows_of_texts
from lmwright.data.tokens.encode import Encoder, choose_route, make_encoder, one_thread
from lmwright.data.tokens.facts import COLUMNS, Asked, facts_of, fingerprint_of, kinds
from lmwright.data.tokens.normalized import NormalizedRow, read_rows
from lmwright.data.tokens.related import fit_group, paired
from lmwright.data.tokens.tags import ENDING, TagColumn
from lmwright.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from lmwright.errors import UserError

PART_BYTES = 16 << 20

Lengths = Mapping[str, tuple[int | None, int | None]]
"""Fewest and most tokens of a document, by source."""


@dataclass(frozen=True)
class Part:
    """Row groups start..stop-1 of one normalized file."""

    number: int
    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class Conversations:
    """Settings for encoding conversations: the row length `seq_len`, and how many may be bad."""

    chat: Chat
    seq_len: int
    max_bad_fraction: float
    pairs: bool = False
    """Preferences: every example is two conversations."""
    rated: bool = False
    """Every answer is liked or not."""


@dataclass(frozen=True)
class Work:
    """A part with all that a worker needs."""

    part: Part
    folder: str
    """Folder of the normalized files."""
    tokenizer: str
    fingerprint: str
    route: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    dtype: str
    conversations: Conversations | None
    classes: Asked | None
    group_tokens: int | None
    lengths: Lengths
    hash: str
    """xxh3_128 of the part's file."""


def tokenize(
    data_dir: str | os.PathLike,
    settings: Tokenize,
    conversations: Conversations | None = None,
    lengths: Lengths | None = None,
    *,
    classes: Asked | None = None,
    group_tokens: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    part_bytes: int = PART_BYTES,
) -> Manifest:
    """Encodes `<data_dir>/normalize` with `<data_dir>/tokenizer` into `<data_dir>/tokenize`.

    Files: `<split>/<source>/part-00000.tokens.bin` and `.docs.npy`, numbered in input order.
    Counts: `sources` has `docs`, `tokens` and `bytes` (of text) per split and source; `tokens`
    includes what is put before and after a document. Facts: vocab_size, dtype, eos_id, bos_id,
    tokenizer_fingerprint, masked (some tokens are not learned). With `conversations` also
    `.learned.bin`, `quarantine.jsonl`, the `lengths` of examples, and per source `learned`
    tokens and examples that are `bad`, `too_long` and `cut`. Documents that `lengths` leaves out
    are counted as `other_length`. With `classes` also `.classes.npy`, float32 [documents], and per
    source texts that are `cut` and how many there are of each class; the fact `labels`, which is
    empty where they are numbers. Related texts are groups of at most `group_tokens`; per source
    also `texts`, and groups that are `cut`. Raises UserError if a stage before is missing, the
    tokenizer lacks a token, too many examples are bad, or a class is unknown or missing.
    """
    folder = Path(data_dir).absolute()
    normalized, tokenizer = read_made(folder / "normalize"), read_manifest(folder / "tokenizer")
    facts = facts_of(tokenizer, settings)
    parts = plan_parts(normalized, part_bytes)
    fingerprint = fingerprint_of(folder, parts, settings, conversations, facts, lengths)
    fingerprint |= {"classes": asdict(classes)} if classes else {}
    fingerprint |= {"group_tokens": group_tokens} if group_tokens else {}
    target, inputs = folder / "tokenize", {"normalize": normalized}
    known = {"fingerprint": fingerprint, "inputs": inputs}
    if manifest := find_finished_stage("tokenize", target, len(parts), **known):
        return manifest
    route = choose_route(load_tokenizer(folder / "tokenizer"), settings.route)
    before = (facts["bos_id"],) if settings.prepend == "bos" else ()
    after = (facts["eos_id"],) if settings.append == "eos" else ()
    places = (str(folder / "normalize"), str(folder / "tokenizer"))
    shared = (*places, facts["tokenizer_fingerprint"], route, before, after, facts["dtype"])
    shared = (*shared, conversations, classes, group_tokens, lengths or {})

    def finish(counts: Sequence[dict[str, Any]], temp: Path) -> dict[str, Any]:
        return gather_bad_examples(target, counts, temp, conversations.max_bad_fraction)

    return run_stage(
        "tokenize",
        target,
        [Work(p, *shared, normalized.files[p.file]["xxh3_128"]) for p in parts],
        write_part,
        **known,
        facts=facts | kinds(conversations, classes, group_tokens),
        finish=classes.check if classes else finish if conversations else None,
        workers=workers,
        progress=progress,
    )


def plan_parts(normalized: Manifest, part_bytes: int) -> list[Part]:
    """Ranges of row groups of about `part_bytes` of text, in input order."""
    parts: list[Part] = []
    for name in sorted(n for n in normalized.files if n.endswith(".parquet")):
        ranges = list(cut_row_groups(row_groups(normalized, name), part_bytes))
        parts += [Part(len(parts) + i, name, *groups[:2]) for i, groups in enumerate(ranges)]
    return parts


def write_part(work: Work, tmp_dir: Path) -> dict[str, Any]:
    """Work of one part: writes its token files; returns the counts."""
    encoder = _encoder(work.tokenizer, work.fingerprint, work.route)
    chats = None
    if work.conversations:
        chats = _chat_encoder(work.tokenizer, work.fingerprint, work.conversations, work.after)
    writers: dict[tuple[str, str], _DocumentWriter] = {}
    path = Path(work.folder) / work.part.file
    refuse_altered(path, work.hash)
    with contextlib.ExitStack() as stack, one_thread():
        bad = stack.enter_context(BadWriter(tmp_dir / bad_file(work.part.number)))
        for rows in read_rows(path, work.part.start, work.part.stop):
            labeled = rows_of_texts(rows)
            plain = [
                text
                for row, made in zip(rows, labeled, strict=True)
                for text in (texts_of(made) if made else [row.text] * (row.kind == "text"))
            ]
            texts = iter(encoder.encode_batch(plain))
            for row, made in zip(rows, labeled, strict=True):
                writer = writers.get((row.split, row.source))
                if writer is None:
                    stem = tmp_dir / row.split / row.source / f"part-{work.part.number:05d}"
                    writer = stack.enter_context(_DocumentWriter(stem, work, row.source))
                    writers[row.split, row.source] = writer
                if made:
                    own = [next(texts) for _ in texts_of(made)]
                    write = writer.write_labeled if "label" in made else writer.write_group
                    write(own, made, row.id)
                elif row.kind == TAGGED:
                    writer.write_tagged(json.loads(row.text), row.id)
                elif row.kind == ANSWERED:
                    writer.write_answered(json.loads(row.text), row.id)
                elif row.kind == "text":
                    writer.write(next(texts), len(row.text.encode()))
                else:
                    _write_example(row, chats, writer, bad)
    counts: dict[str, dict[str, dict[str, int]]] = {}
    lengths: dict[str, dict[str, dict[str, int]]] = {}
    for (split, source), writer in writers.items():
        counts.setdefault(split, {})[source] = writer.counts()
        if writer.lengths:
            lengths.setdefault(split, {})[source] = dict(writer.lengths)
    return {"sources": counts} | ({"lengths": lengths} if chats else {})


def _write_example(
    row: NormalizedRow, chats: ChatEncoder | None, writer: "_DocumentWriter", bad: BadWriter
) -> None:
    if chats is None:
        raise UserError(
            "normalize holds conversations, and tokenize was asked for text; prepare again"
        )
    try:
        example, size = chats.encode_sized(json.loads(row.text))
    except UnusableError as e:
        writer.tally["bad"] += 1
        bad.write({"source": row.source, "id": row.id, "reason": str(e)[:500]})
        return
    writer.lengths[bucket(size)] += 1
    if example is None:
        writer.tally["too_long"] += 1
        return
    writer.tally["cut"] += example.cut
    writer.write_learned(example.ids, example.text_bytes, example.marks)


class _DocumentWriter:
    """Token file and table of documents of one source and split."""

    def __init__(self, stem: Path, work: Work, source: str):
        self.stem = stem
        self.before, self.after = work.before, work.after
        self.dtype = np.dtype(work.dtype).newbyteorder("<")
        self.masked = work.conversations is not None or work.group_tokens is not None
        self.group_tokens, self.groups = work.group_tokens, {"texts": 0, "cut": 0}
        self.labels: Labels | TagColumn | AnswerColumn | None = None
        if work.classes:
            column = COLUMNS.get(type(work.classes), Labels)
            self.labels = column(work.classes, source)
            self.tokenizer = _tokenizer(work.tokenizer, work.fingerprint)
            self.between = ids_between(self.tokenizer, self.before, self.after)
        self.tokens = self.learned = 0
        self.tally = dict.fromkeys(("bad", "too_long", "cut"), 0)
        self.lengths: Counter[str] = Counter()
        self.limited = source in work.lengths
        fewest, most = work.lengths.get(source, (None, None))
        self.fewest, self.most = fewest or 0, most or sys.maxsize
        self.other_length = 0
        self.docs: list[tuple[int, int]] = []
        self.file: BinaryIO | None = None
        self.mask: BinaryIO | None = None
        self.tags: BinaryIO | None = None

    def write(self, ids: np.ndarray, text_bytes: int) -> None:
        """Writes the ids of a text, all of which is learned."""
        ids = np.concatenate(
            [np.array(self.before, ids.dtype), ids, np.array(self.after, ids.dtype)]
        )
        if not len(ids):
            return  # its tokenizer gives nothing for it, and nothing is put around it
        self.write_learned(ids, text_bytes, np.full(len(ids), LEARNED, np.uint8))

    def write_labeled(self, texts: Sequence[np.ndarray], row: Mapping[str, Any], id_: str) -> None:
        """Writes the ids of a labeled text, or of two, cut to a row, and their label. Raises
        UserError where it is none of the run's, or nothing says which they are."""
        if not isinstance(self.labels, Labels):
            raise UserError("normalize holds labeled texts, which need objective.labels; set them")
        written = len(self.docs)
        before, size = self.tokens, sum(len(text.encode()) for text in texts_of(row))
        if self.group_tokens is not None:  # two texts apart
            self.write_group(paired(texts, self.labels.source, id_), row, id_)
        else:
            self.write(self.labels.fit(texts, self.before, self.after, self.between), size)
        if len(self.docs) > written:
            beside = self.labels.add(row["label"], id_, self.tokens - before)
            if self.tags is not None:
                self.tags.write(beside.tobytes())

    def write_tagged(self, row: Mapping[str, Any], id_: str) -> None:
        """Writes the ids of words, cut to a row, and their tags. Raises UserError where one is none
        of the run's, or nothing says which they are."""
        if not isinstance(self.labels, TagColumn):
            raise UserError("normalize holds tagged words, which need objective.labels; set them")
        words, around = row["tokens"], (self.before, self.after)
        ids, tags = self.labels.beside(self.tokenizer, words, row["tags"], id_, around)
        written = len(self.docs)
        if len(ids):
            size = len(" ".join(words).encode())
            self.write_learned(ids, size, np.full(len(ids), LEARNED, np.uint8))
        if len(self.docs) > written:
            self.tags.write(tags.tobytes())

    def write_answered(self, row: Mapping[str, Any], id_: str) -> None:
        """Writes the windows of a question, and what is held out as text. Raises UserError where
        none were asked for."""
        if not isinstance(self.labels, AnswerColumn):
            raise UserError("normalize holds answered questions, and this run has none; "
                            "prepare again")  # fmt: skip
        around = self.before, self.after
        for ids, marks, size in self.labels.beside(self.tokenizer, row, around):
            written = len(self.docs)
            self.write_learned(ids, size, np.full(len(ids), LEARNED, np.uint8))
            if len(self.docs) > written:
                self.tags.write(marks.tobytes())
        if self.stem.parent.parent.name == "eval":
            with open(f"{self.stem}.{QUESTIONS}", "a", encoding="utf-8") as file:
                file.write(question_line(row, id_))

    def write_group(self, texts: Sequence[np.ndarray], row: Mapping[str, Any], _id: str) -> None:
        """Writes the ids of related texts, cut to a row. Raises UserError where none were asked
        for."""
        if self.group_tokens is None:
            raise UserError("normalize holds related texts, and this run has none; prepare again")
        group = fit_group(texts, self.before, self.after, self.group_tokens)
        if group is not None:
            size = sum(len(text.encode()) for text in texts_of(row))
            self.write_learned(group.ids, size, group.marks)
            self.groups["texts"] += group.texts
            self.groups["cut"] += group.cut

    def write_learned(self, ids: np.ndarray, text_bytes: int, marks: np.ndarray) -> None:
        """Writes ids with their marks uint8, unless the source wants other lengths."""
        if not self.fewest <= len(ids) <= self.most:
            self.other_length += 1
            return
        if self.mask is not None:
            self.mask.write(marks.tobytes())
            self.learned += int((marks & LEARNED).sum())
        self.file.write(ids.astype(self.dtype).tobytes())
        self.tokens += len(ids)
        self.docs.append((self.tokens, text_bytes))

    def counts(self) -> dict[str, int]:
        text_bytes = sum(n for _, n in self.docs)
        counts = {"docs": len(self.docs), "tokens": self.tokens, "bytes": text_bytes}
        if self.limited:
            counts["other_length"] = self.other_length
        counts |= self.labels.counts() if self.labels else {}
        if self.group_tokens is not None:
            return counts | self.groups
        return counts | ({"learned": self.learned, **self.tally} if self.masked else {})

    def __enter__(self) -> "_DocumentWriter":
        self.stem.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(f"{self.stem}.tokens.bin", "wb")
        if self.masked:
            self.mask = open(f"{self.stem}.learned.bin", "wb")
        if self.labels is not None and self.labels.per_token:
            self.tags = open(f"{self.stem}{ENDING}", "wb")
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()
        if self.mask is not None:
            self.mask.close()
        if self.tags is not None:
            self.tags.close()
        table = np.array(self.docs, "<i8").reshape(-1, 2)
        save_array(self.stem.with_name(f"{self.stem.name}.docs.npy"), table)
        if self.labels is not None and not self.labels.per_token:
            numbers = np.array(self.labels.numbers, "<f4")
            save_array(self.stem.with_name(f"{self.stem.name}.classes.npy"), numbers)


@functools.lru_cache(1)
def _encoder(folder: str, _fingerprint: str, route: str) -> Encoder:
    return make_encoder(load_tokenizer(folder), route)


@functools.lru_cache(1)
def _tokenizer(folder: str, _fingerprint: str) -> TextTokenizer:
    return load_tokenizer(folder)


@functools.lru_cache(1)
def _chat_encoder(
    folder: str, _fingerprint: str, settings: Conversations, after: tuple[int, ...]
) -> ChatEncoder:
    tokenizer = load_tokenizer(folder)
    template = chosen_template(settings.chat, tokenizer)
    return ChatEncoder(
        template, tokenizer, settings.chat, settings.seq_len, after[0] if after else None
    )
