"""What model lies at a place, by its header alone: no weights are read, nor fetched from a hub
but within a GGUF file."""

from pathlib import Path
from typing import Any

from podsmith.checkpoint.hub import fetch, is_hub_name
from podsmith.checkpoint.reader import model_from_config, read_config
from podsmith.errors import UserError


def model_at(name: str) -> Any:
    """The model of a Hugging Face folder, a .gguf file or a hub name. Raises UserError where
    there is none that podsmith computes."""
    path = Path(name)
    if is_hub_name(name):
        path, _ = fetch(name, only=["config.json"])
    elif "://" in name:
        raise UserError(f"{name}: is no place that models are read from; write hf://owner/name")
    if path.suffix == ".gguf":
        from podsmith.checkpoint.gguf_read import open_gguf

        return open_gguf(path)[1]
    return model_from_config(read_config(path), str(path / "config.json"))
