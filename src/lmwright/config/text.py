"""The text of a run file: TOML with the line of every value, and `a.b=c` overrides.

`tomllib` gives values without lines; the lines come from parsing each statement alone.
"""

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli_w

from lmwright.errors import UserError
from lmwright.storage.mirror import shown

Keys = tuple[str | int, ...]

DATA_ENDING = re.compile(
    r"\.(jsonl|ndjson|csv|tsv|txt|md|parquet|arrow|bin|npy|gguf|safetensors|gz|zst|zip)$", re.I
)
DEEPEST = 100  # tables in each other
LONGEST_NAME = 400
DATA_HEADS = (b"PAR1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"ARROW1", b"GGUF", b"PK\x03\x04")

SYNTAX_CURES = {
    "invalid value": "text needs quotes",
    "cannot overwrite a value": "a name is given twice",
    "illegal character '\\n'": "a quote is not closed on its line",
    "invalid initial character for a key part": "a name is missing; a table in { } stands on one "
    "line, without a comma at its end",
}


def join_keys(keys: Sequence[str | int]) -> str:
    """("data", "sources", 0) as data.sources.0."""
    return ".".join(str(key) for key in keys)


def read_toml(path: Path) -> tuple[dict[str, Any], dict[Keys, int]]:
    """A run file's values and the line (from 1) of each leaf and table. Raises UserError
    for a file that is missing, unreadable, not UTF-8 or not TOML."""
    _refuse_data(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(_missing_run(path)) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    text = text.replace("\r\n", "\n")
    try:
        values = tomllib.loads(text)
        found = list(leaves(values))
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(path, text, str(error)) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: {_too_much(error)}") from None
    lines = dict(_lines(text))
    for keys, value in found:
        _refuse_dates(f"{path}:{line_of(lines, keys)}", keys, value)
    return values, lines


def _refuse_dates(where: str, keys: Keys, value: Any) -> None:
    """Raises UserError for a date, which no field is, also in a list."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, date | datetime | time):
            what = "holds" if isinstance(value, list) else "is"
            raise UserError(
                f"{where}: {join_keys(keys)} {what} a date; put it in quotes to mean text"
            )


def _missing_run(path: Path) -> str:
    folder, name = path.parent, shown(path.parent)
    if path.name != "run.toml" or not folder.is_dir():
        beside = folder.glob("*.toml") if folder.is_dir() else ()
        names = {each.stem: shown(each) for each in sorted(beside)}
        near = get_close_matches(path.stem, names, n=1, cutoff=0.8)
        cure = f"did you mean {names[near[0]]}?" if near else "check the path"
        return f"{shown(path)}: no such run file; {cure}"
    if (folder / "config.json").exists():
        return f"{name}: is a model folder, not a run; name it as train.init_from in a run file"
    if lost := lost_run(folder):
        return lost
    above = next((each for each in folder.parents if (each / "run.toml").exists()), None)
    cure = "a run file or the directory of a run" if above is None else shown(above)
    return f"{name}: no such run file (there is no run.toml); give {cure}"


def lost_run(folder: Path) -> str | None:
    """Error for a run directory whose run.toml is lost; None for other folders."""
    if not any((folder / "checkpoints").glob("*/hashes.json")):
        return None
    name = shown(folder)
    return (
        f"{name}: its run.toml is lost; lmwright train RUN.toml dir={shlex.quote(name)}, with the "
        "run file that it was trained from, writes it again"
    )


def _refuse_data(path: Path) -> None:
    """Raises UserError for a file of text or tokens given in place of a run file."""
    try:
        with path.open("rb") as file:
            head = file.read(1 << 12)
    except OSError:
        return
    # of a run file in another encoding, every second byte is 0 too
    binary = b"\0" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff"))
    if binary or DATA_ENDING.search(path.name) or head.startswith(DATA_HEADS):
        raise UserError(
            f"{path}: is a data file; give a run file (TOML, docs/config.md) that names it, as in "
            f'data.sources = [{{ path = "{path}" }}]'
        )


def _syntax_error(path: Path, text: str, message: str) -> UserError:
    position = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", message)
    number = int(position[1]) if position and position[1] else text.count("\n") + 1
    problem = message[: position.start()] if position else message
    problem = problem[:1].lower() + problem[1:]
    cure = SYNTAX_CURES.get(problem, "see https://toml.io")
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        cure = f"run files are TOML, not {path.suffix[1:].upper()}; see docs/config.md"
    if position and not position[1]:
        cure = "a quote or a bracket is not closed"
    return UserError(f"{path}:{number}: not valid TOML, {problem}; {cure}")


def _too_much(error: Exception) -> str:
    """Words for TOML that Python does not read, though it may be valid."""
    if isinstance(error, RecursionError):
        return "lists or tables are nested too deeply; remove some levels"
    return "a number has too many digits; put it in quotes to mean text"


def leaves(values: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yields (keys, value) of everything that is neither a table nor a list of tables. Raises
    RecursionError for tables in more tables than any run has."""
    if len(keys) > DEEPEST:
        raise RecursionError
    if isinstance(values, dict):
        for key, value in values.items():
            yield from leaves(value, (*keys, key))
    elif is_tables(values):
        for index, value in enumerate(values):
            yield from leaves(value, (*keys, index))
    else:
        yield keys, values


def is_tables(value: Any) -> bool:
    """True for a list of tables, whose elements have fields of their own."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def literal(value: Any) -> str:
    """A value as TOML writes it on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()


def line_of(lines: dict[Keys, int], keys: Keys) -> int | None:
    """Line of a value, or of the nearest enclosing table."""
    for end in range(len(keys), 0, -1):
        if keys[:end] in lines:
            return lines[keys[:end]]
    return None


def _lines(text: str) -> Iterator[tuple[Keys, int]]:
    """Yields (keys, line) of every header and leaf of a text that is known to parse."""
    header: Keys = ()
    counts: dict[Keys, int] = {}  # elements of each array of tables so far
    statement, start = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        start = start if statement else number
        statement += line + "\n"
        try:
            values = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue  # a list or a string that goes on
        bare = statement.lstrip()
        if bare.startswith("["):
            header = _enter(values, counts, array=bare.startswith("[["))
            yield header, start
        else:
            yield from ((header + keys, start) for keys, _ in leaves(values))
        statement = ""


def _enter(values: dict[str, Any], counts: dict[Keys, int], *, array: bool) -> Keys:
    """Keys of the table that a header opens, with the index of each array in its path."""
    names: list[str] = []
    inner: Any = values
    while inner and inner != [{}]:
        name, inner = next(iter(inner.items()))
        names.append(name)
    keys: Keys = ()
    for name in names[:-1]:
        keys = _inside((*keys, name), counts)
    keys = (*keys, names[-1])
    if array:
        counts[keys] = counts.get(keys, 0) + 1
    return _inside(keys, counts)


def _inside(keys: Keys, counts: dict[Keys, int]) -> Keys:
    return (*keys, counts[keys] - 1) if keys in counts else keys


def refuse_bytes(where: str, text: str) -> None:
    """Raises UserError for a text of the system's that holds bytes which are not in its encoding,
    or halves of pairs of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding().upper()
        cure = "correct it" if encoding == "UTF-8" else "set PYTHONUTF8=1, or write it in that"
        raise UserError(f"{where}: {text!r} is not {encoding} text; {cure}") from None


def parse_override(text: str) -> tuple[Keys, Any]:
    """Keys and value of an override `a.b=c`; c is TOML, or a string if it is a bare word."""
    name, equals, literal = text.partition("=")
    name, literal = name.strip(), literal.strip()
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", name):
        raise UserError(f"{text!r} is not an override; write section.field=value")
    if len(name) > LONGEST_NAME:
        raise UserError(f"{name[:40]}...: is not a field of a run; write section.field=value")
    refuse_bytes(f"command line: {name}", literal)
    keys = tuple(int(key) if key.isdecimal() else key for key in name.split("."))
    try:
        values = tomllib.loads(f"value = {literal}")
        found = list(leaves(values.get("value"), keys))
    except tomllib.TOMLDecodeError as error:
        if literal[:1] in ("[", "{", '"', "'"):
            raise UserError(
                f"{text!r}: the value is not valid TOML; lists are ['a', 'b'], tables are "
                f"{{key = 'a'}}, and the shell needs quotes around the whole"
            ) from error
        return keys, literal
    except (ValueError, RecursionError) as error:
        raise UserError(f"command line: {name}: {_too_much(error)}") from None
    value = values["value"]
    if len(values) > 1 or isinstance(value, date | datetime | time):
        return keys, literal  # a text that only looks like more TOML, or a date
    for inside, each in found:
        _refuse_dates("command line", inside, each)
    return keys, value
