"""Run files: layers of plain values, merged, validated against `Run`, and written back.

    default < train.init_from < recipe < depth < preset < run file < a.b=c

Each layer overwrites single values. Naming another `kind` or a `preset` starts the section
anew, so that nothing of another optimizer or model lingers in it.
"""

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import TypeAdapter, ValidationError

from lmwright.config.check import check_run
from lmwright.config.check_data import ONLY_TRAINED
from lmwright.config.errors import LIST_PRESETS, explain, nearest
from lmwright.config.fields import UNSET, changed, homed, names_in, to_plain, to_values, with_unset
from lmwright.config.fit import EpochRows, fit_schedule, given_schedule, mark_given, put_given
from lmwright.config.kept import find_moved, is_kept, made_in
from lmwright.config.merge import COMMAND_LINE, DEFAULT, RECIPE, Merged, Provenance
from lmwright.config.registry import OFFERED, Kinds
from lmwright.config.run import FREE, PLACE, SETTINGS, Run
from lmwright.config.schema import schema_of
from lmwright.config.text import Keys, leaves, parse_override, read_toml
from lmwright.errors import UserError
from lmwright.guard.redact import redact_tree
from lmwright.storage.mirror import fetched

DIALED = ("vocab_size", "seq_len")  # sizes of the model that `depth` takes into account

Layer = dict[str, Any]

RunFile = str | Path | Mapping[str, Any] | Run
"""Path of a run file or a run directory, the tables of a run file, or a run, as
`dataclasses.replace` may have left it."""
IN_PYTHON = Path("the run")
"""Name of tables in messages."""


