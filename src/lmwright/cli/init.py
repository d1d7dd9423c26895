"""Run files written for a user's data: `lmwright init`.

paths --first rows, read as each kind--> kind of rows --recipe, model--> run file, loaded once
"""

import itertools
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lmwright.cli.init_columns import source_fields
from lmwright.cli.init_files import NO_COLUMN, first_rows, is_one_object, opened
from lmwright.cli.init_labels import Labels, label_column, labels_of, of_prompts, of_texts, together
from lmwright.cli.init_model import adapter, begins_texts, without_template
from lmwright.config.fields import to_plain
from lmwright.config.rows import ANSWERED, LABELED, PLAIN, RELATED, ROW_PARTS, TAGGED
from lmwright.config.run import Run, Source
from lmwright.config.text import literal
from lmwright.data.sources.class_names import class_names
from lmwright.data.sources.columns import Bad, NoColumnError, Row, separator_cure
from lmwright.data.sources.file import File, Slice
from lmwright.data.sources.files import find_files
from lmwright.data.sources.read import read_rows
from lmwright.errors import UserError
from lmwright.formats.open import find_model, load_run
from lmwright.formats.places import refuse_existing
from lmwright.guard.files import write_whole
from lmwright.guard.temporary import temporary_file
from lmwright.guard.terminated import terminated_by_exit
from lmwright.presets import pretraining_of

LOOK_ROWS = 20
LABEL_ROWS = 10_000
ENCODERS = {
    LABELED: "finetune-classifier",
    RELATED: "finetune-embedder",
    TAGGED: "finetune-tagger",
    ANSWERED: "finetune-answers",
}
"""Recipes that start from an encoder, by the rows that they learn from."""
COMPARED = {"preference": "dpo", "rated": "kto"}
"""Objectives that compare a model with what it was, by the rows that they learn from."""
ASKED = ("prompt", "alpaca", *COMPARED)
"""Kinds of rows whose columns are parts of what is asked and answered."""
WINDOW = 384
"""Tokens of a question and its context, where nothing else is said."""
DEFAULT_PRESET = "llama-15m"
BYTES_PER_TOKEN = 8
"""Of text, with which rows that are counted by it are none too many."""
NEEDS_MODEL = (
    "--model: missing; name the model that is to learn from rows of {rows}: a preset, a folder, a "
    "run directory or hf://owner/name"
)


@dataclass(frozen=True)
class Found:
    """A source, and what its first rows are."""

    source: Source
    labels: Labels = Labels()

    @property
    def rows(self) -> str:
        """Kind of its rows."""
        return self.source.rows

    def texts(self) -> Iterator[str]:
        """Texts of its rows."""
        by_line = replace(self.source, documents="line")  # a large file is not read as a whole
        files = find_files(self.source)
        rows = itertools.chain.from_iterable(read_rows(Slice(file), by_line) for file in files)
        return (row.text for row in rows if isinstance(row, Row))

    def has_tools(self) -> bool:
        """True if one of its first conversations has tools or calls them."""
        first = map(json.loads, itertools.islice(self.texts(), LOOK_ROWS))
        with_calls = lambda row: any("tool_calls" in each for each in row["messages"])  # noqa: E731
        return any(row.get("tools") or with_calls(row) for row in first)

    def lines(self) -> Iterator[str]:
        """Lines of the source in the run file."""
        yield "[[data.sources]]"
        given = to_plain(self.source, defaults="omit")
        for name in ("path", "format", "rows", "columns", "unlabeled", "text_column"):
            if name in given:
                yield f"{name} = {literal(given[name])}"


def look(path: str, rows: Any = None) -> Found:
    """Reads the first rows of a source as each kind of rows, or as one, until most of them can be
    used. Raises UserError for a source that cannot be read, or whose rows are of no kind."""
    if not path:
        raise UserError("TEXT: is empty; name a file or a folder")
    source, files = opened(path)
    try:
        return _kind_of(source, files, rows)
    except UserError:
        whole = replace(source, format="json")
        if source.format != "jsonl" or not is_one_object(whole):
            raise
        return _kind_of(whole, find_files(whole), rows)


