"""Streamed: a line for each row of a file of texts, in order; an interrupted command goes on.

    file --rows--> lines --> OUT.part, and what was asked for in OUT.part.json --> OUT

What is written grows as OUT.part beside OUT, and takes the name OUT at the end.
"""

import errno
import glob
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

from lmwright.config.run import Source
from lmwright.data.manifest import hash_file
from lmwright.data.sources.columns import Bad, NoColumnError, Row
from lmwright.data.sources.file import File, Slice, refuse_changed
from lmwright.data.sources.files import find_files
from lmwright.data.sources.read import LOOK_ROWS, read_rows
from lmwright.errors import UserError
from lmwright.formats import places
from lmwright.guard.files import sync, try_lock, write_whole
from lmwright.guard.urls import without_secrets
from lmwright.storage.mirror import refuse_url

TELL_EVERY_S = 10.0
JSONL = ".jsonl"
MADE = "made"  # in OUT.part.json, what OUT is known by once its lines became it

Lines = Callable[[Iterator[Row | Bad]], Iterator[list[str]]]
"""JSON lines of rows, some at a time, in their order."""


class Tally(Protocol):
    """Counts of what was written."""

    def add(self, made: Mapping[str, Any]) -> None:
        """Counts a line."""


@dataclass(frozen=True)
class Texts:
    """Files of rows with a text each, and where it is in them."""

    source: Source
    files: tuple[File, ...]

    def rows(self) -> Iterator[Row | Bad]:
        """All rows of the files, in order. Raises UserError for a file that changes meanwhile."""
        for each in self.files:
            rows = map(_whole_characters, read_rows(Slice(each), self.source))
            if each.format == "txt":
                yield from _with_blank_lines(rows)
            else:
                yield from _with_columns(rows, each, self.source)
            refuse_changed(each)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of the first row; none of plain text, or where it is no row."""
        none = replace(self.source, text_column="\0", id_column=None, meta_columns=())
        try:
            first = next(read_rows(Slice(self.files[0]), none), None)
        except NoColumnError as error:
            return error.there
        except UserError:
            return ()  # it is told when the rows are read
        return first.there if isinstance(first, Bad) else ()

    @property
    def stamps(self) -> list[list[Any]]:
        """Facts by which the content of each file is known: of one on this machine a hash, however
        it is named and dated; of others the path without credentials, and their own stamp."""
        return [_stamp(each) for each in self.files]


def _stamp(file: File) -> list[Any]:
    if not os.path.isfile(file.path):
        return [without_secrets(file.path), file.size, file.stamp]
    # all of it: a row that was changed in place shows, too
    return [file.format, file.compression, file.size, hash_file(file.path)]


def _with_blank_lines(rows: Iterator[Row | Bad]) -> Iterator[Row | Bad]:
    """Lines of plain text, with the blank ones among them, which readers leave out."""
    last = 0
    for row in rows:
        yield from (Bad(number, "the line is blank") for number in range(last + 1, row.number))
        last = row.number
        yield row


def _with_columns(rows: Iterator[Row | Bad], file: File, source: Source) -> Iterator[Row | Bad]:
    """Passes rows on; raises UserError if none of the first ones, which may be all, has a column
    that was named, as readers do for files with a header."""
    named = {source.text_column: "text_column"} | dict.fromkeys(source.meta_columns, "meta_columns")
    named |= {source.id_column: "id_column"} if source.id_column else {}
    ahead, there, unknown = list[Row | Bad](), set[str | None](), 0
    for row in rows:
        ahead.append(row)
        if isinstance(row, Row):
            there |= {source.text_column, source.id_column, *json.loads(row.meta)}
        elif row.there or row.missing:
            there.update(row.there)
        else:  # nobody knows what it has
            unknown += 1
        if there.issuperset(named) or len(ahead) == LOOK_ROWS:
            break
    name = next((name for name in named if name not in there), None)
    if name is not None and len(ahead) > unknown:
        only = f"; {ahead[0].reason}" if isinstance(ahead[0], Bad) else ""
        raise UserError(
            f"{file.path}: none of the first {len(ahead)} rows has {name!r}{only}; change "
            f"data.sources.{named[name]}"
        )
    yield from ahead
    yield from rows


def _whole_characters(row: Row | Bad) -> Row | Bad:
    """Refuses half of a surrogate pair in the columns beside a text, as readers do in texts."""
    if isinstance(row, Row) and "\\ud" in row.meta:
        try:
            json.dumps(json.loads(row.meta), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return Bad(row.number, "half of a surrogate pair in an escape")
    return row


def open_texts(
    file: str, text_column: str, id_column: str | None, beside: Sequence[str] = (),
    kind: type[Source] = Source, documents: Literal["line", "file"] = "line",
) -> Texts:  # fmt: skip
    """The texts of a csv, tsv, jsonl or parquet file, or the lines of a txt file (or all of it),
    with the columns `beside` them, as a `kind` of source. Raises UserError where there is none."""
    columns = {"text_column": text_column, "id_column": id_column, "meta_columns": tuple(beside)}
    source = kind(path=file, documents=documents, **columns)
    try:
        return Texts(source, tuple(find_files(source)))
    except UserError as error:
        raise own_words(error, source) from None


def refuse_columns(texts: Texts, file: str, options: Mapping[str, str | None]) -> None:
    """Raises UserError where columns are named, by option, of files that are lines of text."""
    named = [option for option, column in options.items() if column is not None]
    if named and all(each.format == "txt" for each in texts.files):
        raise UserError(
            f"{named[0]}: no effect on {file}, whose lines are texts without columns; leave it out,"
            " or give csv, tsv, jsonl or parquet"
        )


def new_file(out: str | Path | None, overwrite: bool) -> Path | None:
    """The path of an output, None for the terminal. Raises UserError for a URL, and as
    `refuse_existing` does."""
    if out is None:
        return None
    refuse_url(out)
    refuse_existing(Path(out), overwrite)
    return Path(out)


def new_lines(out: str | Path | None, overwrite: bool) -> Path | None:
    """As `new_file`, of JSON lines. Raises UserError for another ending than theirs."""
    target = new_file(out, overwrite)
    if target is not None and target.suffix != JSONL:
        raise UserError(f"--out: {out} is for JSON lines, and does not end in {JSONL}; add it")
    return target


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raises UserError where a file is there that is not to be replaced, or no folder for it."""
    if out.exists() and not (out.is_file() or out.is_dir()):
        raise UserError(
            f"{out}: is not a regular file, and would be replaced by one; leave out --out to write "
            "to the terminal or a pipe"
        )
    if out.exists():
        place = Path(os.path.realpath(out))
        part, note = _beside(place)
        with suppress(OSError, ValueError, AttributeError):
            # a command was killed when its lines had just become OUT
            if part.exists() and json.loads(note.read_bytes()).get(MADE) == _known_by(place):
                part.unlink()
            if not part.exists():
                note.unlink()
    places.refuse_existing(out, overwrite)
    refuse_no_folder(out)