@dataclass(frozen=True)
class RunFiles:
    """Reads run files. The registries of models and presets belong to higher rooms, so they are
    passed in."""

    kinds: Kinds
    presets: Mapping[str, Mapping[str, Callable[[], Any]]]
    """Presets by section, then by name."""
    recipes: Mapping[str, Callable[[], Layer]]
    dial: Callable[..., Layer]
    """Function that makes a part of a run from `depth` and the sizes of `DIALED`."""
    origin: Callable[[str, Any, str | None], Mapping[tuple[str, ...], Layer]]
    """Function that returns {section: fields} that follow from train.init_from, the run's dir, and
    the kind of model that it is to become."""
    teacher: Callable[[str], Layer]
    """Function that returns the fields of the model at a place."""
    epoch_rows: EpochRows
    sources: Mapping[str, Layer] = field(default_factory=dict)
    """Fields of ready sources of data, by name."""

    def load(self, path: RunFile, overrides: Sequence[str] = ()) -> Run:
        """Loads the run that a file (a run directory, or the tables of a file) and overrides like
        `train.steps=10` describe.

        Raises UserError naming file, line and field for anything that is not a valid run.
        """
        return self.resolve_layers(path, overrides)[0]

    def load_noted(
        self, path: RunFile, overrides: Sequence[str] = (), *left_out: str
    ) -> tuple[Run, list[str]]:
        """Loads a run as `load` does, without the tables `left_out`; also returns a line for each
        value of a recipe or preset that was fitted to the length of the run."""
        run, _, notes = self._resolve(path, overrides, *left_out)
        return run, notes

    def load_base(self, path: str | Path, overrides: Sequence[str] = ()) -> Run:
        """Loads a run file without its [sweep], which describes several runs."""
        return self._resolve(path, overrides, "sweep")[0]

    def resolve_layers(
        self, path: str | Path, overrides: Sequence[str] = ()
    ) -> tuple[Run, Provenance]:
        """Loads a run with the origin of each leaf by keys: `default`, `recipe NAME`, `preset
        NAME`, `FILE:LINE` or `command line`."""
        return self._resolve(path, overrides)[:2]

    def schema(self) -> dict[str, Any]:
        """JSON schema of a run file, for editors."""
        adapter = _adapter(_frozen(self.kinds), described=True)
        schema = schema_of(adapter, list(self.recipes), self.presets)
        about = {"enum": list(self.sources), "description": "Starts from a ready source."}
        fields = schema["$defs"]["Source"]["properties"]
        schema["$defs"]["Source"]["properties"] = {"preset": about, **fields}
        return schema

    def _resolve(
        self, source: RunFile, overrides: Sequence[str], *left_out: str
    ) -> tuple[Run, Provenance, list[str]]:
        path, values, lines = _read(source)
        values = {key: value for key, value in values.items() if key not in left_out}
        moved = find_moved(path, values.get("dir"))
        values = self._found_again(path, values)
        if is_kept(path) and isinstance(values.get("seed"), int):
            values["seed"] %= 2**32  # earlier versions took larger ones, for the same run
        if "sweep" in values:
            raise UserError(
                f"{path}: [sweep] makes several runs of it; train them by: lmwright sweep "
                f"{shlex.quote(str(path))}, and give other commands a file without [sweep]"
            )
        merged = Merged(path, lines)
        # A new kind empties its section, so it comes before the fields that go with it.
        parsed = sorted(map(parse_override, overrides), key=lambda item: item[0][-1] != "kind")
        chosen = {keys: value for keys, value in parsed if self._names_layer(keys)}
        recipe = chosen.get(("recipe",), values.pop("recipe", None))
        if recipe is not None:
            where = COMMAND_LINE if ("recipe",) in chosen else merged.where(("recipe",))
            layer = to_plain(_find_named(recipe, self.recipes, "recipe", where)(), defaults="omit")
            self._put_layer(merged, layer, f"{RECIPE} {recipe}", {})
        depth = chosen.get(("depth",), values.pop("depth", None))
        if depth is not None:
            where = COMMAND_LINE if ("depth",) in chosen else merged.where(("depth",))
            layer = self._dialed(depth, _sizes(values, parsed), where)
            self._put_layer(merged, layer, f"depth {depth}", {})
        self._put_layer(merged, values, None, chosen)
        if isinstance(source, Run):
            put_given(merged, source)
        if moved is not None:
            merged.merge({"dir": moved}, "where it is now")
        for keys, value in parsed:
            if keys not in chosen:
                merged.put(keys, value)
        self._put_sources(merged)
        _forget_training(merged)
        self._put_origin(merged)
        self._put_teacher(merged)
        given = given_schedule(merged)
        notes = fit_schedule(merged, self.epoch_rows)
        run = self._validated(merged)
        mark_given(run, given)
        check_run(run)
        if isinstance(source, Run) and run.optim.schedule == source.optim.schedule:
            notes = []  # told when it was loaded
        return run, _provenance(run, path, merged.origin), notes

    def _found_again(self, path: Path, values: Layer) -> Layer:
        """Values of a run directory's run file, with the relative places that are not below this
        folder seen from the one in which the run was made."""
        origin = made_in(path, values.get("dir"))
        if origin is None:
            return values

        def find(place: str) -> str:
            there = origin / place
            lost = "://" not in place and not os.path.lexists(place) and there.exists()
            return str(there) if lost else place

        return changed({FREE, PLACE}, find, Run, values, self.kinds)

    def _names_layer(self, keys: Keys) -> bool:
        return keys in (("recipe",), ("depth",)) or (
            keys[-1] == "preset" and len(keys) == 2 and keys[0] in self.presets
        )

    def _put_layer(
        self, merged: Merged, layer: Layer, label: str | None, chosen: dict[Keys, Any]
    ) -> None:
        """Merges a recipe or a run file, after the presets that it or the command line names."""
        for section, presets in self.presets.items():
            table = layer.get(section)
            keys: Keys = (section, "preset")
            name = table.pop("preset", None) if isinstance(table, dict) else None
            where = label or merged.where(keys)
            if keys in chosen:
                name, where = chosen[keys], COMMAND_LINE
            if name is not None:
                merged.drop(section)
                preset = _find_named(name, presets, f"{section}.preset", where)
                fields = to_plain(preset(), defaults="omit")
                merged.merge({section: fields}, f"preset {name}")
        merged.merge(layer, label)

    def _dialed(self, depth: Any, sizes: Mapping[str, Any], where: str) -> Layer:
        """Settings that follow from `depth` and the sizes set beside it."""
        if type(depth) is not int or depth < 1:
            raise UserError(f"{where}: depth must be a number of layers from 1, not {depth!r}")
        if "preset" in sizes:
            raise UserError(f"{where}: depth and model.preset both choose the model; keep one")
        return self.dial(depth, **{name: sizes[name] for name in DIALED if name in sizes})

    def _put_sources(self, merged: Merged) -> None:
        """Fills in the fields of the sources that name a preset, where they are not set."""
        data = merged.values.get("data")
        listed = data.get("sources") if isinstance(data, dict) else None
        for number, source in enumerate(listed if isinstance(listed, list) else ()):
            if not isinstance(source, dict) or "preset" not in source:
                continue
            keys: Keys = ("data", "sources", number)
            name = source.pop("preset")
            known = {each: (lambda: None) for each in self.sources}
            _find_named(name, known, "data.sources.preset", merged.where((*keys, "preset")))
            for key, value in self.sources[name].items():
                if key not in source:
                    source[key] = value
                    merged.origin[*keys, key] = f"preset {name}"

    def _put_origin(self, merged: Merged) -> None:
        """Fills in the model and tokenizer that `train.init_from` names, as a model of the kind
        that is set, where no sizes are, else the tokenizer alone; explicit settings take
        precedence."""
        train = merged.values.get("train")
        path = train.get("init_from") if isinstance(train, dict) else None
        model = merged.values.get("model", {})
        if path == UNSET:  # a folder of that name is written ./none
            path = train["init_from"] = None
        if not isinstance(path, str) or not isinstance(model, dict):
            return
        kind = model.get("kind")
        if kind is not None and kind not in self.kinds["model"]:
            return  # found when the run is validated
        sized = kind is not None and "vocab_size" in model
        data = merged.values.get("data", {})
        if sized and (train.get("init_parts") or data.get("tokenizer")):
            return
        try:
            found = self.origin(path, merged.values.get("dir"), None if sized else kind)
        except UserError:
            if sized and not data.get("sources"):
                return  # planned where the weights are not
            raise
        for section, fields in found.items():
            there = _table(merged.values, section)
            if not (sized if section == ("model",) else there):
                layer = _nested(section, _missing(fields, there))
                merged.merge(layer, f"train.init_from {path}")

    def _put_teacher(self, merged: Merged) -> None:
        """Fills in the model of the teacher that a distillation names, where it is not set."""
        objective = merged.values.get("objective")
        if not isinstance(objective, dict) or objective.get("kind") != "distill":
            return
        path = objective.get("teacher")
        if isinstance(path, str) and path != UNSET and "teacher_model" not in objective:
            layer = {"objective": {"teacher_model": self.teacher(path)}}
            merged.merge(layer, f"objective.teacher {path}")

    def _validated(self, merged: Merged) -> Run:
        values = homed(with_unset(Run, merged.values, self.kinds))
        try:
            # JSON and not Python mode: strict about scalars, yet a list may become a tuple.
            text = json.dumps(values, default=os.fspath)
            return _adapter(_frozen(self.kinds)).validate_json(text, strict=True)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            names = lambda keys: self._names(values, keys)  # noqa: E731
            raise explain(errors, values, merged.where, names, merged.emptied) from None

    def _names(self, values: Layer, keys: Keys) -> list[str]:
        extra = ["recipe", "depth"] if not keys else []
        if len(keys) == 1 and keys[0] in self.presets:
            extra = ["preset"]
        return extra + names_in(values, keys, self.kinds)


