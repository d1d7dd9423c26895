"""The table of families, read off the registry: `lmwright models` prints it."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from lmwright import presets
from lmwright.models import KINDS
from lmwright.models.hf import TABLES
from lmwright.models.text_part import TEXT_PARTS

HEADER = ("`model.kind`", "in Hugging Face", "its fields choose", "presets")
FEATURES = {
    "bias": "biases",
    "biases": "biases",
    "qk_norm": "norms of q and k",
    "window": "windows",
    "layer_pattern": "patterns of local and global layers",
    "rope_scaling": "scaled rotations",
    "rotary_fraction": "partial rotation",
    "rope_pattern": "layers without rotation",
    "mixer_pattern": "patterns of layers with and without attention",
    "local_rope_theta": "two thetas",
    "residual": "parallel or sequential branches",
    "position_buckets": "rows of distances",
    "first_position": "rows of positions",
    "layer_input_dim": "inputs of each layer",
    "num_shared_layers": "keys and values of other layers",
    "periodic_fraction": "waves of the stream",
    "key_dim": "memories in place of attention",
    "block_pattern": "memories and cells in place of attention",
    "attention_soft_cap": "soft caps",
    "embedding_multiplier": "multipliers",
    "logits_multiplier": "multipliers",
    "experts": "experts",
    "reasoning": "reasoning layers",
    "dense_layers": "plain layers among them",
}
"""Features that a family can have, by the field that says so."""


def table_rows() -> Iterator[tuple[str, str, str, str]]:
    """A row of Markdown cells for each kind, in the order of the registry."""
    names: dict[Any, list[str]] = {}
    for name, preset in presets.of_section("model").items():
        names.setdefault(preset, []).append(name)
    by_kind: dict[str, list[str]] = {}
    for preset, spelled in names.items():
        # the name that its makers use has a dot, or is the longer one
        best = max(spelled, key=lambda name: ("." in name, len(name)))
        by_kind.setdefault(preset().kind, []).append(f"`{best}`")
    written = {*TABLES}
    for kind, family in KINDS.items():
        has = {field.name for field in fields(family)}
        own = family.hf.architectures if kind in written else ()
        architectures = [f"`{name}`" for name in own]
        architectures += [
            f"the text of `{whole}`"
            for whole, part in TEXT_PARTS.items()
            if {*part.architectures} & {*own}
        ]
        features = [text for name, text in FEATURES.items() if name in has]
        cells = (architectures, features, by_kind.get(kind, ()))
        yield f"`{kind}`", *(", ".join(cell) for cell in cells)


def models_table() -> str:
    """The families as a Markdown table."""
    rows = [HEADER, ("---",) * len(HEADER), *table_rows()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def models_command() -> None:
    """Prints the families, the architectures they read and write, and their presets."""
    print(models_table())
