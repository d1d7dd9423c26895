"""Summary: what the stages of `prepare` made, in counts, and what a user should know of it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmwright.config.rows import PLAIN
from lmwright.config.run import Run
from lmwright.data.manifest import Manifest
from lmwright.guard.terminal import print_table, visible


@dataclass(frozen=True)
class Summary:
    """Results of the stages, by name."""

    dir: str
    stages: dict[str, Manifest]

    def rows(self) -> list[dict[str, Any]]:
        """One record per split and source: counts of every stage that was run."""
        records: dict[tuple[str, str], dict[str, Any]] = {}
        for stage in ("normalize", "tokenize", "pack"):
            if stage in self.stages:
                for split, sources in self.stages[stage].counts["sources"].items():
                    for source, counts in sources.items():
                        record = records.setdefault((split, source), {})
                        record |= counts | _bytes_per_token(counts)
        if "pack" in self.stages:
            for split, sources in self.stages["pack"].facts["efficiency"].items():
                for source, efficiency in sources.items():
                    records[split, source]["efficiency"] = efficiency
        order = sorted(records, key=lambda k: (k[0] != "train", k))
        return [{"split": s, "source": n} | records[s, n] for s, n in order]

    def input(self) -> dict[str, dict[str, int]]:
        """Rows read, bad, empty and duplicate, per source; {} if normalize was not run."""
        stage = self.stages.get("normalize")
        return stage.counts["input"] if stage else {}

    def warnings(self) -> list[str]:
        """Sentences that a user should read before training."""
        from lmwright.data.rows import lengths

        stage = self.stages.get("tokenize")
        return lengths.warnings(stage) if stage else []


def _bytes_per_token(counts: dict[str, Any]) -> dict[str, float]:
    """The ratio of texts and tokens that one stage counts: `pack` may take fewer tokens, as of a
    portion, and counts no texts."""
    if not counts.get("tokens") or "bytes" not in counts:
        return {}
    return {"ratio": counts["bytes"] / max(1, counts.get("learned", counts["tokens"]))}


def _other_lengths(tokenized: Manifest) -> Iterator[str]:
    sources: dict[str, list[int]] = {}
    for split in tokenized.counts["sources"].values():
        for name, counts in split.items():
            if "other_length" in counts:
                left, docs = sources.setdefault(name, [0, 0])
                sources[name] = [left + counts["other_length"], docs + counts["docs"]]
    for name, (left, docs) in sources.items():
        yield f"data.sources: {name}: {left:,} of {left + docs:,} documents have other lengths"


def _beyond_a_cosine(summary: Summary) -> Iterator[str]:
    """Sources with numbers that are not between -1 and 1, as the mean of their squares tells."""
    for record in summary.rows():
        numbers = record.get("numbers")
        if numbers and numbers["squares"] > numbers["count"]:
            yield (
                f"{visible(record['source'], lines=False)} ({record['split']}): has numbers beyond "
                "1, which no cosine reaches; divide them by the largest that there can be, or set "
                'objective.compares = "order"'
            )


def _without_beginning(run: Run, folder: Path) -> Iterator[str]:
    """Texts that are prepared without the token with which those of a released model begin, and
    conversations that are not."""
    from lmwright.data.tokens.around import ids_around
    from lmwright.data.tokens.tokenizer import load_tokenizer

    plain = any(source.rows in PLAIN for source in run.data.sources)
    if run.data.sources and run.data.tokenize.prepend != "none" and not plain:
        yield (
            "data.tokenize.prepend: has no effect on conversations, which begin as their chat "
            "template says; leave it out"
        )
    if run.train.init_from is None or run.data.tokenize.prepend != "none" or not plain:
        return
    tokenizer = load_tokenizer(folder)
    if ids_around(tokenizer)[0] == (tokenizer.bos_id,):
        yield (
            f"data.tokenize.prepend: the tokenizer begins texts with {tokenizer.bos!r}, and these "
            "documents do not; if the model of train.init_from was trained so (BERT, Llama 3, "
            'Gemma), set "bos" and prepare again'
        )


def _links_to_folders(path: str) -> list[str]:
    """Links to folders below a source's folder, which is read without what is behind them."""
    found = []
    for here, folders, _ in os.walk(os.path.expanduser(path)):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [link for name in folders if os.path.islink(link := os.path.join(here, name))]
    return found


