"""Prepare in portions: samples in several pieces, each made by all stages before the next is begun.

    sample --first rows--> portion-000 --listed--> portions.json     training may start
           --next rows---> portion-001 --listed--> portions.json     ... and goes on

A portion begins with the document after the last one of the portion before, so that together they
are one sample.
"""

import functools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmwright.config.fields import to_plain
from lmwright.config.run import Data
from lmwright.data.manifest import MANIFEST, Manifest, add_counts, digest, dump_json
from lmwright.data.portions import (
    PORTIONS,
    Finished,
    Portion,
    Portions,
    folder_of,
    parse_portions,
    share,
)
from lmwright.data.rows.store import TokenStore
from lmwright.data.stored import read_small
from lmwright.data.summary import Summary
from lmwright.errors import UserError
from lmwright.guard.files import write_whole
from lmwright.guard.folders import copy_folder
from lmwright.guard.redact import redact_tree
from lmwright.guard.urls import without_secrets
from lmwright.storage.bucket import Bucket, is_bucket
from lmwright.storage.mirror import mirror_folder, place_in


def prepare_portions(
    prepare: Callable[..., Summary], data: Data, seq_len: int, **options: Any
) -> Summary:
    """Makes every portion that is not there yet, in their order, by `prepare` with its `options`.

    The summary is of those that were made. Raises UserError where a sample is larger than its
    source, and as `prepare` does.
    """
    data = replace(data, pack=replace(data.pack, seq_len=data.pack.seq_len or seq_len))
    wanted = declare(data, data.pack.seq_len)
    there = _begun(data.dir, wanted)
    made: list[Summary] = []
    orders: dict[str, list[Any]] = {}
    for number in range(wanted.count):
        before = there.finished[number - 1].starts if number else {}
        portion = Portion(number, there.rows_of(number), before, there.drawn, orders)
        if number < len(there.finished) and _is_whole(data.dir, number, there):
            continue
        own = _portion_data(data, portion)
        if number:
            _copy_tokenizer(data.dir, own.dir)
        summary = prepare(own, seq_len, portion=portion, **options)
        there = _listed(there, portion, summary, own)
        _write(data.dir, there)
        rows = sum(portion.rows.values())
        print(f"portion {number + 1} of {wanted.count}: {rows:,} rows in {own.dir}", flush=True)
        made.append(summary)
    return Summary(data.dir, _sum_up(made))


def declare(data: Data, seq_len: int) -> Portions:
    """All portions before the first is begun."""
    from lmwright.data.sources.files import source_names

    # fields that a later version adds, and that are not set, change nothing
    own = replace(data, dir="", workers=None, cache_gib=0.0)
    settings = to_plain(own, defaults="omit") | {"seq_len": seq_len}
    named = zip(source_names(data.sources), data.sources, strict=True)
    return Portions(
        count=data.portions,
        rows={name: s.sample_tokens // seq_len for name, s in named if s.use == "train"},
        asked=digest(dump_json(redact_tree(settings, without_secrets))),
        drawn={},
    )


def _begun(data_dir: str, wanted: Portions) -> Portions:
    """The portions that are there, or those to begin with. Raises UserError for another store."""
    if read_small(data_dir, f"pack/{MANIFEST}") is not None:
        raise UserError(
            f"data.portions: {data_dir} holds a store without portions; remove it, or choose "
            "another data.dir"
        )
    raw = read_small(data_dir, PORTIONS)
    there = None if raw is None else parse_portions(raw, data_dir)
    if there is not None and replace(there, drawn={}, finished=()) == wanted:
        return there
    if there is not None:  # of other settings: a training on it stops at what it has read
        _remove(data_dir)
    return wanted


def _is_whole(data_dir: str, number: int, portions: Portions) -> bool:
    try:
        store = TokenStore.open(place_in(data_dir, folder_of(number)))
    except UserError:
        return False
    return store.is_called(portions.finished[number].fingerprint)


def _portion_data(data: Data, portion: Portion) -> Data:
    """Data section of a portion. Later ones have no sources that are only held out."""
    from lmwright.data.sources.files import source_names

    length = data.pack.seq_len
    sources = []
    for name, source in zip(source_names(data.sources), data.sources, strict=True):
        if name in portion.rows:
            tokens = share(source.sample_tokens // length, portion.number, data.portions) * length
            sources.append(replace(source, name=name, sample_tokens=tokens))
        elif not portion.number:
            sources.append(replace(source, name=name))
    folder = place_in(data.dir, folder_of(portion.number))
    return replace(data, dir=folder, portions=None, sources=tuple(sources))


def _copy_tokenizer(data_dir: str, own_dir: str) -> None:
    """Gives a portion the finished tokenizer of the first one, whatever its name stands for by
    now."""
    target = mirror_folder(own_dir) / "tokenizer"
    first = Path(TokenStore.open(place_in(data_dir, folder_of(0))).tokenizer_dir)
    made = target / MANIFEST
    if not made.exists() or made.read_bytes() != (first / MANIFEST).read_bytes():
        shutil.rmtree(target, ignore_errors=True)
        copy_folder(first, target)


def _listed(portions: Portions, portion: Portion, summary: Summary, own: Data) -> Portions:
    """The portions with one more that is finished. Later ones stay if it is what it was."""
    facts, number = summary.stages["normalize"].facts, portion.number
    counts = summary.stages["pack"].counts["sources"]["train"]
    have = {name: entry["rows"] for name, entry in counts.items()}
    if have != portion.rows:
        raise UserError(
            f"{own.dir}: has rows {have} instead of those declared, {dict(portion.rows)}; remove "
            "the folder and prepare again"
        )
    starts = {name: (part, rows) for name, (part, rows) in facts["starts"].items()}
    store = TokenStore.open(own.dir)
    finished = Finished(store.fingerprint, starts)
    if number < len(portions.finished):
        before = portions.finished[number]
        if before.starts == starts and store.is_called(before.fingerprint):
            return portions
    drawn = portions.drawn if number else facts["drawn"]
    return replace(portions, drawn=drawn, finished=(*portions.finished[:number], finished))


def _write(data_dir: str, portions: Portions) -> None:
    if is_bucket(data_dir):
        Bucket(data_dir).write(PORTIONS, portions.to_json())
    else:
        write_whole(Path(data_dir) / PORTIONS, portions.to_json())


def _remove(data_dir: str) -> None:
    if is_bucket(data_dir):
        Bucket(data_dir).remove(PORTIONS)
    else:
        (Path(data_dir) / PORTIONS).unlink()


def _sum_up(summaries: Sequence[Summary]) -> dict[str, Manifest]:
    """Manifests of several portions as one of each stage, for a summary."""
    if not summaries:
        return {}
    summed = {}
    for stage, first in summaries[0].stages.items():
        all_of = [summary.stages[stage] for summary in summaries]
        facts = dict(first.facts)
        if "sampled" in facts:
            facts["sampled"] = functools.reduce(add_counts, (m.facts["sampled"] for m in all_of))
            for name, fact in facts["sampled"].items():
                fact["of_parts"] = first.facts["sampled"][name]["of_parts"]
                # a part may go on in the next portion
                fact["parts"] = min(fact["parts"], fact["of_parts"])
        counts = first.counts  # of the tokenizer, which all of them share
        if stage != "tokenizer":
            counts = functools.reduce(add_counts, (m.counts for m in all_of))
        summed[stage] = replace(first, facts=facts, counts=counts)
    return summed
