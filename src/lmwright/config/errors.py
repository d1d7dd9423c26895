"""Pydantic's errors as the sentence that a user needs: place, cause and cure."""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from lmwright.config.elsewhere import CALLED, ELSEWHERE, NOT_SET
from lmwright.config.merge import COMMAND_LINE
from lmwright.config.text import Keys, join_keys
from lmwright.errors import UserError

EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "dataclass_type": "a table",
    "model_attributes_type": "a table",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "too_short": "at least {min_length} elements",
    "too_long": "at most {max_length} elements",
    "string_too_short": "text of at least {min_length} characters",
}

EXAMPLES = {
    "name": 'name = "my-run"',
    "dir": 'dir = "runs/my-run"',
    "model": '[model] with preset = "llama-5m"',
    "objective": '[objective] with kind = "clm"',
    "objective.labels": 'labels = ["negative", "positive"]',
    "objective.multilabel.labels": 'labels = ["anger", "joy", "fear"]',
    "objective.tag.labels": 'labels = ["O", "B-PER", "I-PER"]',
    "optim": '[optim] with kind = "adamw" and learning_rate = 3e-4',
    "optim.learning_rate": "learning_rate = 3e-4",
    "data": '[data] with dir = "data"',
    "data.dir": 'dir = "data"',
    "data.sources.path": 'path = "texts/*.jsonl"',
    "train": "[train] with steps = 1000 and global_batch_size = 32",
    "train.steps": "steps = 1000",
    "train.global_batch_size": "global_batch_size = 32",
}
MODEL_EXAMPLE = 'preset = "llama-5m"'

UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
UNTAGGED = ("union_tag_invalid", "union_tag_not_found")

Errors = Sequence[dict[str, Any]]
T = TypeVar("T")


LIST_PRESETS = "lmwright config presets"  # the command that lists them
MOST_NAMES = 30  # in a sentence


def nearest(word: str, names: Sequence[str], *, what: str, listed_by: str = "") -> str:
    """Suggestion for a misspelled word: the sizes of a family, the nearest name, all names, or, if
    those are many, the command that lists them."""
    released = {name.replace(".", "-"): name for name in names}.values()  # of two spellings
    sizes = [name for name in released if name.startswith(f"{word}-")]
    if 1 < len(sizes) <= MOST_NAMES:
        return f"did you mean one of {', '.join(sizes)}?"
    if near := _near(word, names):
        return f"did you mean {near[0]!r}?"
    if listed_by and len(names) > MOST_NAMES:
        return f"`{listed_by}` lists all"
    return f"{what}: {', '.join(names)}"


def _near(word: str, names: Sequence[str]) -> list[str]:
    """Name that was probably meant, if any: another tool's name for it, else one that differs by a
    letter or two, else a longer one that contains the whole word, as `ema_decay` for `ema`, or
    begins with it, as `temperature` for `temp`, else the most similar one."""
    meant = CALLED.get(word, "").rpartition(".")[2]
    if meant in names and meant != "kind":  # which most sections have
        return [meant]
    close = get_close_matches(word, names, n=1, cutoff=0.8)
    longer = [name for name in names if len(word) > 2 and word in name.split("_")]
    longer += [name for name in names if len(word) > 2 and name.startswith(word)]
    return (close or longer or get_close_matches(word, names, n=1, cutoff=0.6))[:1]


def explain(
    errors: Errors,
    values: dict[str, Any],
    where: Callable[[Keys], str],
    fields: Callable[[Keys], Sequence[str]],
    emptied: Mapping[Keys, Mapping[Keys, Any]],
) -> UserError:
    """All errors as one UserError, a line each, the most helpful one first.

    `where(keys)` says who gave a value, `fields(keys)` what a section may hold, `emptied` what
    sections held before another kind was chosen on the command line.
    """
    by_path: dict[Keys, list[dict[str, Any]]] = {}
    for error in errors:
        by_path.setdefault(_keys(error, values), []).append(error)
    by_path = _without_echoes(by_path, fields)
    lines = [
        _sentence(keys, by_path[keys], where, fields, emptied)
        for keys in sorted(by_path, key=lambda keys: _rank(by_path[keys]))
    ]
    return join(lines)


def problems(checks: Iterable[Callable[[T], Any]], checked: T) -> list[str]:
    """The messages of those checks of a value that raise UserError."""
    lines = []
    for check in checks:
        try:
            check(checked)
        except UserError as error:
            lines.append(str(error))
    return lines


def join(lines: Sequence[str]) -> UserError:
    """A UserError of one line, or of several with their number."""
    if len(lines) == 1:
        return UserError(lines[0])
    return UserError("\n  ".join((f"{len(lines)} errors in the run:", *lines)))


