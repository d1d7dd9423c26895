"""Run files: layers of plain values, merged, validated against `Run`, and written back.

    default < train.init_from < recipe < depth < preset < run file < a.b=c

Each layer overwrites single values. Naming another `kind` or a `preset` starts the section
anew, so that nothing of another optimizer or model lingers in it.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import TypeAdapter, ValidationError

from lmwright import presets
from lmwright.config.check import check_run
from lmwright.config.errors import explain, nearest
from lmwright.config.fields import UNSET, names_in, to_plain, with_unset
from lmwright.config.fit import fit_schedule
from lmwright.config.merge import COMMAND_LINE, Merged, Provenance
from lmwright.config.run import Run
from lmwright.config.text import Keys, dotted, is_tables, leaves, parse_override, read_toml
from lmwright.errors import UserError
from lmwright.guard.redact import redact_tree
from lmwright.presets.dial import USUAL_SIZES, dial

__all__ = [
    "check_run",
    "dump_toml",
    "load_base",
    "load_noted",
    "load_run",
    "resolve_layers",
    "run_schema",
    "show",
]


# Beside a run.toml, these tell a run directory from a folder with a user's run file.
OF_RUN_DIRECTORY = ("env.json", "metrics.jsonl")


@cache
def _adapter() -> TypeAdapter:
    """Built when the first run is validated, since the registries import jax."""
    return TypeAdapter(Run)


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """The run that a file (or a run directory) and overrides like `train.steps=10` describe.

    Raises UserError naming file, line and field for anything that is not a valid run.
    """
    return resolve_layers(path, overrides)[0]


def load_noted(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Run, list[str]]:
    """The run as by `load_run`, and a line for each value of a recipe or preset that was fitted
    to the run's length."""
    run, _, notes = _resolve(path, overrides)
    return run, notes


