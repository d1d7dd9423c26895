"""JSON schema of run files, for editors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from lmwright.config.fields import UNSET

SWEEP = {
    "type": "object",
    "description": "Makes several runs of the file, for `lmwright sweep`.",
    "minProperties": 1,
    "additionalProperties": False,
    "properties": {
        "grid": {
            "type": "object",
            "description": 'Values to try by field, as in "model.num_layers" = [4, 8]; a run for '
            "every combination.",
            "additionalProperties": {"type": "array", "minItems": 1},
        },
        "cases": {
            "type": "array",
            "description": "A run each: a name and the fields that it sets.",
            "items": {
                "type": "object",
                "minProperties": 2,
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
            },
        },
    },
}
"""Schema of [sweep], as `train.sweep` reads it."""


def schema_of(
    adapter: TypeAdapter, recipes: Sequence[str], presets: Mapping[str, Iterable[str]]
) -> dict[str, Any]:
    """Schema of a run file: nothing is required, since a recipe or a preset may give it;
    `presets` are their names by section."""
    schema = adapter.json_schema()
    for definition in [schema, *schema.get("$defs", {}).values()]:
        _relax(definition)
    recipe = {"enum": list(recipes), "description": "Starts from a whole run; all else changes it."}
    depth = {"type": "integer", "minimum": 1, "description": "A model of so many layers."}
    own = {"recipe": recipe, "depth": depth, "sweep": SWEEP}
    schema["properties"] = own | schema["properties"]
    for section, names in presets.items():
        about = {"enum": list(names), "description": f"Starts from a ready {section}."}
        for definition in _definitions(schema, schema["properties"][section]):
            definition["properties"] = {"preset": about, **definition["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _relax(definition: dict[str, Any]) -> None:
    for name in definition.pop("required", ()):
        about = definition["properties"][name]
        text = f"{about.get('description', '')} Required, here or in a recipe or preset."
        about["description"] = text.strip()
    for about in definition.get("properties", {}).values():
        # `kind` may come from elsewhere too, and without it several branches fit.
        if "oneOf" in about:
            about["anyOf"] = about.pop("oneOf")
            about.pop("discriminator", None)
        if {"type": "null"} in about.get("anyOf", ()):  # which TOML does not have
            branches = [branch for branch in about["anyOf"] if branch != {"type": "null"}]
            if about.get("default", UNSET) is None:
                del about["default"]
            if {"type": "string"} not in branches or "default" in about:
                branches.append({"const": UNSET})
            about["anyOf"] = branches


def _definitions(schema: dict[str, Any], about: dict[str, Any]) -> list[dict[str, Any]]:
    refs = [about, *about.get("anyOf", ()), *about.get("allOf", ())]
    names = [ref["$ref"].rsplit("/", 1)[-1] for ref in refs if "$ref" in ref]
    return [schema["$defs"][name] for name in names]