def _without_echoes(
    by_path: dict[Keys, list[dict[str, Any]]], fields: Callable[[Keys], Sequence[str]]
) -> dict[Keys, list[dict[str, Any]]]:
    """Errors without the missing fields that are present under a misspelled name, and without
    those of a table that may also be a number, where a field in it is wrong."""
    meant = {
        (*keys[:-1], name)
        for keys, errors in by_path.items()
        if keys and errors[0]["type"] in UNKNOWN
        for name in _near(str(keys[-1]), fields(keys[:-1]))
    }
    meant |= {
        tuple(CALLED[str(keys[-1])].split("."))
        for keys, errors in by_path.items()
        if errors[0]["type"] in UNKNOWN and str(keys[-1]) in CALLED
    }
    tables = {keys[:end] for keys in by_path for end in range(1, len(keys))}
    return {
        keys: errors
        for keys, errors in by_path.items()
        if keys not in meant or errors[0]["type"] not in MISSING
        if keys not in tables or not isinstance(errors[0]["input"], dict)
    }


def _sentence(
    keys: Keys,
    errors: Errors,
    where: Callable[[Keys], str],
    fields: Callable[[Keys], Sequence[str]],
    emptied: Mapping[Keys, Mapping[Keys, Any]],
) -> str:
    kind = errors[0]["type"]
    if kind in UNKNOWN:  # also a `kind`, where there are none
        return _unknown(keys, where, fields)
    if kind in UNTAGGED or keys[-1:] == ("kind",):
        return _kind(keys, errors[0], where, fields, emptied)
    if kind in MISSING:
        return _missing(keys, errors[0], where, emptied.get(keys[:-1]))
    return _wrong(keys, errors, where)


def _rank(errors: Errors) -> int:
    kind = errors[0]["type"]
    if kind in UNTAGGED or (errors[0]["loc"] or ("",))[-1] == "kind":
        return -1  # decides what the other fields of its section are
    return 0 if kind in UNKNOWN else 2 if kind in MISSING else 1


def _keys(error: dict[str, Any], values: Any) -> Keys:
    """Path of an error in the run file, without the tags that pydantic adds for unions."""
    loc = error["loc"]
    keys: Keys = ()
    for place, key in enumerate(loc):
        last = place == len(loc) - 1
        if isinstance(values, dict):
            tag = values.get("kind") == key and not last
            if not tag and (key in values or (last and error["type"] in MISSING)):
                keys, values = (*keys, key), values.get(key)
        elif isinstance(values, list) and isinstance(key, int):
            keys, values = (*keys, key), values[key] if key < len(values) else None
    return keys


def _unknown(keys: Keys, where: Callable[[Keys], str], fields: Callable) -> str:
    name, names = str(keys[-1]), fields(keys[:-1])
    cure = NOT_SET.get(name) or _elsewhere(name, keys[:-1], names, fields)
    cure = cure or nearest(name, names, what="the fields here are")
    return f"{where(keys)}: {join_keys(keys)} is not a field; {cure}"


def _elsewhere(name: str, table: Keys, names: Sequence[str], fields: Callable) -> str | None:
    """Suggestion of a field of another section, by its own name or that of other tools; None where
    this section, with the fields `names`, has it, or where several may be meant."""
    meant = CALLED.get(name, name)
    last = meant.rpartition(".")[2]
    if name == "kind" or (last in names and last != "kind"):
        return None
    inside = [meant]
    if name not in CALLED:
        inside = [f"{section}.{name}" for section in fields(()) if name in fields((section,))]
    if not inside or (len(inside) > 1 and table):
        return None
    return f"did you mean {' or '.join(inside)}?"


def _missing(
    keys: Keys,
    error: dict[str, Any],
    where: Callable[[Keys], str],
    before: Mapping[Keys, Any] | None,
) -> str:
    loc = error["loc"]
    section = join_keys([key for key in keys[:-1] if isinstance(key, str)])
    if section == "model" and len(loc) > 2 and loc[1] != "llama":
        return (
            f"{where(keys[:-1])}: {join_keys(keys)} is missing; set it, or a preset of a {loc[1]} "
            "model, if `lmwright models` lists one"
        )
    name = f"{section}.{keys[-1]}" if section else str(keys[-1])
    fallback = f"{keys[-1]} = 100"
    if section == "model":
        fallback = _of_heads(str(keys[-1]), error["input"]) or MODEL_EXAMPLE
    inside = f" in [{section}]" if section else ""
    of_kind = ".".join(map(str, loc))  # which has the kind of the section
    example = EXAMPLES.get(of_kind, EXAMPLES.get(name, fallback))
    if before is not None:
        held = repr(before.get(keys))  # one that is long would be shortened here
        usable = keys in before and _toml(before[keys]) == held
        setting = f"{keys[-1]}={held}" if usable else example.replace(" = ", "=", 1)
        return (
            f"{COMMAND_LINE}: {name} is missing, since another {section}.kind on the command line "
            f"leaves nothing of [{section}]; add {shlex.quote(f'{section}.{setting}')} there"
        )
    return f"{where(keys[:-1])}: {join_keys(keys)} is missing; add for example {example}{inside}"


