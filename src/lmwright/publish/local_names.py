"""Names of folders on this machine, taken out of what is sent.

config.json "_name_or_path": "/srv/base"          --> left out
README.md   "base_model:adapter:/srv/base"        --> base_model:adapter:owner/name, or left out
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lmwright.data.json_text import parse_json, write_json

KEYS = {
    "config.json": ("_name_or_path",),
    "tokenizer_config.json": ("name_or_path", "special_tokens_map_file", "tokenizer_file"),
}
"""Files of transformers, and keys of them that say where something lay."""
TAG = "base_model:"


def is_local(name: Any) -> bool:
    """True for a folder's name where one of the hub may stand."""
    if not isinstance(name, str) or not name:
        return False
    return not name[0].isalnum() or "\\" in name or name.count("/") > 1 or os.path.exists(name)


def names_of(base_model: Any) -> list[str]:
    """Names in a card's `base_model`: one name, a list of names or nothing."""
    if isinstance(base_model, str):
        return [base_model]
    return [name for name in base_model or () if name]


def drop_from_configs(folder: Path) -> None:
    """Takes names of local folders out of a folder's config.json and tokenizer_config.json. A link
    to the user's own file becomes a changed copy."""
    for name, keys in KEYS.items():
        for path in folder.rglob(name):
            try:
                fields = parse_json(path)
            except (OSError, ValueError):  # of a program that calls its file so, too
                continue
            kept = _without(fields, lambda key, value: key in keys and is_local(value))  # noqa: B023
            if kept != fields:
                path.unlink()
                write_json(path, kept, ascii_only=False)


def _without(value: Any, drops: Callable[[str, Any], bool]) -> Any:
    if isinstance(value, list):
        return [_without(each, drops) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _without(each, drops) for key, each in value.items() if not drops(key, each)}


def drop_from_card(card: Any, bases: Sequence[str]) -> None:
    """Puts the names of the base models on the hub in place of local ones, in the metadata and the
    text of the client's card. Without any, they are left out of the metadata, and the text has the
    folder's last name."""
    data, named = card.data, names_of(card.data.get("base_model"))
    local = list(filter(is_local, named))
    tags, new_tags = data.get("tags"), []
    for tag in tags if isinstance(tags, list) else ():
        relation, colon, name = str(tag).removeprefix(TAG).rpartition(":")
        if not str(tag).startswith(TAG) or not is_local(name):
            new_tags.append(tag)
            continue
        local.append(name)
        new_tags += [f"{TAG}{relation}{colon}{base}" for base in bases]
    if new_tags != (tags or []):
        data["tags"] = list(dict.fromkeys(new_tags))
    if any(map(is_local, named)):
        left = list(bases) or [name for name in named if not is_local(name)]
        data.pop("base_model")
        if left:
            data["base_model"] = left if left[1:] else left[0]
    for name in sorted(filter(os.path.isabs, local), key=len, reverse=True):
        instead = bases[0] if bases else Path(name).name
        pattern = rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)"
        card.text = re.sub(pattern, lambda _: instead, card.text)  # noqa: B023