def refuse_no_folder(out: Path) -> None:
    """Raises UserError for a file in a folder that is not there."""
    if not out.parent.is_dir():
        raise UserError(f"{out}: {out.parent} is not a folder; make it, or choose another name")


def take_name(temporary: Path, path: Path) -> None:
    """Gives a complete file its name, under which it is whole also after a power loss."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def take_name_of_lines(part: Path, fresh: Path, out: Path) -> None:
    """Gives a complete file that is made of lines its name, and removes the lines. What the file is
    known by is noted before: the next command removes them if this one is killed in between."""
    note = _note_of(part)
    if note.exists():
        write_whole(note, json.dumps({**json.loads(note.read_bytes()), MADE: _known_by(fresh)}))
    take_name(fresh, out)
    part.unlink(missing_ok=True)


def _known_by(path: Path) -> list[int]:
    """Number, size and time of a file, which a rename leaves as they are."""
    found = path.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns]


def write_lines(
    texts: Texts,
    lines: Lines,
    tally: Tally,
    out: Path | None,
    asked: Mapping[str, Any],
    finish: Callable[[Path, Path], None] = take_name,
    overwrite: bool = False,
) -> None:
    """Writes the lines of the texts to the terminal, or to `out` by way of OUT.part, after the rows
    that an interrupted command that `asked` for the same left there; `finish` makes OUT of it.
    Raises UserError where a file cannot be read or written, another command wrote OUT, or the rows
    that are there are of another command and not to be replaced (`overwrite`)."""

    def run(done: int, write: Callable[[str], Any]) -> None:
        tell = _teller(done) if out else lambda _new: None
        try:
            for each in lines(islice(texts.rows(), done, None)):
                write("".join(each))
                tell(len(each))
        except UserError as error:
            raise own_words(error, texts.source) from None

    if out is None:
        run(0, sys.stdout.write)
        return
    if any(_are_one(out, each.path) for each in texts.files):
        raise UserError(f"{out}: holds the texts, which would be lost; choose another --out")

    def end(part: Path, out: Path) -> None:
        refuse_existing(out, overwrite)  # another command may have made it meanwhile
        finish(part, out)

    place = Path(os.path.realpath(out))  # a link stays, and its target is written
    refuse_existing(place, overwrite)
    wishes = {**asked, "texts": texts.stamps}
    done = _write_resumed(place, wishes, run, tally, end, overwrite)
    print(f"{out}: {f'{done:,} rows were there; ' if done else ''}", end="")


def _teller(rows: int) -> Callable[[int], None]:
    """Prints now and then how many rows are written, after `rows` that were there, and how fast; it
    is given the number of new ones."""
    began = told = time.monotonic()
    new = 0

    def tell(more: int) -> None:
        nonlocal new, told
        new, now = new + more, time.monotonic()
        if now - told >= TELL_EVERY_S:
            print(f"{rows + new:,} rows, {new / (now - began):,.0f} rows/s", file=sys.stderr)
            told = now

    return tell


def _are_one(out: Path, path: str) -> bool:
    """True for two names of a file that is there."""
    return out.exists() and os.path.exists(path) and os.path.samefile(out, path)


def own_words(error: UserError, source: Source) -> UserError:
    """The error of a reader, with the options of a command for the fields of a run, and without the
    cures that only a run has."""
    text = str(error).removeprefix("data.sources: ").replace(" or remove it from data.sources", "")
    text = re.sub(r"; change data\.sources\.split$", "; give one of its files", text)
    text = re.sub(r"; (set|change) data\.sources\.format\b.*", "", text)
    options = {
        "text_column": getattr(source, "option", "--text-column"),
        "id_column": "--id-column",
    }
    for name, option in options.items():
        text = text.replace(f"data.sources.{name}", option)
    text = text.replace("data.sources.meta_columns", "--pair-column or --label-column")
    return UserError(text)


def _write_resumed(
    out: Path,
    asked: Mapping[str, Any],
    run: Callable[[int, Callable[[str], Any]], None],
    tally: Tally,
    finish: Callable[[Path, Path], None],
    overwrite: bool,
) -> int:
    """Writes the missing lines; returns the number of rows that an interrupted command had
    written. Raises UserError for rows of another command, unless `overwrite`."""
    part, note = _beside(out)
    done = 0
    try:
        wishes = json.dumps(asked)
        with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as raw:
            if not (try_lock(raw) and _is_at(raw, part)):  # it may have been OUT by then
                raise UserError(
                    f"{part}: is being written by another command; wait for it, or choose another "
                    "--out"
                )
            for left in out.parent.glob(f".{glob.escape(part.name)}.*.tmp"):
                left.unlink(missing_ok=True)  # a note or an OUT that a killed command began
            if (other := _difference(note, wishes)) is not None:
                if raw.readline().endswith(b"\n"):
                    if not overwrite:
                        raise UserError(
                            f"{part}: holds finished lines, {other}; repeat the command that wrote "
                            "them to continue, or add --overwrite to start again"
                        )
                    print(f"{part}: begins again without its lines, {other}", file=sys.stderr)
                raw.truncate(0)
                raw.seek(0)
                write_whole(note, wishes)
            done = _whole_lines(raw, tally)
            try:
                run(done, lambda text: (raw.write(text.encode()), raw.flush()))
            except UserError:
                if raw.tell() == 0:  # nothing to go on from
                    part.unlink()
                    note.unlink()
                raise
            finish(part, out)
            note.unlink(missing_ok=True)
    except OSError as error:
        cure = "choose another --out"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            cure = "free some space and run the same command again; it continues where it stopped"
        raise UserError(f"{out}: cannot be written ({error.strerror or error}); {cure}") from None
    return done


def _beside(out: Path) -> tuple[Path, Path]:
    """OUT.part and OUT.part.json."""
    part = out.with_name(f"{out.name}.part")
    return part, _note_of(part)


def _note_of(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _is_at(raw: Any, path: Path) -> bool:
    """True if an open file still has its name."""
    return path.exists() and os.path.samestat(os.fstat(raw.fileno()), path.stat())


def _difference(note: Path, wishes: str) -> str | None:
    """The reason why lines that are there are none of this command's; None where they are."""
    try:
        before, now = json.loads(note.read_bytes()), json.loads(wishes)
        before.pop(MADE, None)
        names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    except (OSError, ValueError, TypeError, AttributeError):
        return f"whose settings are not known ({note.name} is missing or damaged)"
    return f"made with other settings ({', '.join(names)})" if names else None


def _whole_lines(raw: Any, tally: Tally) -> int:
    """Counts the lines of a file into the tally, and cuts off what a crash left after them."""
    count = end = 0
    for line in raw:
        try:
            made = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            made = None
        if not isinstance(made, dict):
            break
        tally.add(made)
        count, end = count + 1, end + len(line)
    raw.seek(end)
    raw.truncate()
    return count
