"""Check of files that lmwright wrote before they are used: tensors against the hash in
convert.json, since neither safetensors nor GGUF has checksums of its own."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lmwright.core.contract import HfModel
from lmwright.data.json_text import parse_json
from lmwright.errors import UserError
from lmwright.formats.compressed import ENDINGS
from lmwright.formats.gguf_write import names_in_file
from lmwright.formats.hf_layout import slots
from lmwright.formats.safetensors import TensorFiles
from lmwright.formats.stacked_experts import in_files, stacked_name
from lmwright.formats.tensor_hash import CONVERT, hash_tensors


def refuse_changed(model: HfModel, tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Raises UserError where convert.json lies with a model and says that other tensors were
    written. Models without it are not looked at."""
    is_file = path.is_file()
    note = path.with_name(f"{path.name}.{CONVERT}") if is_file else path / CONVERT
    if getattr(tensors, "computed", False) or not note.exists():
        return
    try:
        record = parse_json(note)
        expected = record["accounting"]["xxh3"] if "lmwright" in record else None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{note}: cannot be read ({error!r:.200}); export again, or remove it to continue "
            "without checking the weights"
        ) from None
    if is_file:
        names = names_in_file(model, tensors)
    else:
        tensors = TensorFiles(path)  # as they are stored
        names = _names_in_folder(model, tensors)
    if expected is not None and hash_tensors(tensors, names) != expected:
        raise UserError(
            f"{path}: its weights differ from those recorded in {note.name}; export or copy it "
            "again, or remove that file if you changed them"
        )


def _names_in_folder(model: HfModel, files: TensorFiles) -> list[str]:
    """Names of the tensors of a folder, in the order of its hash; a packed weight has several."""
    ends = ("", *(f"_{end}" for end in ENDINGS))
    names = [slot.name + end for slot in slots(model) for end in ends]
    # experts stand under a name each or in a few tensors, as the family's files have them
    whole = dict.fromkeys(
        name if name in files else in_files(stacked_name(name) or name, model.hf.stacked_names)
        for name in names
    )
    return [name for name in whole if name in files]