def notes(run: Run, summary: Summary) -> Iterator[str]:
    """Things a user should know before training on the prepared data."""
    from lmwright.data.tokens.vocabulary import note_unused

    for source in run.data.sources:
        if "://" not in source.path and (links := _links_to_folders(source.path)):
            yield (
                f"data.sources: links to folders are not read: {visible(', '.join(links[:3]))}"
                f"{', ...' if links[3:] else ''}; name each as a source of its own"
            )
    if tokenizer := summary.stages.get("tokenizer"):
        note = note_unused(run.model, summary.dir, tokenizer.facts["vocab_size"])
        if note and run.train.init_from is None:  # whose model is as it is
            yield note
        yield from _without_beginning(run, Path(tokenizer.folder))
    if tokenized := summary.stages.get("tokenize"):
        yield from _other_lengths(tokenized)
    if getattr(run.objective, "compares", None) == "numbers":
        yield from _beyond_a_cosine(summary)
    packed = summary.stages.get("pack")
    if packed and packed.facts.get("related") and "labels" not in packed.facts:
        counts = packed.counts["sources"].get("train", {}).values()
        groups, rows = (sum(each[name] for each in counts) for name in ("segments", "rows"))
        yield (
            f"{groups:,} groups of related texts in {rows:,} rows: a step of "
            f"{run.train.global_batch_size:,} rows compares about "
            f"{groups * run.train.global_batch_size / max(rows, 1):,.0f} with each other"
        )
    if packed and run.data.holdout_fraction and not packed.counts["sources"].get("eval"):
        yield _nothing_held_out(run, summary)


def _nothing_held_out(run: Run, summary: Summary) -> str:
    """Words for held-out documents that were all left out, or of which there were none."""
    wanted = f"data.holdout_fraction = {run.data.holdout_fraction:g}"
    read = summary.stages.get("normalize")
    if held := read.counts["sources"].get("eval") if read else None:
        docs = sum(count["docs"] for count in held.values())
        return (
            f"nothing is held out: all {docs:,} documents that {wanted} chose were left out, as "
            "said above; raise it, or data.pack.seq_len if they are too long, and prepare again, "
            'or add a source with use = "eval"'
        )
    if run.data.portions is not None:
        return (
            f"nothing is held out: no document of the first portion is, by {wanted}; raise it and "
            'prepare again, or add a source with use = "eval"'
        )
    return (
        f"nothing is held out: the documents are too few or too short for {wanted}, or an earlier "
        f"version made them; remove {summary.dir}/normalize and prepare again, or add a source "
        'with use = "eval"'
    )


def print_summary(summary: Summary, console: Any) -> None:
    """Prints a table of splits and sources, what was left out and where everything is."""
    from rich.table import Table
    from rich.text import Text

    columns = (
        ("docs", "documents", "{:,.0f}"),
        ("bytes", "text MB", "{:,.1f}"),
        ("tokens", "tokens", "{:,.0f}"),
        ("share", "learned", "{:.1%}"),
        ("ratio", "bytes/token", "{:.2f}"),
        ("rows", "rows", "{:,.0f}"),
        ("efficiency", "filled", "{:.1%}"),
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("split")
    table.add_column("source")
    records = summary.rows()
    shown = [c for c in columns if any(c[0] in _select_figures(r) for r in records)]
    for _, title, _ in shown:
        table.add_column(title, justify="right")
    for record in records:
        values = _select_figures(record)
        cells = [f.format(values[k]) if k in values else "" for k, _, f in shown]
        table.add_row(record["split"], Text(visible(record["source"], lines=False)), *cells)
    if records:
        print_table(console, table)
    for line in _left_out(summary):
        console.print(line, markup=False)
    for line in summary.warnings():
        console.print(f"warning: {line}", markup=False, style="yellow")
    if tokenizer := summary.stages.get("tokenizer"):
        facts = tokenizer.facts
        console.print(
            f"tokenizer: {facts['vocab_size']:,} ids, fingerprint "
            f"{facts['tokenizer_fingerprint'][:12]}"
        )


def _left_out(summary: Summary) -> Iterator[str]:
    from lmwright.data.tokens.answers import answers_text
    from lmwright.data.tokens.classes import labels_text

    for name, count in summary.input().items():
        for key, what in (
            ("bad", f"bad rows of {count['rows']:,}, listed in normalize/quarantine.jsonl"),
            ("empty", "rows without text or label"),
            ("duplicates", "duplicates left out"),
        ):
            if count[key]:
                yield f"{visible(name, lines=False)}: {count[key]:,} {what}"
    read = summary.stages.get("normalize")
    for name, fact in read.facts.get("sampled", {}).items() if read else ():
        yield (
            f"{visible(name, lines=False)}: a sample of {fact['tokens']:,} tokens, from "
            f"{fact['parts']:,} of {fact['of_parts']:,} parts"
        )
    for record in summary.rows():
        where = f"{visible(record['source'], lines=False)} ({record['split']})"
        for key, what in (
            ("bad", "examples that cannot be used, listed in tokenize/quarantine.jsonl"),
            ("too_long", "examples longer than a row left out"),
            ("cut", "examples longer than a row cut"),
        ):
            if record.get(key):
                yield f"{where}: {record[key]:,} {what}"
        if text := labels_text(record) or answers_text(record):
            yield f"{where}: {text}"


def _select_figures(record: dict[str, Any]) -> dict[str, float]:
    values = {k: v for k, v in record.items() if isinstance(v, int | float)}
    if "learned" in values:
        values["share"] = values["learned"] / max(1, values["tokens"])
    if "bytes" in values:
        values["bytes"] /= 1e6
    return values
