"""A Hugging Face model folder read: config.json to a model, safetensors to weights."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from podsmith.checkpoint.safetensors import TensorFiles
from podsmith.checkpoint.stream import from_hf
from podsmith.checkpoint.tokenizer_files import has_tokenizer
from podsmith.core.param import Tree
from podsmith.errors import UserError
from podsmith.models import KINDS
from podsmith.models.validate import validated


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises UserError where there is none or it is not one."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: missing; point at a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); download it again") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: is not a JSON object; download it again")
    return config


def model_from_config(config: dict[str, Any], where: str) -> Any:
    """The model that a config.json describes, by its architecture. Raises UserError for an
    architecture or a feature that podsmith does not compute."""
    architecture = (config.get("architectures") or ["?"])[0]
    known = {name: kind for kind in KINDS.values() for name in kind.hf.architectures}
    if architecture not in known:
        close = get_close_matches(architecture, known, n=2, cutoff=0.7)
        near = f"the nearest: {' and '.join(close)}; " if close else ""
        raise UserError(
            f"{where}: architecture {architecture!r} is not supported; {near}these are: "
            f"{', '.join(known)}"
        )
    if config.get("quantization_config"):
        raise UserError(
            f"{where}: quantization_config is set; start from the unquantized model instead"
        )
    kind = known[architecture]
    try:
        fields = kind.hf.fields(config, where)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{where}: a value has the wrong type ({error}); take config.json from the source again"
        ) from None
    return validated(kind, fields, f"{where}: ")


def import_hf(
    folder: str | Path, *, dtype: Any = None, shardings: Tree | None = None
) -> tuple[Any, Tree, Path | None]:
    """(model, weights, folder of the tokenizer or None) of an HF folder; `dtype` and
    `shardings` as in `from_hf`, which fills each leaf in place.

    Raises UserError in one sentence for whatever keeps it from being exactly this model.
    """
    folder = Path(folder)
    model = model_from_config(read_config(folder), str(folder / "config.json"))
    w = from_hf(model, TensorFiles(folder), str(folder), dtype=dtype, shardings=shardings)
    return model, w, folder if has_tokenizer(folder) else None
