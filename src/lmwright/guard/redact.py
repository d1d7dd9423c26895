"""Removes credentials from environment variables and trees of settings (`guard.urls`)."""

from collections.abc import Callable, Mapping
from typing import Any

from lmwright.guard.urls import redact_text

SECRET_WORDS = (
    *("TOKEN", "KEY", "SECRET", "PASS", "_PWD", "CREDENTIAL", "AUTH", "COOKIE"),
    "SESSION",
)


def redact(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables without those whose name marks a secret; URLs in the rest are
    redacted."""
    return {
        name: redact_text(value)
        for name, value in variables.items()
        if not any(word in name.upper() for word in SECRET_WORDS)
    }


def redact_tree(tree: Any, clean: Callable[[str], str] = redact_text) -> Any:
    """Nested dicts and lists with `clean` applied to every string; other leaves are unchanged."""
    if isinstance(tree, Mapping):
        return {key: redact_tree(value, clean) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [redact_tree(value, clean) for value in tree]
    return clean(tree) if isinstance(tree, str) else tree
