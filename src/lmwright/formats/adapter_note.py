"""lmwright.json: what an exported adapter's base was, which PEFT's config has no place for."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes

from lmwright.data.json_text import parse_json, write_json
from lmwright.errors import UserError
from lmwright.formats.tensor_hash import weights_hash
from lmwright.program.trainee import Frozen

NOTE = "lmwright.json"
EARLIER_NOTE = "podsmith.json"  # written before the project was renamed
ANSWERS = ("window_tokens", "window_overlap", "max_answer_tokens", "no_answer")
ROUNDED = "base_hash_bf16"  # the same of a base that was exported in bfloat16


def write_note(folder: Path, base: Frozen, storage: str, **facts: Any) -> None:
    """Writes the note beside an adapter that was trained on this base, stored as `storage`; `facts`
    are what else PEFT does not record."""
    note = {"base": base.path, "base_hash": base.hash, "base_storage": storage, **facts}
    if base.read is not None:
        note[ROUNDED] = weights_hash(base.read(), ml_dtypes.bfloat16)
    write_json(folder / NOTE, note)


def read_note(folder: Path) -> dict[str, Any]:
    """The note of an adapter; empty where it has none. Raises UserError for a damaged one."""
    path = _note(folder)
    try:
        note = parse_json(path)
        _ = {note[name] for name in ("base_hash", ROUNDED) if name in note}
        words = all(isinstance(note.get(name, ""), str) for name in ("pooling", "length"))
        if not isinstance(note.get("labels", []), list) or not words:
            raise ValueError("its labels, pooling or length are damaged")
        if "answers" in note and not (
            set(note["answers"]) == set(ANSWERS)
            and all(type(note["answers"][name]) is int for name in ANSWERS[:3])
        ):
            raise ValueError("its answers are damaged")
        return note
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); export it again") from None


def _note(folder: Path) -> Path:
    path = folder / NOTE
    return path if path.exists() else folder / EARLIER_NOTE


def refuse_other_base(adapter: Path, base: str | Path, hashes: Iterable[str], cure: str) -> None:
    """Raises UserError if lmwright wrote the adapter and its base had other weights than this one,
    whose hashes are these; they are computed one after the other."""
    note = read_note(adapter)
    if ROUNDED not in note:  # a base made from a seed has no files to compare with
        return
    known = {note[name] for name in ("base_hash", ROUNDED) if name in note}
    if known.isdisjoint(hashes):
        raise UserError(
            f"{adapter}: was trained on {note.get('base')}, and the weights of {base} differ; "
            f"{cure}, or remove {_note(adapter)} to continue anyway"
        )