def _kind_of(source: Source, files: list[File], rows: Any) -> Found:
    path = source.path
    if rows in (None, "text") and all(file.format == "txt" for file in files):
        _refuse_no_text(source, files)
        return Found(source)
    there = _columns(source, files)
    if cure := separator_cure(there, files[0]):
        raise UserError(f"{path}: {cure}")
    plain = {} if rows is None else {"rows": rows}  # whose error names the columns that are there
    alone = [{"text_column": there[0]}] if rows in (None, "text") and len(there) == 1 else []
    why = ""
    for given in (*source_fields(rows, there), plain, *alone):
        tried = replace(source, **given)
        try:
            first = first_rows(tried, files, LOOK_ROWS)
        except UserError as error:
            why = why or f"Read as {tried.rows}: {error}"
            continue
        bad = [row for row in first if isinstance(row, Bad)]
        if 2 * len(bad) < len(first):
            if rows is None and tried.rows not in (*PLAIN, "rated"):
                _refuse_ratings(tried, files, there)
            if (rows, tried.rows) == (None, "text"):
                others = tuple(name for name in there if name != tried.text_column)
                beside = first_rows(replace(tried, meta_columns=others), files, LOOK_ROWS)
                return Found(tried, of_texts(there, beside))
            if tried.rows in ASKED:
                return Found(tried, of_prompts(tried, there))
            return _with_labels(tried, files)
        bad = _first_bad(tried, files)
        if bad and not there:  # whatever their kind
            raise UserError(bad)
        why = why or f"Read as {tried.rows}: {bad or f'{path}: holds no row'}"
    raise UserError(
        f"{path}: its rows are of an unknown kind; name their columns in a run file: a column of "
        "texts as text_column (docs/prepare.md), others as columns "
        f"(docs/conversations.md){_columns_as(rows, there)}. {why}"
    )


def _columns_as(rows: Any, there: Sequence[str]) -> str:
    """An example of the settings that name the columns of a kind of rows which are not `there`."""
    needed = () if rows in (None, "text") else ROW_PARTS[rows][0]
    lacking = {part: "COLUMN" for part in needed if part not in there}
    if not lacking:
        return ""
    return f", such as rows = {literal(rows)} and columns = {literal(lacking)}"


def _first_bad(source: Source, files: list[File]) -> str | None:
    """Place and reason of the first row of files that cannot be used, if there is one."""
    rows = ((file, row) for file in files for row in first_rows(source, [file], LOOK_ROWS))
    bad = ((file, row) for file, row in rows if isinstance(row, Bad))
    return next((f"{file.path}:{row.number}: {row.reason}" for file, row in bad), None)


def _refuse_no_text(source: Source, files: list[File]) -> None:
    """Raises UserError for plain text of which the first files are mostly not UTF-8, or empty."""
    by_line = replace(source, documents="line")  # so that a large file is not read as a whole
    first = [(file, first_rows(by_line, [file], LOOK_ROWS)) for file in files[:LOOK_ROWS]]
    bad = [
        f"{file.path}:{row.number}: {row.reason}; write it as UTF-8"
        for file, rows in first
        if (row := next((row for row in rows if isinstance(row, Bad)), None))
    ]
    if 2 * len(bad) > len(first):
        raise UserError(bad[0])
    if len(files) == len(first) and not any(rows for _, rows in first):
        raise UserError(f"{source.path}: holds no text")


def _refuse_ratings(source: Source, files: list[File], columns: Sequence[str]) -> None:
    """Raises UserError for conversations with a label, which would not be read: disliked answers
    would be learned."""
    labels = tuple(name for name in columns if name.casefold() == "label")
    rated = replace(source, meta_columns=labels)
    first = [row for row in first_rows(rated, files, LOOK_ROWS) if isinstance(row, Row)]
    if any(isinstance(told, bool) for row in first for told in json.loads(row.meta).values()):
        raise UserError(
            f'{source.path}: its rows of {source.rows} have a label, which is read beside "prompt" '
            f'and "completion" (docs/preferences.md); with --rows {source.rows} all answers are '
            "learned"
        )


