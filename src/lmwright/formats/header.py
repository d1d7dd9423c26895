"""What model lies at a place, by its header alone: no weights are read, nor fetched from a hub
but within a GGUF file."""

import re
from pathlib import Path
from typing import Any

from lmwright.errors import UserError
from lmwright.formats.hf_read import model_from_config, read_config
from lmwright.formats.hub import fetch, is_hub_name
from lmwright.formats.places import usable
from lmwright.formats.safetensors import PICKLES, refuse_pickles

HUB_LIKE = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def model_at(name: str) -> Any:
    """The model of a Hugging Face folder, a .gguf file or a hub name. Raises UserError where
    there is none that lmwright computes."""
    path = usable(name)
    if is_hub_name(name):
        path, _ = fetch(name, only=["config.json"])
    elif "://" in name:
        raise UserError(f"{name}: is no place that models are read from; write hf://owner/name")
    if path.suffix == ".gguf":
        from lmwright.formats.gguf_read import open_gguf

        return open_gguf(path)[1]
    if not (path / "config.json").exists():
        raise no_model(path)
    return model_from_config(read_config(path), str(path / "config.json"))


def no_model(path: Path) -> UserError:
    """Why a place is none that a model is read from, and what to do."""
    if path.is_file() and any(path.match(pattern) for pattern in PICKLES):
        return UserError(
            f"{path}: is pickled, so opening it would run code, and is never read here; get the "
            f"safetensors version, or convert it in a sandbox with transformers"
        )
    what = "is not there"
    if path.is_dir():
        refuse_pickles(path)
        what = "holds neither run.toml nor config.json"
    elif path.suffix == ".safetensors":
        what = "is weights alone, without the config.json that says what they mean"
    elif path.exists():
        what = "is not a folder"
    kinds = "a run directory, a Hugging Face model folder, a .gguf file or hf://owner/name"
    if what == "is not there" and HUB_LIKE.fullmatch(str(path)):
        hub = f"for a model from the hub, write hf://{path}"
        if "/" not in str(path):
            hub = f"a model from the hub is named with its owner, as in hf://owner/{path}"
        return UserError(f"{path}: {what}; {hub}; otherwise give {kinds}")
    return UserError(f"{path}: {what}; give {kinds}")
