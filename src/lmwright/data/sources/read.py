"""Rows: documents and bad rows from a slice of a file, streamed in bounded memory.

    bytes --gz, zst--> lines, cells, batches --data.columns--> Row(number, text, id, meta) | Bad

A bad row is reported and skipped; a file that cannot be read to its end raises.
"""

import contextlib
import csv
import json
import os
import shlex
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from lmwright.config.rows import ANSWERED
from lmwright.config.run import Source
from lmwright.data.json_text import json_reason
from lmwright.data.sources.columns import (
    LOOK_ROWS,
    Bad,
    Chosen,
    NoColumnError,
    Row,
    check_header,
    content_columns,
    from_columns,
    from_mapping,
    list_needed_columns,
    names_of,
    select_columns,
)
from lmwright.data.sources.file import DOCUMENT_BYTES, RECORDS, File, Slice, stream
from lmwright.data.text.answered import rows_of_squad
from lmwright.errors import StorageError, UserError, first_line

LINE_BYTES = 1 << 28
CELL_CHARS = 1 << 26
BLANK_LINES = 1 << 20
UTF_8 = b"\xef\xbb\xbf"
WIDE = {  # marks that no UTF-8 begins with
    **{b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32"},
    **{b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"},
}


def read_rows(piece: Slice, source: Source) -> Iterator[Row | Bad]:
    """Yields every row of a slice in order.

    Raises UserError naming the file if it is missing, cut or damaged, or lacks the column.
    """
    rows = _with_columns(_read(piece, source), piece.file, source)
    with _reading(piece.file):
        yield from rows


def _read(piece: Slice, source: Source) -> Iterator[Row | Bad]:
    file = piece.file
    if file.format == "hub":
        from lmwright.data.sources.hub import read_shard

        for number, row in enumerate(read_shard(file, source), 1):
            yield from_columns(row, number, file, source)
    elif file.format in ("parquet", "arrow"):
        from lmwright.data.sources.columnar import read_columns

        yield from read_columns(piece, source)
    elif file.format in RECORDS:
        from lmwright.data.sources.records import read_records

        yield from read_records(file, source)
    elif file.format == "jsonl":
        yield from _jsonl(piece, source)
    elif file.format == "json":
        yield from _json_list(file, source)
    elif file.format == "txt":
        if source.rows != "text":
            raise UserError(
                f'{file.path}: is plain text, which has no rows of rows = "{source.rows}"; name '
                "the files that have, as in data.sources.path = 'folder/*.jsonl'"
            )
        yield from _txt(piece, source)
    else:
        yield from _table(file, source)


@contextlib.contextmanager
def _reading(file: File) -> Iterator[None]:
    """Turns errors of a file into a UserError; errors of whoever consumes the rows pass through."""
    try:
        yield
    except (UserError, MemoryError, GeneratorExit):
        raise
    except (FileNotFoundError, PermissionError) as e:
        raise UserError(f"{file.path} cannot be read: {e.strerror or e}") from None
    except (TimeoutError, ConnectionError) as e:
        raise StorageError(
            f"{file.path} cannot be read to its end: its server does not answer any more "
            f"({first_line(e)}); check the network and run again"
        ) from None
    except (OSError, EOFError, pa.ArrowException) as e:
        kind = {"gzip": ".gz", "zstd": ".zst"}.get(file.compression or "", file.format)
        raise UserError(
            f"{file.path} is truncated or damaged ({first_line(e)}); replace this {kind} file or "
            "remove it from data.sources"
        ) from None
    except Exception as e:
        if "://" not in file.path:
            raise
        raise UserError(f"{file.path} cannot be read: {first_line(e)}") from None


def _with_columns(rows: Iterator[Row | Bad], file: File, source: Source) -> Iterator[Row | Bad]:
    """Passes rows on; raises UserError if none of the first ones has the text column."""
    ahead: list[Bad] = []
    for row in rows:
        if not (isinstance(row, Bad) and row.missing):
            break
        ahead.append(row)
        if len(ahead) == LOOK_ROWS:
            raise NoColumnError(
                f"{file.path}: none of the first {LOOK_ROWS} rows has "
                f"{names_of(content_columns(source))}; {row.reason}; change "
                f"data.sources.{next(iter(list_needed_columns(source)))}",
                dict.fromkeys(name for bad in ahead for name in bad.there),
            )
    else:
        yield from ahead
        return
    yield from ahead
    yield row
    yield from rows


def _lines(piece: Slice) -> Iterator[bytes]:
    """Lines of a slice with their ends."""
    rest: list[bytes] = []
    size = blanks = 0
    first = piece.start == 0
    for block in stream(piece.file, piece.start, piece.stop):
        blanks = 0 if block.strip() else blanks + block.count(b"\n")
        if blanks > BLANK_LINES:
            raise UserError(
                f"{piece.file.path} has more than {BLANK_LINES:,} empty lines in a row; is it "
                f"really {piece.file.format}?"
            )
        if first:
            block, first = _unmarked(block, piece.file), False
        head, end, tail = block.rpartition(b"\n")
        if not end:
            rest.append(block)
            size += len(block)
            if size > LINE_BYTES:
                raise UserError(
                    f"{piece.file.path} has a line longer than {LINE_BYTES >> 20} MiB; is it "
                    f"really {piece.file.format}?"
                )
            continue
        for line in (b"".join(rest) + head).split(b"\n"):
            yield line + b"\n"
        rest, size = [tail], len(tail)
    if last := b"".join(rest):
        yield last


def _unmarked(block: bytes, file: File) -> bytes:
    """The first block of a text without its byte order mark. Raises UserError for UTF-16 and
    UTF-32, of which no row could be read."""
    if encoding := _wide(block):
        new = shlex.quote(f"utf8-{os.path.basename(file.path)}")
        raise UserError(
            f"{file.path}: is {encoding}; write it as UTF-8, for example by `iconv -f {encoding} "
            f"-t UTF-8 {shlex.quote(file.path)} > {new}`"
        )
    return block.removeprefix(UTF_8)


def _wide(block: bytes) -> str | None:
    """Name of an encoding of two or four bytes a character, by its mark, or in Latin letters by the
    zeros beside them; None for others."""
    marked = next((name for mark, name in WIDE.items() if block.startswith(mark)), None)
    head = block[:4096]
    if marked or len(head) < 4 or head.count(0) < len(head) // 4:
        return marked
    few = len(head) // 40
    for order, letters in (("LE", 0), ("BE", 1)):
        if head[letters::2].count(0) <= few and head[1 - letters :: 2].count(0) >= 10 * few:
            return f"UTF-16{order}"
    return None


def _jsonl(piece: Slice, source: Source) -> Iterator[Row | Bad]:
    chosen = None if piece.start else Chosen(piece.file, source)
    for number, line in enumerate(_lines(piece), piece.first_row + 1):
        if not line.strip():
            continue
        if number == 1 and line.lstrip().startswith(b"["):
            raise UserError(
                f"{piece.file.path}: is a JSON list, not one object a line; set "
                "data.sources.format = 'json' (for `lmwright init`, name it .json)"
            )
        try:
            value = json.loads(line.decode())
            if chosen:
                chosen.look(value)
            row = from_mapping(value, number, piece.file, source)
        except UnicodeDecodeError as e:
            row = Bad(number, f"invalid UTF-8 at byte {e.start + 1} of the line")
        except RecursionError:
            row = Bad(number, "invalid JSON: nested too deeply")
        except ValueError as e:
            row = Bad(number, f"invalid JSON: {json_reason(e, 'line')}")
        yield _whole_characters(row) if b"\\u" in line else row
    if chosen:
        chosen.end()


def _json_list(file: File, source: Source) -> Iterator[Row | Bad]:
    """Elements of one JSON list; the file is held in memory as a whole."""
    too_long = f"{file.path} is longer than {DOCUMENT_BYTES >> 30} GiB; write it as .jsonl."
    try:
        value = json.loads(_whole(file, too_long).decode())
    except (ValueError, RecursionError) as e:
        reason = json_reason(e, "file") if isinstance(e, ValueError) else e
        raise UserError(
            f"{file.path} is not valid JSON ({reason}); if it has one object a line, set "
            "data.sources.format = 'jsonl'"
        ) from None
    squad = source.rows == ANSWERED
    value = rows_of_squad(value, source) if squad else _only_list(value)
    if not isinstance(value, list):
        raise UserError(
            f"{file.path} is neither a JSON list nor an object with one list of objects; write its "
            "rows as a list or as .jsonl"
        )
    chosen = Chosen(file, source)
    for number, row in enumerate(value, 1):
        chosen.look(row)
        yield _whole_characters(from_mapping(row, number, file, source))
    chosen.end()


def _only_list(value: Any) -> Any:
    """The list of objects in an object that has one (BBH's `examples`); any other value as it
    is."""
    inner = value.values() if isinstance(value, dict) else ()
    lists = [v for v in inner if isinstance(v, list) and v and all(isinstance(e, dict) for e in v)]
    return lists[0] if len(lists) == 1 else value


def _whole_characters(row: Row | Bad) -> Row | Bad:
    r"""Refuses half of a surrogate pair: \ud83d alone is valid JSON but not a character."""
    if isinstance(row, Row):
        try:
            f"{row.text}{row.id}".encode()
        except UnicodeEncodeError:
            return Bad(row.number, "half of a surrogate pair in an escape")
    return row


def _txt(piece: Slice, source: Source) -> Iterator[Row | Bad]:
    too_long = (
        f"{piece.file.path}: a document is longer than {DOCUMENT_BYTES >> 30} GiB; "
        "set data.sources.documents to 'paragraph' or 'line'."
    )
    if source.documents == "file":
        try:
            yield Row(1, _whole(piece.file, too_long).decode(), piece.file.name, "{}")
        except UnicodeDecodeError as e:
            yield Bad(1, f"invalid UTF-8 at byte {e.start + 1}")
        return
    by_line = source.documents == "line"
    lines: list[bytes] = []
    size = 0
    number = piece.first_row
    for number, line in enumerate(_lines(piece), piece.first_row + 1):
        blank = not line.strip()
        if by_line and not blank:
            yield _document(line, number, piece.file)
        elif blank and lines:
            yield _document(b"".join(lines), number - len(lines), piece.file)
            lines, size = [], 0
        elif not blank:
            lines.append(line)
            size += len(line)
            if size > DOCUMENT_BYTES:
                raise UserError(too_long)
    if lines:
        yield _document(b"".join(lines), number - len(lines) + 1, piece.file)


def _document(raw: bytes, number: int, file: File) -> Row | Bad:
    try:
        text = raw.rstrip(b"\r\n").decode()
    except UnicodeDecodeError as e:
        return Bad(number, f"invalid UTF-8 at byte {e.start + 1}")
    return Row(number, text, f"{file.name}:{number}", "{}")


def _whole(file: File, too_long: str) -> bytes:
    """Content of a text without its byte order mark. Raises UserError(too_long)."""
    blocks, size = [], 0
    for block in stream(file):
        blocks.append(block)
        size += len(block)
        if size > DOCUMENT_BYTES:
            raise UserError(too_long)
    return _unmarked(b"".join(blocks), file)


def _table(file: File, source: Source) -> Iterator[Row | Bad]:
    """Rows of csv as in RFC 4180, or of tsv without quotes, as IANA registered it."""
    # Surrogates mark bytes that are not UTF-8, to be found cell by cell.
    lines = (line.decode("utf-8", "surrogateescape") for line in _lines(Slice(file)))
    csv.field_size_limit(CELL_CHARS)
    if file.format == "csv":
        reader = csv.reader(lines, strict=True)
    else:
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    header = None
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as e:
            if "field larger" in str(e):  # what follows it would be read as something else
                cure = "is a quote never closed?" if file.format == "csv" else "split it"
                raise UserError(
                    f"{file.path}:{number}: a cell is longer than {CELL_CHARS >> 20} million "
                    f"characters; {cure}"
                ) from None
            if header is None:
                raise UserError(_of_first_line(e, file)) from None
            # a stray quote takes the lines to the next one into its cell, which are lost, too
            quote = "; is a quote never closed?" if reader.line_num > number else ""
            for line in range(number, reader.line_num + 1):
                yield Bad(line, f"invalid {file.format}: {e}{quote}")
            continue
        if not cells:
            continue
        if header is None:
            header = check_header(cells, file, source)
        elif len(cells) != len(header):
            yield Bad(number, f"{len(cells)} cells instead of {len(header)}")
        elif file.format == "tsv" and any(map(_quoted, cells)):
            yield Bad(number, "a cell in quotes, as of csv: a tsv has none; save it as csv")
        else:
            yield _table_row(dict(zip(header, cells, strict=True)), number, file, source)


def _quoted(cell: str) -> bool:
    """True for a cell that csv's rules have quoted: those inside are doubled, and some are."""
    inner = cell[1:-1] if len(cell) > 3 and cell[0] == cell[-1] == '"' else ""
    return '""' in inner and '"' not in inner.replace('""', "")


def _of_first_line(error: csv.Error, file: File) -> str:
    if "new-line character" in str(error):
        path = shlex.quote(file.path)
        return (
            f"{file.path}: its lines end with CR only, as on old Macs; convert it, for example by "
            f"`tr '\\r' '\\n' < {path} > NEW`"
        )
    return f"{file.path}: its first line is not {file.format}: {error}"


def _table_row(cells: dict[str, str], number: int, file: File, source: Source) -> Row | Bad:
    used = select_columns(source, cells)
    try:
        "".join(cells[name] for name in used if name not in source.meta_columns).encode()
    except UnicodeEncodeError:
        return Bad(number, "invalid UTF-8")
    return from_mapping(cells, number, file, source)
