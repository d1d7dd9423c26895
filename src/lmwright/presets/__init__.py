"""Presets: ready values by name, which a run file names.

`recipe = "quickstart"` is a whole run: a function of `presets.recipes`, with dashes for
underscores. `[model] preset = "llama-5m"` is a section: a row of a module's `PRESETS`, whose names
with dots may be written with dashes; `SHORT` has second names.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

SECTIONS = {
    "model": (
        "lmwright.presets.models",
        "lmwright.presets.decoders",
        "lmwright.presets.moe",
        "lmwright.presets.granite_moe",
        "lmwright.presets.granite4",
        "lmwright.presets.nemotron",
        "lmwright.presets.falcon_h1",
        "lmwright.presets.mamba",
        "lmwright.presets.research",
        "lmwright.presets.layer_normed",
        "lmwright.presets.encoders",
        "lmwright.presets.recurrent",
        "lmwright.presets.bitnet",
    )
}


def all_recipes() -> dict[str, Callable[[], dict[str, Any]]]:
    """Every recipe by name; each returns a part of a run as nested dicts."""
    return _functions(import_module("lmwright.presets.recipes"))


def pretraining_of(model: Any) -> str:
    """The recipe that trains such a model on texts."""
    if not model.both_ways:
        return "pretrain"
    return "pretrain-diffusion" if model.fills_masks else "pretrain-encoder"


def of_section(section: str) -> dict[str, Callable[[], Any]]:
    """Every preset of a section by name, long or short; each returns the section's dataclass."""
    modules = [import_module(name) for name in SECTIONS[section]]
    presets: dict[str, Callable[[], Any]] = {}
    for module in modules:
        dashed = {name.replace(".", "-"): make for name, make in module.PRESETS.items()}
        presets |= dashed | module.PRESETS | getattr(module, "SHORT", {})
    return presets


def _functions(module: ModuleType) -> dict[str, Callable[[], Any]]:
    return {
        name.replace("_", "-"): value
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and value.__module__ == module.__name__
    }
