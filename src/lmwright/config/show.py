"""A resolved run as text: a run file with the origin of each value."""

from itertools import chain
from typing import Any

from lmwright.config.fields import to_plain
from lmwright.config.merge import DEFAULT, Provenance
from lmwright.config.run import Run
from lmwright.config.text import Keys, is_tables, join_keys, literal
from lmwright.guard.redact import redact_tree

Lines = list[tuple[str, str]]  # of a table, with the origin of each


def show(run: Run, provenance: Provenance, *, defaults: bool = False) -> str:
    """The run as a run file with the origin of each value; those that nothing sets are counted,
    unless `defaults` asks for them."""
    blocks: list[Lines] = []
    _blocks(to_plain(run), (), provenance, blocks)
    lines = list(chain.from_iterable(blocks))
    left_out = 0 if defaults else sum(origin == DEFAULT for _, origin in lines)
    if not defaults:
        blocks = list(filter(None, map(_set_lines, blocks)))
        lines = list(chain.from_iterable(blocks))
    width = min(max(len(text) for text, origin in lines if origin), 60)
    shown = "\n\n".join(_aligned(block, width) for block in blocks)
    return f"{shown}\n\n# {left_out} more have their defaults: --all" if left_out else shown


def _aligned(block: Lines, width: int) -> str:
    """The text of a table, with the origins in one column."""
    return "\n".join(f"{text:<{width}}  # {origin}" if origin else text for text, origin in block)


def _set_lines(block: Lines) -> Lines:
    """The lines of a table that something sets, with its header and kind; none if nothing does."""
    if all(origin in ("", DEFAULT) for _, origin in block):
        return []
    return [
        (text, origin) for text, origin in block if origin != DEFAULT or text.startswith("kind = ")
    ]


def _blocks(table: dict[str, Any], keys: Keys, provenance: Provenance, blocks: list[Lines]) -> None:
    """Appends one block per table, with its scalars first as TOML requires."""
    inner = {k: v for k, v in table.items() if isinstance(v, dict) or is_tables(v)}
    names = tuple(key for key in keys if isinstance(key, str))
    header = (
        f"[[{join_keys(names)}]]" if keys and isinstance(keys[-1], int) else f"[{join_keys(names)}]"
    )
    block = [(header, "")] if keys else []
    for key, value in table.items():
        if key not in inner:
            block.append((f"{key} = {literal(redact_tree(value))}", provenance[(*keys, key)]))
    if len(block) > bool(keys) or not inner:
        blocks.append(block)
    for key, value in inner.items():
        for place, element in enumerate(value) if is_tables(value) else ((None, value),):
            path = (*keys, key) if place is None else (*keys, key, place)
            _blocks(element, path, provenance, blocks)
