"""Columns: turns one row of a table or object into a document, as its source describes.

{"text": ...}                      rows = "text"      --> Row.text is the text
{"instruction", "input", ...} etc. another kind       --> Row.text is a conversation, as JSON
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmwright.config.fields import default_of
from lmwright.config.rows import ANSWERED, LABELED, PLAIN, RELATED, ROW_PARTS, TAGGED
from lmwright.config.run import Source
from lmwright.data.sources.file import File
from lmwright.data.text.answered import answered_question
from lmwright.data.text.chat import UnusableError, conversation, example_columns
from lmwright.data.text.labeled import labeled_text
from lmwright.data.text.related import related_texts
from lmwright.data.text.tagged import tagged_words
from lmwright.errors import UserError

# A column that none of this many first rows has is a wrong name, not bad data.
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
LOOK_ROWS = 1000
MADE: dict[str, Callable[[Any, Source], Any]] = {
    LABELED: labeled_text, RELATED: related_texts, TAGGED: tagged_words,
    ANSWERED: answered_question,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One document."""

    number: int
    """Line (txt, jsonl, csv, tsv) or row in its file, from 1."""
    text: str
    id: str
    meta: str
    """Metadata of the document, a JSON object."""


@dataclass(frozen=True, slots=True)
class ListRow(Row):
    """A row whose text is a list, such as messages, of a source that takes lists."""

    value: list[Any]


@dataclass(frozen=True, slots=True)
class Bad:
    """One row that cannot be used, with the reason."""

    number: int
    reason: str
    missing: bool = False
    """True if a column that every row needs is not there at all."""
    there: tuple[str, ...] = ()
    """Columns that are there, of a row that can be read."""
    id: str | None = None
    """Of a row that can be read, and has one."""


class NoColumnError(UserError):
    """A column that a source names is not in a file."""

    def __init__(self, text: str, there: Iterable[str] = ()):  # as a worker's copy is made
        super().__init__(text)
        self.there = tuple(there)
        """Columns that are there instead."""


def list_needed_columns(source: Source) -> dict[str, list[str]]:
    """Columns that every row must have, by the field of the source that names them."""
    columns = {
        "text_column" if source.rows == "text" else "columns": content_columns(source),
        "meta_columns": list(source.meta_columns),
        "id_column": [source.id_column] if source.id_column else [],
    }
    return {key: names for key, names in columns.items() if names}


def content_columns(source: Source) -> list[str]:
    """Columns without which a row has nothing to learn."""
    if source.rows == "text":
        return [source.text_column]
    return list(example_columns(source)[0].values())


def chosen_columns(source: Source) -> list[str]:
    """Columns of parts that a row need not have, where the source names them."""
    optional = {} if source.rows == "text" else example_columns(source)[1]
    return [column for part, column in optional.items() if part in source.columns]


class Chosen:
    """Looks out for those in rows whose columns are not known before. One that none of the first
    rows has is a wrong name, not a part that they lack."""

    def __init__(self, file: File, source: Source):
        self._file, self._left = file, set(chosen_columns(source))
        self._there: dict[str, None] = {}
        self._count = 0

    def look(self, row: Any) -> None:
        """Sees a row. Raises NoColumnError after the last one that counts."""
        if self._left and isinstance(row, Mapping):
            self._left -= row.keys()
            self._there |= dict.fromkeys(row)
            self._count += 1
            if self._count == LOOK_ROWS:
                self.end()

    def end(self) -> None:
        """Raises NoColumnError if a column is missing in all rows so far."""
        if self._left and self._count:
            raise NoColumnError(
                f"{self._file.path}: none of the first {self._count} rows has "
                f"{names_of(sorted(self._left))}, only {names_of(self._there)}; change "
                "data.sources.columns",
                self._there,
            )


def refuse_plain(source: Source, files: Iterable[File]) -> None:
    """Raises UserError where all files are plain text, without the columns that a source names."""
    if any(file.format != "txt" for file in files):
        return
    if source.rows != "text":
        raise UserError(
            f'data.sources: {source.path} is plain text, and rows = "{source.rows}" needs columns; '
            "give csv, tsv, jsonl or parquet, or set data.sources.format"
        )
    for name in ("text_column", "id_column", "meta_columns"):
        if getattr(source, name) != default_of(Source.__dataclass_fields__[name]):
            raise UserError(
                f"data.sources.{name}: has no effect on {source.path}, which is plain text; remove "
                "it, or set data.sources.format"
            )


def select_columns(source: Source, columns: Iterable[str]) -> list[str]:
    """Columns to read out of those that exist, each once."""
    required = [name for names in list_needed_columns(source).values() for name in names]
    extra = beside(source) if source.rows == "text" else example_columns(source)[1].values()
    columns = set(columns)
    return list(dict.fromkeys([*required, *(name for name in extra if name in columns)]))


def takes_lists(source: Source) -> bool:
    """True for a source whose texts may be lists, which none of a run is."""
    return getattr(source, "takes_lists", False)


def beside(source: Source) -> tuple[str, ...]:
    """Columns whose values go with a text where a row has them, of a source that has such."""
    return getattr(source, "beside", ())


