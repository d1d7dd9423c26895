"""The table of families, read off the registry: `podsmith models` prints it."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from podsmith import presets
from podsmith.models import KINDS

HEADER = ("`model.kind`", "in Hugging Face", "can have", "presets")
FEATURES = {
    "bias": "biases",
    "qk_norm": "norms of q and k",
    "window": "windows",
    "layer_pattern": "patterns of local and global layers",
    "rope_scaling": "scaled rotations",
    "rotary_fraction": "partial rotation",
    "local_rope_theta": "two thetas",
    "attention_soft_cap": "soft caps",
    "experts": "experts",
    "dense_layers": "plain layers among them",
}
"""What a family can have, by the field that says so."""


def table_rows() -> Iterator[tuple[str, str, str, str]]:
    """A row of Markdown cells for each kind, in the order of the registry."""
    named = presets.of_section("model")
    by_kind: dict[str, list[str]] = {}
    for name, preset in _longest_known(named).items():
        by_kind.setdefault(preset().kind, []).append(name)
    for kind, family in KINDS.items():
        has = {field.name for field in fields(family)}
        architectures = [f"`{name}`" for name in family.hf.architectures]
        features = [text for name, text in FEATURES.items() if name in has]
        names = [f"`{name}`" for name in by_kind.get(kind, ())]
        yield f"`{kind}`", ", ".join(architectures), ", ".join(features), ", ".join(names)


def _longest_known(named: dict[str, Any]) -> dict[str, Any]:
    """Presets once each, under the name that is spelled as their makers do where there is one."""
    last = {id(preset): name for name, preset in named.items() if len(name) > len("600b")}
    return {name: preset for name, preset in named.items() if last.get(id(preset)) == name}


def models_table() -> str:
    """The families as a Markdown table."""
    rows = [HEADER, ("---",) * len(HEADER), *table_rows()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def models_command() -> None:
    """Prints the families, the architectures they read and write, and their presets."""
    print(models_table())