def _read(source: RunFile) -> tuple[Path, Layer, dict[Keys, int]]:
    """Path of a run file, its values, and their lines; tables of Python have neither."""
    if isinstance(source, Run):
        source = to_plain(source)
    if isinstance(source, Mapping):
        return IN_PYTHON, to_values(source, str(IN_PYTHON)), {}
    path = fetched(source)
    path = path / "run.toml" if path.is_dir() else path
    return path, *read_toml(path)


def _table(values: Layer, section: tuple[str, ...]) -> Layer:
    """The table of a section; empty where there is none."""
    for key in section:
        values = values.get(key, {})
    return values


def _missing(fields: Layer, there: Layer) -> Layer:
    """Fields that a table lacks, also in the tables below it that are of the same kind."""
    found = {}
    for key, value in fields.items():
        inner = there.get(key)
        if key not in there:
            found[key] = value
        elif isinstance(value, dict) and isinstance(inner, dict):
            if inner.get("kind", value.get("kind")) == value.get("kind"):
                found[key] = _missing(value, inner)
    return found


def _nested(section: tuple[str, ...], fields: Layer) -> Layer:
    """A layer that has these fields in a section."""
    for key in reversed(section):
        fields = {key: fields}
    return fields


Frozen = tuple[tuple[str, tuple[tuple[str, type], ...]], ...]


