"""TokenStore: prepared rows as batches, from a local folder or any fsspec URL.

    global row g --written epochs--> shuffle/epoch-*/shard-*.bin
                 --else order------> pack/train/<source>/shard-*.bin
                                     pack/eval/<source>/shard-*.bin   in their own order

Rows are numbered over all epochs, so a step's batch is a range of numbers, on any machine.
"""

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from lmwright.config.rows import (
    ANSWERED_QUESTIONS,
    ANY_LABELS,
    PAIRS_OF_ANSWERS,
    QUESTIONS,
    RATED_ANSWERS,
    RELATED_TEXTS,
    SCORED_PAIRS,
    TAGGED_WORDS,
    TEXTS,
)
from lmwright.data.manifest import MANIFEST, STAGES, Manifest, digest, dump_json
from lmwright.data.portions import PORTIONS, folder_of, parse_portions
from lmwright.data.rows.cached import GIB, CachedPlace
from lmwright.data.rows.portioned import Portioned
from lmwright.data.rows.record import mask_predicted, row_dtype, unpack_rows
from lmwright.data.rows.shards import (
    Place,
    RemotePlace,
    Shards,
    Watched,
    check_files,
    open_place,
)
from lmwright.data.rows.shuffle import flat_rows, order_of, source_files, train_shards
from lmwright.data.tokens.token_bytes import TokenBytes
from lmwright.data.tokens.tokenizer import load_tokenizer
from lmwright.errors import UserError

Verify = Literal["sizes", "hashes"]


