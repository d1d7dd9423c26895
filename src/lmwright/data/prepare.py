"""Prepare: all stages from any text to training rows; each can be run alone.

    sources --normalize--> text --tokenizer--> tokenizer.json
                           text --tokenize--> ids --pack--> rows --shuffle--> their order

Every stage is off the accelerator, goes on where it was killed, and does nothing if its inputs
are what they were.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmwright.config import rows as row_kinds
from lmwright.config.run import Data, Run, seq_len_of
from lmwright.data.carry import working_folder
from lmwright.data.manifest import STAGES, Manifest
from lmwright.data.progress import Progress, console_progress
from lmwright.errors import UserError
from lmwright.guard.terminal import visible


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
                        record |= counts
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


def prepare(
    data: Data,
    seq_len: int,
    *,
    stages: Sequence[str] = (),
    model_vocab_size: int | None = None,
    labels: Sequence[str] | None = None,
    windows: tuple[int, int] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Runs the named stages in their order, or all of them.

    model_vocab_size: a trained tokenizer that says no size gets this one, and none may be larger.
    seq_len: tokens in a row, used unless `data.pack.seq_len` says otherwise. workers: processes;
    `data.workers` if None, else all cores. The output never depends on it. labels: the classes of
    labeled texts; none of them where their labels are numbers. windows: of questions, the tokens of
    one and those that it shares with the next. Raises UserError for an unknown
    stage, bad input, and a stage whose predecessor is missing.
    """
    for stage in stages:
        if stage not in STAGES:
            raise UserError(f"There is no stage {stage!r}; stages are {', '.join(STAGES)}")
    from lmwright.data.tokens.vocabulary import check_imported

    workers = workers or data.workers
    if not stages or "tokenizer" in stages:
        check_imported(data, model_vocab_size)
    if has_chats(data):
        data = with_template(data)
    with working_folder(data.dir) as folder:
        options = (
            data.pack.seq_len or seq_len,
            model_vocab_size,
            labels,
            windows,
            workers,
            progress,
        )
        made = _make(replace(data, dir=folder), stages, *options)
    return Summary(data.dir, made)


def _make(
    data: Data,
    stages: Sequence[str],
    seq_len: int,
    model_vocab_size: int | None,
    labels: Sequence[str] | None,
    windows: tuple[int, int] | None,
    workers: int | None,
    progress: Progress | None,
) -> dict[str, Manifest]:
    from lmwright.data.tokens.vocabulary import check_size

    run = _stages(data, seq_len, model_vocab_size, labels, windows, workers, progress)
    made: dict[str, Manifest] = {}
    for stage in _order(data):
        if not stages or stage in stages:
            made[stage] = run[stage]()
        if stage == "tokenizer" and stage in made:
            ids = made["tokenizer"].facts["vocab_size"]
            check_size(ids, model_vocab_size, data.tokenizer.path or f"{data.dir}/tokenizer")
    return made


def _order(data: Data) -> Sequence[str]:
    """Stages in the order in which they are made; a sample is counted with the tokenizer."""
    from lmwright.data.text.sample import is_sampled

    if not is_sampled(data):
        return STAGES
    return ("tokenizer", *(stage for stage in STAGES if stage != "tokenizer"))


def has_chats(data: Data) -> bool:
    """True if any source holds fine-tuning examples."""
    return any(source.rows not in row_kinds.PLAIN for source in data.sources)


def with_template(data: Data) -> Data:
    """Data section with the source of its chat template in place of the template's name, after
    trying it out.

    Raises UserError, before any stage is run, where the template is not there, is no template
    or fails on the simplest conversation.
    """
    from lmwright.data.rows.pack import refuse_splitting
    from lmwright.data.text.chat import UnusableError
    from lmwright.data.text.chat_template import ChatTemplate, template_source
    from lmwright.data.tokens.tokenizer import stand_in
    from lmwright.data.tokens.tokenizer_formats import import_tokenizer
    from lmwright.data.tokens.tokenizer_stage import pinned_path

    refuse_splitting(data.pack)
    spec = data.tokenizer
    path = pinned_path(data.dir, spec)
    tokenizer = stand_in(spec) if path is None else import_tokenizer(path)
    if spec.chat_template is not None:
        tokenizer = replace(tokenizer, chat_template=spec.chat_template)
    source = template_source(data.chat, tokenizer)
    hello = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]
    try:
        turns = ChatTemplate(source, tokenizer, data.chat.date).turns({"messages": hello})
    except UnusableError as e:
        raise UserError(
            f"data.chat.template: {data.chat.template} fails on a plain question and answer "
            f"({e}); correct it or choose another"
        ) from None
    if not turns.turns:
        raise UserError(
            f"data.chat.template: {data.chat.template} writes no assistant turn; correct it or "
            "choose another"
        )
    if data.chat.template == "none":
        return data
    return replace(data, tokenizer=replace(spec, chat_template=source))