def from_columns(row: Mapping[str, Any], number: int, file: File, source: Source) -> Row | Bad:
    """Document of one row of a file of typed columns, whose objects have every key that any row has
    there: in a conversation, those that are null were none of its own."""
    if source.rows not in PLAIN:
        row = {name: _own_keys(value) for name, value in row.items()}
    return from_mapping(row, number, file, source)


def _own_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _own_keys(v) for k, v in value.items() if v is not None}
    if isinstance(value, list) and value and all(isinstance(each, tuple) for each in value):
        return {str(k): _own_keys(v) for k, v in value}  # of the type map, whose keys are a row's
    return [_own_keys(each) for each in value] if isinstance(value, list) else value


def from_mapping(row: Any, number: int, file: File, source: Source) -> Row | Bad:
    """Document of one JSON object or record."""
    made = _from_mapping(row, number, file, source)
    if isinstance(made, Bad) and isinstance(row, Mapping):
        name = source.id_column
        id_ = f"{file.name}:{number}" if name is None else _id_of(row.get(name))
        known = id_ is not None and id_.encode(errors="ignore").decode() == id_
        return replace(made, there=tuple(row), id=id_ if known else None)
    return made


def _id_of(value: Any) -> str | None:
    """A text or a whole number as text, also one that pandas made a float of, as it does where a
    row has none; None for any other value."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        value = int(value)  # larger floats are rounded: several numbers become one
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None


def _from_mapping(row: Any, number: int, file: File, source: Source) -> Row | Bad:
    if not isinstance(row, Mapping):
        return Bad(number, f"{kind_of(row)}, not an object")
    for name in content_columns(source):
        if name not in row:
            there = f"{names_of(row)}{_as_in(row, source)}"
            return Bad(number, f"no {name!r}, only {there}", missing=True)
    if source.rows == "text":
        text = row[source.text_column]
        listed = takes_lists(source) and isinstance(text, list)
        if not listed and not isinstance(text, str):
            return Bad(number, f"{source.text_column!r} is {kind_of(text)}, not text")
    else:
        try:
            made = MADE.get(source.rows, conversation)
            found = made(row, source)
            text = json.dumps(found, ensure_ascii=False, default=str)
        except UnusableError as e:
            return Bad(number, str(e))
        if source.unlabeled and found["label"] in source.unlabeled:
            text = ""  # left out, and counted
    id_: str | None = f"{file.name}:{number}"
    if source.id_column is not None:
        name = source.id_column
        if name not in row:
            return Bad(number, f"no {name!r}, only {names_of(row)}")
        id_ = _id_of(row[name])
        if id_ is None:
            what = str(row[name]) if isinstance(row[name], float) else kind_of(row[name])
            cure = "write ids as text, or name another column"
            return Bad(number, f"id {name!r} is {what}, not text or a whole number: {cure}")
    meta = {c: row[c] for c in source.meta_columns if c in row}
    meta |= {c: _own_keys(row[c]) for c in beside(source) if c in row}
    meta = json.dumps(meta, default=str, sort_keys=True)
    if isinstance(text, list):
        return ListRow(number, "", id_, meta, _own_keys(text))
    return Row(number, text, id_, meta)


def kind_of(value: Any) -> str:
    """Name of the type of a JSON value, for messages."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return "binary"
    other = f"of type {type(value).__name__}"
    return names.get(type(value), "a number" if isinstance(value, int | float) else other)


def names_of(names: Iterable[str]) -> str:
    """A few column names, for a message."""
    shown = [repr(n) for n in names]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "") or "nothing"


def _as_in(columns: Collection[str], source: Source) -> str:
    """Kind of rows that has these columns where the source's kind has not, for a message."""
    kinds = [
        kind
        for kind, (needed, _, _) in ROW_PARTS.items()
        if kind != source.rows and all(name in columns for name in needed)
    ]
    most = max(kinds, key=lambda kind: len(ROW_PARTS[kind][0]), default=None)
    return "" if most is None else f' (as rows = "{most}" has them)'


def check_header(header: list[str], file: File, source: Source) -> list[str]:
    """Raises UserError unless every column that the source names exists, once."""
    needed = list_needed_columns(source)
    needed["columns"] = [*needed.get("columns", []), *chosen_columns(source)]
    for key, columns in needed.items():
        for column in columns:
            if header.count(column) > 1:
                raise UserError(
                    f"{file.path} has {header.count(column)} columns called {column!r}; rename "
                    "all but one in the file"
                )
            if column not in header:
                cure = separator_cure(header, file) or f"change data.sources.{key}"
                raise NoColumnError(
                    f"{file.path} has no column {column!r}, only "
                    f"{names_of(header)}{_as_in(header, source)}; {cure}",
                    header,
                )
    return header


def separator_cure(header: Sequence[str], file: File) -> str:
    """Cure for a csv file whose cells are parted by something else than commas; empty for
    others."""
    alone = header[0] if file.format == "csv" and len(header) == 1 else ""
    for each, name in SEPARATORS.items():
        if each in alone:
            return f"its cells are parted by {name}: save it with commas, or with tabs as .tsv"
    return ""