def _of_heads(name: str, sizes: Any) -> str:
    """A size of the attention as it mostly follows from those that are set, which a preset's would
    not fit; empty for other sizes."""
    heads, width = (sizes.get(key) for key in ("num_heads", "embed_dim"))
    if type(heads) is not int or heads < 1 or type(width) is not int:
        return ""
    follows = {"num_kv_heads": heads, "head_dim": 64 if width % (2 * heads) else width // heads}
    return f"{name} = {follows[name]}" if name in follows else ""


def _kind(
    keys: Keys,
    error: dict[str, Any],
    where: Callable[[Keys], str],
    fields: Callable,
    emptied: Mapping[Keys, Mapping[Keys, Any]],
) -> str:
    table = keys[:-1] if keys[-1:] == ("kind",) else keys
    name = join_keys((*table, "kind"))
    kinds = fields((*table, "kind"))
    if error["type"] in ("union_tag_not_found", *MISSING):
        for section, before in emptied.items():
            if (*table, "kind") in before:  # which another kind of the section has left out
                above, setting = join_keys(section), f"{name}={before[(*table, 'kind')]}"
                return (
                    f"{COMMAND_LINE}: {name} is missing, since another {above}.kind on the command "
                    f"line leaves nothing of [{above}]; add {shlex.quote(setting)} there"
                )
        choices = " or ".join(f'"{kind}"' for kind in kinds)
        return f"{where(table)}: {name} is missing; add kind = {choices} in [{join_keys(table)}]"
    given = error.get("ctx", {}).get("tag", error.get("input"))
    cure = nearest_kind(given, kinds)
    if (elsewhere := ELSEWHERE.get((name, str(given)))) in kinds:
        cure = f"what others call {given!r} is {elsewhere!r} here; `{LIST_PRESETS}` lists its sizes"
    return f"{where((*table, 'kind'))}: {name}: no kind {given!r}; {cure}"


def nearest_kind(given: Any, kinds: Sequence[str]) -> str:
    """All kinds, with the nearest first if one is near."""
    close = get_close_matches(str(given), kinds, n=1)
    listed = f"the kinds are {', '.join(kinds)}"
    return f"did you mean {close[0]!r}? {listed}" if close else listed


def _wrong(keys: Keys, errors: Errors, where: Callable[[Keys], str]) -> str:
    error = errors[0]
    given = error["input"]
    # A union reports every branch; the branch of the given type tells most.
    ranged = [e for e in errors if e["type"].startswith(("greater", "less", "too", "finite"))]
    expected = " or ".join(dict.fromkeys(map(_describe_expected, ranged or errors)))
    cure = ""
    if isinstance(given, str):
        choices = [c for e in errors for c in _find_quoted(e.get("ctx", {}).get("expected", ""))]
        close = get_close_matches(given, choices, n=1)
        cure = f"; did you mean {close[0]!r}?" if close else ""
        if (elsewhere := ELSEWHERE.get((join_keys(keys), given))) in choices:
            cure = f"; what others call {given!r} is {elsewhere!r} here"
        if not choices and re.fullmatch(r"[-+.\deE_]+", given):
            cure = "; write the number without quotes"
    elif error["type"] == "string_type" and not isinstance(given, list | dict):
        cure = f"""; write '"{_toml(given)}"' to mean the text"""
    return f"{where(keys)}: {join_keys(keys)} must be {expected}, not {_toml(given)}{cure}"


def _describe_expected(error: dict[str, Any]) -> str:
    template = EXPECTED.get(error["type"])
    if template is None:
        return f"valid ({error['msg']})"
    context = error.get("ctx", {})
    if error["type"] == "literal_error":
        choices = _find_quoted(context["expected"])
        return f"one of {', '.join(choices)}" if len(choices) > 1 else repr(choices[0])
    return template.format(**context)


def _find_quoted(text: str) -> list[str]:
    return re.findall(r"'([^']*)'", text)


def _toml(value: Any) -> str:
    """A value as the user wrote it, shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
