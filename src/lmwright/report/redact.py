"""Takes credentials out of what is written down: env.json, trackers, report.html."""

import re
from collections.abc import Mapping
from typing import Any

SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "AUTH", "COOKIE")

_URL_USER = re.compile(r"(?<=://)[^/\s@?#]+@")
_URL_QUERY = re.compile(r"(://[^\s?#\"']+\?)[^\s#\"']+")


def redact(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables without those named like a secret; URLs in the rest are cleaned."""
    return {
        name: redact_text(value)
        for name, value in variables.items()
        if not any(word in name.upper() for word in SECRET_WORDS)
    }


def redact_text(text: str) -> str:
    """`https://user:pass@host/x?sig=1` becomes `https://***@host/x?***` (signed URLs)."""
    return _URL_QUERY.sub(r"\1***", _URL_USER.sub("***@", text))


def redact_tree(tree: Any) -> Any:
    """`redact_text` on every string of nested dicts and lists; other leaves are untouched."""
    if isinstance(tree, Mapping):
        return {key: redact_tree(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [redact_tree(value) for value in tree]
    return redact_text(tree) if isinstance(tree, str) else tree
