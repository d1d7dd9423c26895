"""Files of a user's data: their format, by their endings and first bytes, and their first rows."""

import contextlib
import itertools
from dataclasses import replace
from typing import Any

from lmwright.config.run import Source
from lmwright.data.sources.columns import Bad, NoColumnError, Row
from lmwright.data.sources.endings import ENDINGS, PLAIN, split_ending
from lmwright.data.sources.file import File, Slice
from lmwright.data.sources.files import find_files
from lmwright.data.sources.read import read_rows, stream
from lmwright.errors import UserError

NO_COLUMN = "\0"
"""Name that no column has."""
OTHER_ENDINGS: dict[Any, tuple[str, ...]] = {"jsonl": (".json",), "txt": PLAIN}
"""Endings of files that are read where a source names the format."""


def opened(path: str) -> tuple[Source, list[File]]:
    """The source with its format, where the endings of its files do not tell it, and its files."""
    source, error = Source(path=path), None
    try:
        files = find_files(source)
    except NoColumnError as other:  # of the hub, whose files have any columns
        files = find_files(replace(source, text_column=other.there[0]))
    except UserError as other:
        files, error = [], other
    if all(file.format == "txt" for file in files):  # or there are none
        source, files = _otherwise(source, files, error)
    if source.format != "jsonl":
        return source, files
    begin = next(iter(stream(files[0], 0, None)), b"").removeprefix(b"\xef\xbb\xbf")
    if begin.lstrip().startswith(b"["):
        source = replace(source, format="json")
    elif _is_squad(source, files):
        source = replace(source, format="json", rows="answered")
    return source, find_files(source)


def _otherwise(
    source: Source, files: list[File], error: UserError | None
) -> tuple[Source, list[File]]:
    """The source with the format of which it has most bytes, be it that of its plain text. Raises
    the error of its own format where it has files of none."""
    found = [(sum(file.size or 0 for file in files), source, files)] if files else []
    for format_, endings in OTHER_ENDINGS.items():
        given = replace(source, format=format_)
        if split_ending(source.path)[0] in endings:
            return given, find_files(given)
        with contextlib.suppress(UserError):
            others = find_files(given)
            there = {file: split_ending(file.path)[0] for file in others}
            if set(there.values()) <= {*endings, *ENDINGS[format_]}:
                size = sum(file.size or 0 for file in others if there[file] in endings)
                found.append((size, given, others))
    if not found and error is not None:
        raise error
    return max(found, key=lambda each: each[0])[1:]


def _is_squad(source: Source, files: list[File]) -> bool:
    """True for a file that is one object of SQuAD's form, in one line or several."""
    whole = replace(source, format="json", rows="answered")
    try:
        first = first_rows(whole, find_files(whole), 1)
    except UserError:  # several objects, or another form
        return False
    return bool(first) and len(files) == 1


def is_one_object(whole: Source) -> bool:
    """True for a file that is one object around its rows."""
    try:
        first = first_rows(replace(whole, text_column=NO_COLUMN), find_files(whole)[:1], 1)
    except UserError:
        return False
    return bool(first)


def first_rows(source: Source, files: list[File], count: int) -> list[Row | Bad]:
    """The first rows of files."""
    rows = itertools.chain.from_iterable(read_rows(Slice(file), source) for file in files)
    return list(itertools.islice(rows, count))
