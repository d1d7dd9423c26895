"""Prepare: all stages from any text to training rows; each can be run alone.

    sources --normalize--> text --tokenizer--> tokenizer.json
                           text --tokenize--> ids --pack--> rows --shuffle--> their order

Every stage is off the accelerator, goes on where it was killed, and does nothing if its inputs
are what they were.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from lmwright.config import rows as row_kinds
from lmwright.config.check import refuse_own_data
from lmwright.config.check_data import check_data
from lmwright.config.run import Data, Run, seq_len_of
from lmwright.data.carry import working_folder
from lmwright.data.dropped import LAST_READ_BY, DroppedError, drop, restore
from lmwright.data.manifest import STAGES, Manifest, read_manifest
from lmwright.data.portions import PORTIONS, Portion
from lmwright.data.progress import Progress, console_progress
from lmwright.data.room import room_line
from lmwright.data.stored import read_small
from lmwright.data.summary import Summary, notes, print_summary
from lmwright.errors import UserError

Keep = Literal["all", "store"]
Makers = dict[str, Callable[[], Manifest]]  # by stage


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
    keep: Keep = "all",
    portion: Portion | None = None,
) -> Summary:
    """Runs the named stages in their order, or all of them.

    model_vocab_size: a trained tokenizer that says no size gets this one, and none may be larger.
    seq_len: tokens in a row, used unless `data.pack.seq_len` says otherwise. workers: processes;
    `data.workers` if None, else all cores. The output never depends on it. labels: the classes of
    labeled texts; none of them where their labels are numbers. windows: of questions, the tokens of
    one and those that it shares with the next. keep: "store" removes the files of a stage when the
    next one has read them; what needs them later makes it again. portion: the one that is made, of
    data in portions (`prepare_portions` makes all of them). Raises UserError for an unknown
    stage, bad input, and a stage whose predecessor is missing.
    """
    for stage in stages:
        if stage not in STAGES:
            raise UserError(f"There is no stage {stage!r}; stages are {', '.join(STAGES)}")
    length = data.pack.seq_len or seq_len
    check_data(data, length)
    if data.portions is not None:
        from lmwright.data.prepare_portions import prepare_portions

        if stages:
            raise UserError("data.portions: each takes all stages; leave --stage out")
        sizes = {"model_vocab_size": model_vocab_size, "workers": workers}
        return prepare_portions(prepare, data, seq_len, progress=progress, keep=keep, **sizes)
    if portion is None and read_small(data.dir, PORTIONS) is not None:
        raise UserError(
            f"data.dir: {data.dir} holds a store in portions; set data.portions as before, remove "
            "the folder, or choose another"
        )
    from lmwright.data.tokens.hub_tokenizer import asked_once
    from lmwright.data.tokens.vocabulary import check_imported

    workers = workers or data.workers
    with asked_once():
        if not stages or "tokenizer" in stages:
            check_imported(data, model_vocab_size)
        if has_chats(data):
            data = with_template(data)
        with working_folder(data.dir) as folder:
            there = replace(data, dir=folder)
            makers = _makers(
                there, length, model_vocab_size, labels, windows, workers, progress, portion
            )
            made = _make(there, stages, keep, makers, model_vocab_size)
    return Summary(data.dir, made)


def _make(
    data: Data, stages: Sequence[str], keep: Keep, makers: Makers, model_vocab_size: int | None
) -> dict[str, Manifest]:
    """Runs the stages; makes one that was dropped again if its files are needed."""
    while True:
        try:
            return _make_once(data, stages, keep, makers, model_vocab_size)
        except DroppedError as needed:
            folder = Path(data.dir) / needed.stage
            if stages and needed.stage not in stages:
                read_manifest(folder)  # raises
            print(f"{folder} was dropped by --keep store and is needed: it is made again")
            restore(folder)


def _make_once(
    data: Data, stages: Sequence[str], keep: Keep, makers: Makers, model_vocab_size: int | None
) -> dict[str, Manifest]:
    from lmwright.data.tokens.vocabulary import check_size

    made: dict[str, Manifest] = {}
    for stage in _order(data):
        if not stages or stage in stages:
            made[stage] = makers[stage]()
        if stage == "tokenizer" and stage in made:
            ids = made["tokenizer"].facts["vocab_size"]
            check_size(ids, model_vocab_size, data.tokenizer.path or f"{data.dir}/tokenizer")
        if keep == "store" and stage in made:
            for used, by in LAST_READ_BY.items():
                if by == stage:
                    drop(Path(data.dir) / used)
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
    from lmwright.data.text.chat import UnusableError
    from lmwright.data.text.chat_template import ChatTemplate, template_source
    from lmwright.data.tokens.hub_tokenizer import pinned_path
    from lmwright.data.tokens.tokenizer import stand_in
    from lmwright.data.tokens.tokenizer_formats import import_tokenizer

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


def _makers(
    data: Data,
    seq_len: int,
    model_vocab_size: int | None,
    labels: Sequence[str] | None,
    windows: tuple[int, int] | None,
    workers: int | None,
    progress: Progress | None,
    portion: Portion | None,
) -> Makers:
    # imported here, so that `--help` stays quick
    from lmwright.data.rows.lengths import wanted_lengths
    from lmwright.data.rows.pack import pack_tokens
    from lmwright.data.rows.shuffle import shuffle_rows
    from lmwright.data.sources.files import source_names
    from lmwright.data.text.normalize import normalize
    from lmwright.data.tokens.facts import asked_of
    from lmwright.data.tokens.tokenize import Conversations, tokenize
    from lmwright.data.tokens.tokenizer_stage import make_tokenizer

    options = {"workers": workers, "progress": progress}
    named = list(zip(source_names(data.sources), data.sources, strict=True))
    weights = {name: source.weight for name, source in named if source.use == "train"}
    lengths = wanted_lengths(named)
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
    return {
        "normalize": lambda: normalize(data, portion=portion, **options),
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
        "pack": lambda: pack_tokens(
            data.dir,
            seq_len=seq_len,
            pack=data.pack,
            rows=portion.rows if portion is not None else None,
            **options,
        ),
        "shuffle": lambda: shuffle_rows(data.dir, data.shuffle, weights, **options),
    }


def labels_of(run: Run) -> tuple[str, ...] | None:
    """The classes of a run whose sources hold labeled texts, empty where their labels are numbers;
    of others None."""
    kinds, objective = {source.rows for source in run.data.sources}, run.objective
    if not kinds & {row_kinds.LABELED, row_kinds.TAGGED}:
        return None
    return row_kinds.MADE.get(objective.learns_from, tuple)(objective.labels)


def prepare_command(run: Run, stages: Sequence[str] = (), keep: Keep = "all") -> Summary:
    """Prepares a run's data and prints progress and a summary table."""
    from rich.console import Console

    row_kinds.refuse_sources(run)
    if read_small(run.data.dir, "env.json") is None:  # one that has begun so goes on
        refuse_own_data(run)
    seq_len = seq_len_of(run)
    progress = console_progress()
    ids = run.model.vocab_size
    labels = labels_of(run)
    if keep == "store":
        print(room_line(run), flush=True)
    summary = prepare(
        run.data, seq_len, stages=stages, model_vocab_size=ids, labels=labels,
        windows=run.objective.windows, progress=progress, keep=keep,
    )  # fmt: skip
    console = Console(highlight=False)
    print_summary(summary, console)
    for note in notes(run, summary):
        console.print(note, markup=False, soft_wrap=True)
    made = ", ".join(summary.stages)
    if run.data.portions is not None:
        made = f"{run.data.portions} portions"
    state = "" if progress.begun is not None else "up to date: "
    console.print(f"in {summary.dir}: {state}{made}", markup=False, soft_wrap=True)
    return summary