def load_base(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """The run of a file that describes several by its [sweep], which is left out."""
    return _resolve(path, overrides, "sweep")[0]


def resolve_layers(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Run, Provenance]:
    """The run, and who said each of its leaves, by keys: `default`, `recipe NAME`,
    `preset NAME`, `FILE:LINE` or `command line`."""
    return _resolve(path, overrides)[:2]


def _resolve(
    path: str | Path, overrides: Sequence[str], *left_out: str
) -> tuple[Run, Provenance, list[str]]:
    path = Path(path)
    path = path / "run.toml" if path.is_dir() else path
    said, lines = read_toml(path)
    said = {key: value for key, value in said.items() if key not in left_out}
    moved = _moved(path, said.get("dir"))
    if "sweep" in said:
        raise UserError(f"{path}: [sweep] makes several runs of it; train them by: lmwright sweep")
    merged = Merged(path, lines)
    # A new kind empties its section, so it comes before the fields that go with it.
    parsed = sorted(map(parse_override, overrides), key=lambda item: item[0][-1] != "kind")
    chosen = {keys: value for keys, value in parsed if _names_layer(keys)}
    recipe = chosen.get(("recipe",), said.pop("recipe", None))
    if recipe is not None:
        where = COMMAND_LINE if ("recipe",) in chosen else merged.where(("recipe",))
        _put_layer(merged, _recipe(recipe, where), f"recipe {recipe}", {})
    depth = chosen.get(("depth",), said.pop("depth", None))
    if depth is not None:
        where = COMMAND_LINE if ("depth",) in chosen else merged.where(("depth",))
        _put_layer(merged, _dial(depth, _sizes(said, parsed), where), f"depth {depth}", {})
    _put_layer(merged, said, None, chosen)
    if moved is not None:
        merged.merge({"dir": str(moved)}, "where it is now")
    for keys, value in parsed:
        if keys not in chosen:
            merged.put(keys, value)
    _put_origin(merged)
    notes = fit_schedule(merged)
    run = _validated(merged)
    check_run(run)
    return run, _provenance(run, merged.origin), notes


def _moved(path: Path, written: Any) -> Path | None:
    """The run directory that a run file lies in, where it was moved or copied since the file was
    written; None for any other run file."""
    folder = path.parent
    if path.name != "run.toml" or not isinstance(written, str):
        return None
    if not any((folder / name).exists() for name in OF_RUN_DIRECTORY):
        return None
    return None if same_folder(folder, written) else folder


def same_folder(folder: Path, written: str) -> bool:
    """Whether a `dir` that was written down, perhaps elsewhere or long ago, is this folder."""
    try:
        return folder.samefile(written)
    except (OSError, ValueError):
        return False


def _names_layer(keys: Keys) -> bool:
    return keys in (("recipe",), ("depth",)) or (
        keys[-1] == "preset" and keys[:-1] in _preset_sections()
    )


def _preset_sections() -> list[Keys]:
    return [(section,) for section in presets.SECTIONS]


def _put_layer(
    merged: Merged, layer: dict[str, Any], label: str | None, chosen: dict[Keys, Any]
) -> None:
    """Merges a recipe or a run file, after the presets that it or the command line names."""
    for section in presets.SECTIONS:
        table = layer.get(section)
        keys: Keys = (section, "preset")
        name = table.pop("preset", None) if isinstance(table, dict) else None
        where = label or merged.where(keys)
        if keys in chosen:
            name, where = chosen[keys], COMMAND_LINE
        if name is not None:
            merged.drop(section)
            merged.merge({section: _preset(section, name, where)}, f"preset {name}")
    merged.merge(layer, label)


def _put_origin(merged: Merged) -> None:
    """Fills in the model, and the tokenizer, of what `train.init_from` names; what is said of
    them counts first."""
    train = merged.values.get("train")
    path = train.get("init_from") if isinstance(train, dict) else None
    model = merged.values.get("model", {})
    if not isinstance(path, str) or path == UNSET or not isinstance(model, dict) or "kind" in model:
        return
    from lmwright.formats.origin import run_fields

    for section, fields in run_fields(path, merged.values.get("dir")).items():
        inner = merged.values
        for key in section:
            inner = inner.get(key, {})
        if section == ("model",) or not inner:
            layer: dict[str, Any] = {key: v for key, v in fields.items() if key not in inner}
            for key in reversed(section):
                layer = {key: layer}
            merged.merge(layer, f"train.init_from {path}")


def _recipe(name: Any, where: str) -> dict[str, Any]:
    return to_plain(_named(name, presets.all_recipes(), "recipe", where)(), defaults="omit")


def _sizes(said: dict[str, Any], parsed: list[tuple[Keys, Any]]) -> dict[str, Any]:
    """What the run says of its model itself; a vocabulary that is to be trained says its size."""
    trained = said.get("data", {}).get("tokenizer", {})
    sizes = {name: trained[name] for name in ("vocab_size",) if name in trained}
    on_top = {keys[-1]: value for keys, value in parsed if keys[:-1] == ("model",)}
    return sizes | said.get("model", {}) | on_top


def _dial(depth: Any, sizes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What follows from `depth` and the sizes that are said beside it."""
    if type(depth) is not int or depth < 1:
        raise UserError(f"{where}: depth must be a number of layers from 1, not {depth!r}")
    if "preset" in sizes:
        raise UserError(f"{where}: depth and model.preset both choose the model; keep one")
    return dial(depth, *(sizes.get(name, size) for name, size in USUAL_SIZES.items()))


def _preset(section: str, name: Any, where: str) -> dict[str, Any]:
    found = _named(name, presets.of_section(section), f"{section}.preset", where)
    return to_plain(found(), defaults="omit")


def _named(name: Any, known: dict[str, Any], field: str, where: str) -> Any:
    if name not in known:
        cure = nearest(str(name), list(known), what="there are")
        raise UserError(f"{where}: {field}: there is no {name!r}; {cure}")
    return known[name]


def _validated(merged: Merged) -> Run:
    values = with_unset(Run, merged.values)
    try:
        # JSON and not Python mode: strict about scalars, yet a list may become a tuple.
        return _adapter().validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise explain(found, values, merged.where, lambda keys: _names(values, keys)) from error


def _names(values: dict[str, Any], keys: Keys) -> list[str]:
    extra = ["recipe", "depth"] if not keys else ["preset"] if keys in _preset_sections() else []
    return extra + names_in(values, keys)


def _provenance(run: Run, origin: Provenance) -> Provenance:
    return {keys: origin.get(keys, "default") for keys, _ in leaves(to_plain(run))}


def dump_toml(run: Run) -> str:
    """The whole run as a run file; loading it gives an equal run, but for the credentials of
    URLs, which are not written down."""
    return tomli_w.dumps(redact_tree(to_plain(run)))


def show(run: Run, provenance: Provenance) -> str:
    """The whole run as a run file, each value followed by who said it."""
    blocks: list[list[tuple[str, str]]] = []
    _blocks(to_plain(run), (), provenance, blocks)
    width = min(max(len(text) for block in blocks for text, note in block if note), 60)
    return "\n\n".join(
        "\n".join(f"{text:<{width}}  # {note}" if note else text for text, note in block)
        for block in blocks
    )


def _blocks(
    table: dict[str, Any], keys: Keys, provenance: Provenance, blocks: list[list[tuple[str, str]]]
) -> None:
    """Appends one block a table, its scalars first as TOML wants them."""
    inner = {k: v for k, v in table.items() if isinstance(v, dict) or is_tables(v)}
    names = tuple(key for key in keys if isinstance(key, str))
    header = f"[[{dotted(names)}]]" if keys and isinstance(keys[-1], int) else f"[{dotted(names)}]"
    block = [(header, "")] if keys else []
    for key, value in table.items():
        if key not in inner:
            block.append((f"{key} = {_literal(value)}", provenance[(*keys, key)]))
    if len(block) > bool(keys) or not inner:
        blocks.append(block)
    for key, value in inner.items():
        for place, element in enumerate(value) if is_tables(value) else ((None, value),):
            path = (*keys, key) if place is None else (*keys, key, place)
            _blocks(element, path, provenance, blocks)


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return tomli_w.dumps({"v": redact_tree(value)}).removeprefix("v = ").strip()


def run_schema() -> dict[str, Any]:
    """JSON schema of a run file, for editors: nothing is required, since a recipe or a
    preset may give it."""
    schema = _adapter().json_schema()
    for definition in [schema, *schema.get("$defs", {}).values()]:
        _relax(definition)
    names = list(presets.all_recipes())
    recipe = {"enum": names, "description": "Starts from a whole run; all else changes it."}
    depth = {"type": "integer", "minimum": 1, "description": "A model of so many layers."}
    schema["properties"] = {"recipe": recipe, "depth": depth, **schema["properties"]}
    for section in presets.SECTIONS:
        names = list(presets.of_section(section))
        about = {"enum": names, "description": f"Starts from a ready {section}."}
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
