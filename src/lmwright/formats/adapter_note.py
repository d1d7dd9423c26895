"""lmwright.json: what an exported adapter's base was, which PEFT's config has no place for."""

import json
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes

from lmwright.data.json_text import parse_json
from lmwright.errors import UserError
from lmwright.formats.tensor_hash import weights_hash
from lmwright.program.trainee import Frozen

NOTE = "lmwright.json"
EARLIER_NOTE = "podsmith.json"  # written before the project was renamed
ROUNDED = "base_hash_bf16"  # the same of a base that was exported in bfloat16


def write_note(folder: Path, base: Frozen, storage: str) -> None:
    """Beside an adapter that was trained on this base, kept as `storage`."""
    said = {"base": base.path, "base_hash": base.hash, "base_storage": storage}
    if base.read is not None:
        said[ROUNDED] = weights_hash(base.read(), ml_dtypes.bfloat16)
    (folder / NOTE).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def refuse_other_base(adapter: Path, base: str | Path, hashes: Iterable[str], cure: str) -> None:
    """Raises UserError where lmwright wrote the adapter and says that its base was another than
    this one, whose weights have these hashes; they are asked for one after the other."""
    note = adapter / NOTE
    if not note.exists():
        note = adapter / EARLIER_NOTE
    try:
        said = parse_json(note)
        known = {said[name] for name in ("base_hash", ROUNDED) if name in said}
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{note}: cannot be read ({error}); export it again") from None
    if ROUNDED not in said:  # a base made from a seed has no files to compare with
        return
    if not any(found in known for found in hashes):
        raise UserError(
            f"{adapter}: was trained on {said.get('base')}, and the weights of {base} differ; "
            f"{cure}, or remove {note} to continue anyway"
        )