class TokenStore:
    """Training rows in order, and evaluation rows by source."""

    def __init__(self, place: Place, packed: Manifest, shuffled: Manifest, verify: Verify):
        self.place, self.packed, self.shuffled, self.verify = place, packed, shuffled, verify
        facts = packed.facts
        self.seq_len: int = facts["seq_len"]
        self.vocab_size: int = facts["vocab_size"]
        self.eos_id: int = facts["eos_id"]
        self.attention = facts["attention"]
        self.tokenizer_fingerprint: str = facts["tokenizer_fingerprint"]
        self.max_id: int = packed.counts["max_id"]
        self.sources: tuple[str, ...] = tuple(shuffled.facts["sources"])
        self.eval_sources: tuple[str, ...] = tuple(sorted(packed.counts["sources"].get("eval", {})))
        self.masked: bool = facts.get("masked", False)
        self.pairs: bool = facts.get("pairs", False)
        self.rated: bool = facts.get("rated", False)
        self.related: bool = facts.get("related", False)
        self.labels: tuple[str, ...] = tuple(facts.get("labels", ()))
        self.several: bool = facts.get("several", False)
        self.tagged: bool = facts.get("tagged", False) and not self.several
        self.answered: bool = facts.get("answered", False)
        self.labeled = "labels" in facts  # without any, they are numbers
        self.dtype = row_dtype(self.seq_len, facts["dtype"], self.masked, self.labeled)
        self.order = order_of(shuffled.facts)
        self.epoch_rows = self.order.epoch_rows
        self._written = self._open(shuffled, sorted(shuffled.files))
        self._eval = {
            s: self._open(packed, source_files(packed, "eval", s)) for s in self.eval_sources
        }
        if not self._written.rows:
            _ = self._packed_train  # refuses damaged files

    @property
    def holds(self) -> str:
        """Kind of the documents: texts, labeled texts, with any number of labels each or with
        a number, tagged words, answered questions, related texts, pairs of answers, or rated
        answers."""
        if self.answered:
            return ANSWERED_QUESTIONS
        if self.tagged:
            return TAGGED_WORDS
        if self.several:
            return ANY_LABELS
        if self.related and self.labeled:
            return SCORED_PAIRS
        if self.labeled:
            return "labeled texts" if self.labels else "texts with a number"
        if self.related:
            return RELATED_TEXTS
        return PAIRS_OF_ANSWERS if self.pairs else RATED_ANSWERS if self.rated else TEXTS

    @classmethod
    def open(
        cls, path: str | os.PathLike, *, verify: Verify = "sizes", cache_gib: float = 0.0
    ) -> "TokenStore":
        """Opens a prepared `data.dir` (or the shuffle folder in it), local or a URL.

        verify: "sizes" compares the size of every file that is needed with its manifest,
            "hashes" reads them all. Either names the file that is damaged in a UserError.
        cache_gib: disk of this machine for copies of the shards of a URL.
        Written epochs can be opened without the packed train rows; reading past them cannot.
        """
        text = os.fspath(path).rstrip("/").removesuffix("/shuffle")
        place = open_place(text)
        if place.read(PORTIONS) is not None:
            own = functools.partial(cls.open, verify=verify, cache_gib=cache_gib)
            return PortionedStore(Portioned(text, place, own), verify)
        if cache_gib and isinstance(place, RemotePlace):
            place = CachedPlace(text, int(cache_gib * GIB))
        packed, shuffled = place.manifest("pack"), place.manifest("shuffle")
        made = {"pack": packed, "shuffle": shuffled}
        if place.size(f"tokenizer/{MANIFEST}") is not None:
            made["tokenizer"] = place.manifest("tokenizer")
        _check_inputs(place, made)
        for manifest in (packed, shuffled):
            _check_agreement(place, manifest)
        try:
            return cls(place, packed, shuffled, verify)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
            raise UserError(
                f"{text}: the manifests of pack and shuffle are damaged ({type(e).__name__}: {e}); "
                "remove both folders and prepare again"
            ) from None

    @functools.cached_property
    def tokenizer_dir(self) -> str:
        """Local folder of the store's tokenizer, fetched from a URL if necessary. The files are
        small, so they are compared with their hashes."""
        if self.place.size(f"tokenizer/{MANIFEST}") is not None:
            made = self.place.manifest("tokenizer")
            check_files(self.place, made, sorted(made.files), hashes=True)
        return self.place.fetch("tokenizer")

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the rows and their order: equal stores give equal batches at every step.

        Written and virtual epochs of one order are the same data, and so are equal rows of files
        that were copied, downloaded again or moved.
        """
        facts = {name: value for name, value in self.packed.facts.items() if name != "efficiency"}
        return self._digest(dump_json({"files": self.packed.files, "facts": facts}).decode())

    def is_called(self, fingerprint: str) -> bool:
        """True for the fingerprint of this store, also that of earlier versions, which changed
        when a file was copied."""
        return fingerprint in (self.fingerprint, self._digest(self.packed.hash))

    def _digest(self, rows: str) -> str:
        facts = {n: self.shuffled.facts[n] for n in ("rows_per_source", "weights", "seed")}
        facts |= {"block_rows": self.order.block_rows, "kind": self.order.kind}
        return digest(f"{rows} {json.dumps(facts, sort_keys=True)}".encode())

    @property
    def shape(self) -> dict[str, Any]:
        """All that the portions of a store have in common."""
        names = ("seq_len", "attention", "tokenizer_fingerprint", "dtype", "sources")
        order = {
            name: getattr(self.order, name) for name in ("weights", "seed", "block_rows", "kind")
        }
        return {name: getattr(self, name) for name in names} | order

    def check_batch(self, global_batch_size: int) -> None:
        """Raises UserError if a batch has more rows than an epoch."""
        if global_batch_size > self.epoch_rows:
            raise UserError(
                f"train.global_batch_size = {global_batch_size}, but {self.place.name('pack')} has "
                f"only {self.epoch_rows} rows for training; use a smaller batch or more text"
            )

    def check_rows(self, stop: int) -> None:
        """Raises UserError where files are missing that hold rows before `stop`."""
        if 0 < self._written.rows < stop:
            _ = self._packed_train

    def records(self, start: int, stop: int) -> np.ndarray:
        """Packed records of global rows start..stop-1, counted over all epochs."""
        written = self._written.rows
        if stop <= written:
            return self._written.read(np.arange(start, stop))
        if start < written:
            return np.concatenate([self.records(start, written), self.records(written, stop)])
        return self._packed_train.read(flat_rows(self.order, start, stop))

    def batch(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Arrays of global rows start..stop-1 as `record.unpack_rows` gives them, [rows, T]."""
        return unpack_rows(self.records(start, stop), self.attention, rated=self._keeps_first)

    def eval_rows(self, source: str) -> int:
        """Number of rows of a source that are held out for evaluation."""
        return self._eval[source].rows

    def eval_questions(self, source: str) -> list[dict[str, Any]]:
        """Held-out questions of a source, with `id`, `context` and the texts of `answers`."""
        name = f"eval/{source}/{QUESTIONS}"
        check_files(self.place, self.packed, [name], self.verify == "hashes")
        lines = b"".join(self.place.pieces(f"pack/{name}")).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def eval_batches(
        self, source: str, batch_size: int, max_rows: int | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """All eval rows of a source, or `max_rows` spread evenly over it (always the same), in
        batches of one size, with `text_bytes` int64 [rows]: bytes of the predicted tokens. Rows
        past the last are all padding with 0 bytes."""
        rows = spread(self.eval_rows(source), max_rows)
        for start in range(0, len(rows), batch_size):
            records = self._eval[source].read(rows[start : start + batch_size])
            padding = np.zeros(batch_size - len(records), self.dtype)
            records = np.concatenate([records, padding])
            batch = unpack_rows(records, self.attention, rated=self._keeps_first)
            yield batch | {"text_bytes": self._predicted_bytes(records, batch)}

    @property
    def _keeps_first(self) -> bool:
        """True where the weight of the first token of a segment says something."""
        return self.rated or self.related

    def _predicted_bytes(self, records: np.ndarray, batch: dict[str, np.ndarray]) -> np.ndarray:
        predicted = mask_predicted(batch, pairs=self.pairs, rated=self.rated)
        if self._token_bytes is not None:
            return np.sum(self._token_bytes.of(batch["tokens"]), axis=1, where=predicted)
        # rows without their tokenizer: in proportion
        share = predicted.sum(axis=1) / np.maximum(records["length"], 1)
        return np.rint(records["text_bytes"] * share).astype(np.int64)

    @functools.cached_property
    def _token_bytes(self) -> TokenBytes | None:
        if self.place.size("tokenizer/tokenizer.json") is None:
            return None
        return TokenBytes(load_tokenizer(self.tokenizer_dir))

    def there(self, stop: int) -> bool:
        """True if the rows before `stop` can be read now."""
        return True

    @property
    def whole(self) -> bool:
        """True if `files` names all files that there will be."""
        return True

    def files(self) -> list[Watched]:
        """Place, path below it and xxh3_128 (hex) of every file that the first pass reads."""
        split = "eval/" if self._written.rows else ""
        entries = [(f"shuffle/{n}", e) for n, e in sorted(self.shuffled.files.items())]
        packed = sorted(self.packed.files.items())
        entries += [(f"pack/{n}", e) for n, e in packed if n.startswith(split)]
        return [(self.place, name, entry["xxh3_128"]) for name, entry in entries]

    def _open(self, manifest: Manifest, files: Sequence[str]) -> Shards:
        check_files(self.place, manifest, files, self.verify == "hashes")
        return Shards(self.place, manifest, files, self.dtype, self.max_id)

    @functools.cached_property
    def _packed_train(self) -> Shards:
        names = [n for n in self.packed.files if n.startswith("train/")]
        check_files(self.place, self.packed, names, self.verify == "hashes")
        return train_shards(self.place, self.packed)


class PortionedStore(TokenStore):
    """Rows of all portions in order, of which later ones may not be there yet. Evaluation rows,
    tokenizer and all else are those of the first one."""

    def __init__(self, portions: Portioned, verify: Verify):
        first = portions.open(0)
        super().__init__(first.place, first.packed, first.shuffled, verify)
        self.portions, self.epoch_rows = portions, portions.epoch_rows

    @property
    def fingerprint(self) -> str:
        """Fingerprint of what was declared, and of the first portion."""
        return self.portions.fingerprint

    def is_called(self, fingerprint: str) -> bool:
        return fingerprint == self.fingerprint

    @property
    def whole(self) -> bool:
        return self.portions.whole

    def there(self, stop: int) -> bool:
        return self.portions.there(stop)

    def check_rows(self, stop: int) -> None:  # a portion is looked at when it is there
        return

    def records(self, start: int, stop: int) -> np.ndarray:
        return self.portions.records(start, stop)

    def files(self) -> list[Watched]:
        return self.portions.files()


def spread(count: int, most: int | None) -> np.ndarray:
    """Evenly spaced numbers of at most `most` of `count` rows."""
    chosen = min(count, most or count)
    return (2 * np.arange(chosen) + 1) * count // max(2 * chosen, 1)


def _check_inputs(place: Place, made: Mapping[str, Manifest]) -> None:
    """Raises UserError unless these stages were made of each other, and the rows with the tokenizer
    beside them: where `prepare` was killed, later stages are still those of before."""
    again = "run `lmwright prepare` again or copy both folders"
    for stage, manifest in made.items():
        for name, read in manifest.fingerprint.get("inputs", {}).items():
            if name in made and made[name].hash != read:
                raise UserError(
                    f"{place.name(stage)} was not made of what {place.name(name)} holds; {again}"
                )
    marks = {s: m.facts.get("tokenizer_fingerprint") for s, m in made.items()}
    for stage in ("tokenize", "pack"):
        if "tokenizer" in marks and marks.get(stage, marks["tokenizer"]) != marks["tokenizer"]:
            raise UserError(
                f"{place.name(stage)} was made with another tokenizer than "
                f"{place.name('tokenizer')} holds; {again}"
            )


def _check_agreement(place: Place, manifest: Manifest) -> None:
    """Raises UserError unless a manifest describes the rows that the stage was asked for."""
    asked = manifest.fingerprint.get("fingerprint", {})
    for name, value in manifest.facts.items():
        if name in asked and asked[name] != value:
            raise UserError(
                f"{place.name(manifest.stage)}/{MANIFEST} is damaged ({name} is both {value!r} and "
                f"{asked[name]!r}); remove the folder and prepare again"
            )


@dataclass(frozen=True)
class Verified:
    """A stage whose every file has the size and hash of its manifest."""

    stage: str
    files: int
    size_bytes: int


def verify_store(path: str | os.PathLike) -> list[Verified]:
    """Hashes every file of every finished stage below a `data.dir`, local or remote.

    Raises UserError naming the first file that is missing, cut or altered.
    """
    place, url = open_place(os.fspath(path).rstrip("/")), os.fspath(path).rstrip("/")
    if (portions := place.read(PORTIONS)) is not None:
        names = map(folder_of, range(len(parse_portions(portions, url).finished)))
        return [
            replace(one, stage=f"{name}/{one.stage}")
            for name in names
            for one in verify_store(f"{url}/{name}")
        ]
    verified, made = [], {}
    for stage in STAGES:
        if place.size(f"{stage}/{MANIFEST}") is None:
            continue
        manifest = made[stage] = place.manifest(stage)
        check_files(place, manifest, sorted(manifest.files), hashes=True)
        size = sum(e["bytes"] for e in manifest.files.values())
        verified.append(Verified(stage, len(manifest.files), size))
    _check_inputs(place, made)
    if not verified:
        raise UserError(f"{path} holds no finished stage; run `lmwright prepare` to make them")
    return verified


def verify_command(path: str) -> None:
    """Prints one line per stage (`lmwright data verify`)."""
    for v in verify_store(path):
        print(f"{v.stage:<10} {v.files:>6} files {v.size_bytes:>16,} bytes  as in its manifest")