def _frozen(kinds: Kinds) -> Frozen:
    return tuple((section, tuple(classes.items())) for section, classes in kinds.items())


@cache
def _adapter(kinds: Frozen, *, described: bool = False) -> TypeAdapter:
    """Pydantic adapter for a run, built when the first run is validated, because the kinds import
    jax. The fields' help is read from the source if `described`, which takes long."""
    token = OFFERED.set({section: dict(classes) for section, classes in kinds})
    SETTINGS["use_attribute_docstrings"] = described
    try:
        return TypeAdapter(Run)
    finally:
        SETTINGS["use_attribute_docstrings"] = False
        OFFERED.reset(token)


def _forget_training(merged: Merged) -> None:
    """Leaves out how a recipe trains a tokenizer where the run imports one."""
    data, train = (merged.values.get(name) for name in ("data", "train"))
    table = data.get("tokenizer") if isinstance(data, dict) else None
    train = train if isinstance(train, dict) else {}
    origin = None if train.get("init_parts") else train.get("init_from")
    if isinstance(table, dict) and any(p not in (None, UNSET) for p in (table.get("path"), origin)):
        for name in ONLY_TRAINED:
            merged.drop_recipe(("data", "tokenizer", name))


def _sizes(values: dict[str, Any], parsed: list[tuple[Keys, Any]]) -> dict[str, Any]:
    """Model fields that the run sets itself; a tokenizer that is to be trained gives the vocabulary
    size."""
    trained = values.get("data", {}).get("tokenizer", {})
    sizes = {name: trained[name] for name in ("vocab_size",) if name in trained}
    on_top = {keys[-1]: value for keys, value in parsed if keys[:-1] == ("model",)}
    return sizes | values.get("model", {}) | on_top


def _find_named(name: Any, known: Mapping[str, Any], field: str, where: str) -> Any:
    if name not in known:
        cure = nearest(str(name), list(known), what="there are", listed_by=LIST_PRESETS)
        raise UserError(f"{where}: {field}: there is no {name!r}; {cure}")
    return known[name]


def _provenance(run: Run, path: Path, origin: Provenance) -> Provenance:
    """The origin of each leaf. In the complete file that a run directory has, what equals its
    default counts as one."""
    if is_kept(path):
        set_at = {keys for keys, _ in leaves(to_plain(run, defaults="omit"))}
        origin = {k: at for k, at in origin.items() if k in set_at or at == COMMAND_LINE}
    return {keys: origin.get(keys, DEFAULT) for keys, _ in leaves(to_plain(run))}


def dump_toml(run: Run) -> str:
    """Whole run as a run file. Loading it gives an equal run, except for the credentials of URLs,
    which are not written."""
    return tomli_w.dumps(redact_tree(to_plain(run)))