def _stages(
    data: Data,
    seq_len: int,
    model_vocab_size: int | None,
    labels: Sequence[str] | None,
    windows: tuple[int, int] | None,
    workers: int | None,
    progress: Progress | None,
) -> dict[str, Callable[[], Manifest]]:
    # imported here, so that `--help` stays quick
    from lmwright.data.rows.lengths import wanted_lengths
    from lmwright.data.rows.pack import pack_tokens, refuse_splitting
    from lmwright.data.rows.shuffle import shuffle_rows
    from lmwright.data.sources.files import source_names
    from lmwright.data.text.normalize import normalize
    from lmwright.data.tokens.facts import asked_of
    from lmwright.data.tokens.tokenize import Conversations, tokenize
    from lmwright.data.tokens.tokenizer_stage import make_tokenizer

    options = {"workers": workers, "progress": progress}
    named = list(zip(source_names(data.sources), data.sources, strict=True))
    weights = {name: source.weight for name, source in named if source.use == "train"}
    lengths = wanted_lengths(data, named)
    chats, kinds = None, {source.rows for source in data.sources}
    if has_chats(data):
        chats = Conversations(
            data.chat,
            seq_len,
            data.normalize.max_bad_fraction,
            pairs="preference" in kinds,
            rated="rated" in kinds,
        )
    classes = asked_of(data, kinds, seq_len, labels, windows)
    related = row_kinds.RELATED in kinds or isinstance(labels, row_kinds.PairNumbers)
    if classes or related:
        refuse_splitting(data.pack)
    return {
        "normalize": lambda: normalize(data, **options),
        "tokenizer": lambda: make_tokenizer(
            data.dir, data.tokenizer, model_vocab_size=model_vocab_size, progress=progress
        ),
        "tokenize": lambda: tokenize(
            data.dir,
            data.tokenize,
            chats,
            lengths,
            classes=classes,
            group_tokens=seq_len if related else None,
            **options,
        ),
        "pack": lambda: pack_tokens(data.dir, seq_len=seq_len, pack=data.pack, **options),
        "shuffle": lambda: shuffle_rows(data.dir, data.shuffle, weights, **options),
    }


def labels_of(run: Run) -> tuple[str, ...] | None:
    """The classes of a run whose sources hold labeled texts, empty where their labels are numbers;
    of others None. Raises UserError where its objective learns from other rows than its sources
    hold."""
    kinds, learns = {source.rows for source in run.data.sources}, run.objective.learns_from
    for rows, texts, have, cure in (
        (row_kinds.LABELED, row_kinds.HAVE_LABELS, "have a class or a number",
         "'classify', 'multilabel', 'regress' or 'similarity'"),
        (row_kinds.RELATED, (row_kinds.RELATED_TEXTS,), "belong together", "'embed'"),
        (row_kinds.TAGGED, (row_kinds.TAGGED_WORDS,), "have tags of words", "'tag'"),
        (row_kinds.ANSWERED, (row_kinds.ANSWERED_QUESTIONS,), "have questions", "'answer'"),
    ):  # fmt: skip
        if rows in kinds and learns not in texts:
            raise UserError(
                f'data.sources.rows: "{rows}" texts {have}, which objective.kind = '
                f"{run.objective.kind!r} does not learn; use {cure}"
            )
        if kinds and rows not in kinds and learns in texts:
            raise UserError(
                f"data.sources.rows: objective.kind = {run.objective.kind!r} learns from texts "
                f'that {have}; set rows = "{rows}"'
            )
    if not kinds & {row_kinds.LABELED, row_kinds.TAGGED}:
        return None
    return row_kinds.MADE.get(learns, tuple)(run.objective.labels)


def prepare_command(run: Run, stages: Sequence[str] = ()) -> Summary:
    """Prepares a run's data and prints progress and a summary table."""
    from rich.console import Console

    seq_len = seq_len_of(run)
    progress = console_progress()
    ids = run.model.vocab_size
    labels = labels_of(run)
    summary = prepare(
        run.data, seq_len, stages=stages, model_vocab_size=ids, labels=labels,
        windows=run.objective.windows, progress=progress,
    )  # fmt: skip
    console = Console(highlight=False)
    print_summary(summary, console)
    for note in notes(run, summary):
        console.print(note, markup=False, soft_wrap=True)
    made = ", ".join(summary.stages)
    state = "" if progress.begun is not None else "up to date: "
    console.print(f"in {summary.dir}: {state}{made}", markup=False, soft_wrap=True)
    return summary


def _other_lengths(tokenized: Manifest) -> Iterator[str]:
    sources: dict[str, list[int]] = {}
    for split in tokenized.counts["sources"].values():
        for name, counts in split.items():
            if "other_length" in counts:
                left, docs = sources.setdefault(name, [0, 0])
                sources[name] = [left + counts["other_length"], docs + counts["docs"]]
    for name, (left, docs) in sources.items():
        yield f"data.sources: {name}: {left:,} of {left + docs:,} documents have other lengths"


def notes(run: Run, summary: Summary) -> Iterator[str]:
    """Things a user should know before training on the prepared data."""
    from lmwright.data.tokens.vocabulary import note_unused

    if tokenizer := summary.stages.get("tokenizer"):
        note = note_unused(run.model, summary.dir, tokenizer.facts["vocab_size"])
        if note and run.train.init_from is None:  # whose model is as it is
            yield note
    if tokenized := summary.stages.get("tokenize"):
        yield from _other_lengths(tokenized)
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
        yield (
            "nothing is held out: the documents are too few or too short for "
            f"data.holdout_fraction = {run.data.holdout_fraction:g}, or an earlier version made "
            f"them; remove {summary.dir}/normalize and prepare again, or add a source with "
            'use = "eval"'
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
        console.print(table)
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
            ("empty", "rows without text"),
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
    if values.get("tokens"):
        values["ratio"] = values.get("bytes", 0) / max(1, values.get("learned", values["tokens"]))
    if "learned" in values:
        values["share"] = values["learned"] / max(1, values["tokens"])
    if "bytes" in values:
        values["bytes"] /= 1e6
    return values
