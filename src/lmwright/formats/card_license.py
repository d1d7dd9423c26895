"""The license of weights that are made from others', as the card of those says it."""

import re
from pathlib import Path

CARD = "README.md"
MOST_CHARS = 64_000  # of a card that are looked at
KEYS = ("license", "license_name", "license_link")
CARRIED = "which goes with its weights."
_BLOCK = re.compile(r"\A---\s*\n(.*?\n)---\s*$", re.S | re.M)
_LINE = re.compile(rf"^({'|'.join(KEYS)}):[ \t]*(['\"]?)([^'\"\n]+?)\2[ \t]*$", re.M)


def license_of(folder: Path) -> dict[str, str]:
    """The keys of a card's metadata that state a license, with their values; empty if there is no
    card or it states none."""
    try:
        with open(folder / CARD, encoding="utf-8", errors="replace") as file:
            text = file.read(MOST_CHARS)
    except OSError:
        return {}
    block = _BLOCK.search(text)
    return {key: value for key, _, value in _LINE.findall(block[1])} if block else {}


def carried_text(license: dict[str, str]) -> str:
    """A sentence for the card of what is made from weights under a license."""
    name = license.get("license_name") or license.get("license", "unknown")
    link = license.get("license_link", "")
    name = f"[{name}]({link})" if link.startswith("https://") else name
    return f"License: {name}, of the model that this one was made from, {CARRIED}"