def _columns(source: Source, files: list[File]) -> list[str]:
    """Names of the columns of the first rows; none of plain text."""
    if source.rows == ANSWERED:
        return [*ROW_PARTS[ANSWERED][0]]
    try:
        first = first_rows(replace(source, rows="text", text_column=NO_COLUMN), files, LOOK_ROWS)
    except NoColumnError as error:
        return [*error.there]
    return [*dict.fromkeys(name for row in first if isinstance(row, Bad) for name in row.there)]


def _with_labels(source: Source, files: list[File]) -> Found:
    """The source with its recipe, and the labels of its first rows where those are names."""
    if source.rows not in (LABELED, TAGGED):
        return Found(source, Labels(ENCODERS.get(source.rows, "")))
    column = label_column(source)
    rows = first_rows(replace(source, meta_columns=(column,)), files, LABEL_ROWS)
    labels = labels_of(source, rows, class_names(source, files[0], column))
    unlabeled = (labels.unlabeled,) if labels.unlabeled is not None else ()
    return Found(replace(source, unlabeled=unlabeled), labels)


@dataclass(frozen=True)
class Draft:
    """A run file that is being written."""

    name: str
    sources: Sequence[Found]
    model: str | None
    lora: bool

    @property
    def rows(self) -> str:
        return self.sources[0].rows

    @cached_property
    def preset(self) -> bool:
        """True for a model whose weights are random."""
        from lmwright import presets

        return (self.model or DEFAULT_PRESET) in presets.of_section("model")

    def text(self) -> str:
        """The whole run file. Raises UserError for sources of different kinds, or without the
        model that they need."""
        kinds = sorted({each.rows for each in self.sources})
        if len(kinds) > 1 and set(kinds) & {*PLAIN, *COMPARED}:
            raise UserError(
                f"TEXT: rows of {' and '.join(kinds)} cannot be in one run; give those of one kind"
            )
        if self.rows != "text" and self.model is None:
            raise UserError(NEEDS_MODEL.format(rows=self.rows))
        if self.preset and (self.lora or self.rows in ENCODERS):
            raise UserError(
                f"--model: {self.model or DEFAULT_PRESET} is a preset, whose weights are random; "
                "name a trained model"
            )
        if self.rows in ENCODERS and not (model := find_model(str(self.model))).both_ways:
            raise UserError(
                f"--model: {self.model} is a decoder ({model.kind}), and rows of {self.rows} need "
                "an encoder (docs/encoders.md); name one, such as hf://answerdotai/ModernBERT-base"
            )
        parts = (
            [f"recipe = {literal(self._recipe())}", f"name = {literal(self.name)}",
             f"dir = {literal(f'runs/{self.name}')}"],
            self._model(), self._objective(), self._train(), self._optim(),
            adapter(str(self.model)) if self.lora else [],
            self._data(), *([*each.lines()] for each in self.sources),
        )  # fmt: skip
        return "\n\n".join("\n".join(part) for part in parts if part) + "\n"

    def _recipe(self) -> str:
        if self.rows == "text":
            return pretraining_of(find_model(self.model or DEFAULT_PRESET))
        return self.sources[0].labels.recipe or "sft"

    def _model(self) -> list[str]:
        if not self.preset:
            return []
        name = literal(self.model or DEFAULT_PRESET)
        return ["[model]", f"preset = {name}      # `lmwright config presets` lists others"]

    def _objective(self) -> list[str]:
        if (kind := COMPARED.get(self.rows)) is not None:
            return ["[objective]", f"kind = {literal(kind)}"]
        if self.rows == ANSWERED and (window := self._seq_len()) < WINDOW:
            return ["[objective]", f"window_tokens = {window}", f"window_overlap = {window // 3}"]
        labels = together({each.source.path: each.labels for each in self.sources})
        return ["[objective]", f"labels = {literal(labels)}"] if labels else []

    def _train(self) -> list[str]:
        lines = ["[train]"]
        if not self.preset:
            lines.append(f"init_from = {literal(self.model)}")
        long = self.rows == "text"
        lines.append("steps = 2000" if long else "epochs = 2")
        return [*lines, f"global_batch_size = {self._batch(32 if long else 16)}"]

    def _batch(self, most: int) -> int:
        """Rows of a step: `most`, or the largest power of two that little data surely fills."""
        row_bytes = BYTES_PER_TOKEN * self._seq_len()
        sizes = (len(text.encode()) for each in self.sources for text in each.texts())
        there = 0
        try:
            for size in sizes:
                there += size
                if there >= most * row_bytes:
                    return most
        except UserError:  # of a file that `prepare` names
            return most
        return 1 << max(1, there // row_bytes).bit_length() - 1

    def _optim(self) -> list[str]:
        if self.lora:
            rate = 5e-5 if self.rows in COMPARED else 2e-4
        elif self.rows == "text" and not self.preset:
            rate = 1e-4
        else:
            return []
        return ["[optim]", f"learning_rate = {rate:g}"]

    def _data(self) -> list[str]:
        lines = ["[data]", f"dir = {literal(f'data/{self.name}')}"]
        if not self.preset and self.rows in PLAIN and begins_texts(str(self.model)):
            lines.append('tokenize.prepend = "bos"      # as its tokenizer begins texts')
        if self.rows == "text":
            return [*lines, "holdout_fraction = 0.01"]
        model = str(self.model)  # which rows that are no texts need
        if self.rows not in ENCODERS and (self.preset or without_template(model)):
            tools = any(source.has_tools() for source in self.sources)
            template = "qwen3" if tools else "chatml"
            lines.append(f'chat.template = "{template}"      # its tokenizer has none')
        return [*lines, f"pack.seq_len = {self._seq_len()}      # tokens of a row"]

    def _seq_len(self) -> int:
        """Tokens of a row."""
        model = find_model(self.model or DEFAULT_PRESET)
        if self.rows == "text":
            return model.seq_len
        return min(512 if self.rows in ENCODERS else 1024, model.seq_len)


def init_command(
    file: str,
    texts: Sequence[str],
    *,
    model: str | None = None,
    lora: bool = False,
    rows: str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a run file for data, and prints what was found and what comes next.

    Raises UserError for data that cannot be read, a model that is not there, or a file that exists.
    """
    path = Path(file)
    if path.suffix != ".toml" and texts[-1].endswith(".toml"):
        raise UserError(
            f"{file}: the run file comes first: lmwright init {shlex.join([texts[-1], file])}"
        )
    if path.suffix != ".toml":
        raise UserError(f"{file}: has to end in .toml, as in {path.stem or 'run'}.toml")
    refuse_existing(path, overwrite)
    if not path.parent.is_dir():
        raise UserError(f"{file}: {path.parent} is not a folder; make it first")
    sources = [look(text, rows) for text in texts]
    compared = sources[0].rows in COMPARED  # with the base, which is the model without its adapter
    draft = Draft(path.stem, sources, model, lora or compared).text()
    run = _written(path, draft, file)
    for found in sources:
        print(f"{found.source.path}: rows of {found.rows}")
        if found.labels.note:
            print(f"note: {found.labels.note}")
    trained = f"objective {run.objective.kind}, model {run.model.kind}"
    name = shlex.quote(file)
    print(f"wrote {file}: {trained}; all else: lmwright config show {name}")
    print(f"next:  lmwright prepare {name}")
    chips = next(n for n in (8, 4, 1) if run.train.global_batch_size % n == 0)
    print(f"       lmwright plan {name} --on v5e-{chips}")
    print(f"       lmwright train {name}")


def _written(path: Path, draft: str, file: str) -> Run:
    """The run of a draft, which gets its place once it is read without an error."""
    part = temporary_file(path.parent, path.name)
    with terminated_by_exit():
        try:
            write_whole(part, draft)
            run = load_run(part)
            part.replace(path)
        except FileNotFoundError as error:  # in a folder whose files the system makes
            raise UserError(
                f"{file}: cannot be written ({error.strerror}); choose another"
            ) from None
        except OSError as error:
            error.filename = file
            raise
        except UserError as error:
            raise UserError(str(error).replace(str(part), file)) from None
        finally:
            part.unlink(missing_ok=True)
    return run
