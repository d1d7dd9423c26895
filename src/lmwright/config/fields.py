"""Fields of a run: the dataclasses and the plain tables and lists that a run file may hold.

TOML has no null, so a field that is set by default is unset by the word "none". `kinds` are the
dataclasses of the sections that come in kinds.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, get_args, get_type_hints

from lmwright.config.registry import Kind, Kinds
from lmwright.config.run import PLACE, Run
from lmwright.config.text import DEEPEST, Keys, join_keys, refuse_bytes
from lmwright.errors import UserError

UNSET = "none"
NO_KINDS: Kinds = {}


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Annotation of every field of a dataclass, in order."""
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in fields(cls)}


def default_of(field: Field) -> Any:
    """A field's default, MISSING if it is required."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def classes_in(annotation: Any, kinds: Kinds = NO_KINDS) -> tuple[type, ...]:
    """The dataclasses that an annotation allows, through unions, tuples and kinds."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        return (annotation,)
    if isinstance(annotation, Kind):
        return annotation.classes(kinds)
    inner = [*get_args(annotation), *getattr(annotation, "__metadata__", ())]
    return tuple(dict.fromkeys(cls for part in inner for cls in classes_in(part, kinds)))


def class_for(annotation: Any, values: Any, kinds: Kinds = NO_KINDS) -> type | None:
    """Dataclass that holds these values, chosen by their `kind` if there are several."""
    classes = classes_in(annotation, kinds)
    if len(classes) > 1:
        kind = values.get("kind") if isinstance(values, dict) else None
        classes = tuple(c for c in classes if c.__dataclass_fields__["kind"].default == kind)
    return classes[0] if len(classes) == 1 else None


def annotation_at(values: dict[str, Any], keys: Keys, kinds: Kinds = NO_KINDS) -> Any:
    """Annotation of the field at `keys`; None if no field is there."""
    annotation: Any = Run
    inner: Any = values
    for key in keys:
        if isinstance(key, str):
            cls = class_for(annotation, inner, kinds)
            annotation = field_types(cls).get(key) if cls else None
            inner = inner.get(key) if isinstance(inner, dict) else None
        else:
            inner = inner[key] if isinstance(inner, list) and key < len(inner) else None
    return annotation


def names_in(values: dict[str, Any], keys: Keys, kinds: Kinds = NO_KINDS) -> list[str]:
    """Names allowed at `keys`: the fields of a table, or the kinds of a `kind`."""
    if keys[-1:] == ("kind",):
        classes = classes_in(annotation_at(values, keys[:-1], kinds), kinds)
        return [c.__dataclass_fields__["kind"].default for c in classes]
    inner: Any = values
    for key in keys:
        inner = inner.get(key) if isinstance(inner, dict) else inner and inner[key]
    cls = class_for(annotation_at(values, keys, kinds), inner, kinds)
    return list(field_types(cls)) if cls else []


def all_sections(kinds: Kinds, annotation: Any = Run) -> Iterator[type]:
    """Every dataclass that a run file can reach."""
    for cls in classes_in(annotation, kinds):
        yield cls
        for inner in field_types(cls).values():
            yield from all_sections(kinds, inner)


def _can_be_unset(field: Field, annotation: Any) -> bool:
    """True if the word "none" unsets a field. A field that is unset by default may have been set by
    a preset; then the word must not be a valid text for it, which at a place is written ./none."""
    branches, default = _branches(annotation), default_of(field)
    if NoneType not in branches or default is MISSING:
        return False
    return default is not None or str not in branches or _has(PLACE, annotation)


def _branches(annotation: Any) -> Sequence[Any]:
    """The members of a union, seen through Annotated."""
    if hasattr(annotation, "__metadata__"):
        return _branches(get_args(annotation)[0])
    return get_args(annotation) or (annotation,)


def to_plain(value: Any, *, defaults: str = "keep") -> Any:
    """Dataclasses as nested dicts and lists that TOML can hold.

    None is left out where it is the default and "none" elsewhere; `defaults="omit"` leaves
    out every field that equals its default, except `kind`. Fields with `repr=False`, which follow
    from others, are left out too.
    """
    if is_dataclass(value):
        return {
            f.name: UNSET if item is None else to_plain(item, defaults=defaults)
            for f in sorted(fields(value), key=lambda f: f.name != "kind")
            if f.repr
            if (item := getattr(value, f.name)) is not None or default_of(f) is not None
            if defaults == "keep" or f.name == "kind" or item != default_of(f)
        }
    if isinstance(value, dict):
        return {k: to_plain(v, defaults=defaults) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [to_plain(v, defaults=defaults) for v in value]
    return value


def to_values(value: Any, where: str, keys: Keys = ()) -> Any:
    """Tables of Python, such as `{"train": {"steps": np.int64(10)}}`, as `to_plain`, with numpy's
    scalars and paths as numbers and text. Raises UserError for what no run file can hold."""
    if len(keys) > DEEPEST:
        raise UserError(
            f"{where}: {join_keys(keys[:3])}: lists or tables are nested too deeply; remove some "
            "levels"
        )
    if is_dataclass(value) and not isinstance(value, type):
        value = to_plain(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                name = join_keys((*keys, repr(key)))
                raise UserError(f"{where}: {name}: names of fields are text; put it in quotes")
            refuse_bytes(where, key)
        return {k: to_values(v, where, (*keys, k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_values(v, where, (*keys, i)) for i, v in enumerate(value)]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(value, str):
        refuse_bytes(f"{where}: {join_keys(keys)}", value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise UserError(
        f"{where}: {join_keys(keys)} is a value of type {type(value).__name__}, which no run file "
        "can hold; give text, a number, a list or a table"
    )


def homed(values: dict[str, Any]) -> dict[str, Any]:
    """The values with `dir` and `data.dir` below the user's home where they begin with `~`, which
    only a shell expands, and not in a run file."""
    for table in (values, values.get("data")):
        if isinstance(table, dict) and isinstance(table.get("dir"), str):
            table["dir"] = os.path.expanduser(table["dir"])
    return values


def names_of(mark: str, kinds: Kinds) -> frozenset[str]:
    """Own names of the fields with a mark, in all sections."""
    sections = all_sections(kinds)
    return frozenset(n for cls in sections for n, a in field_types(cls).items() if _has(mark, a))


def _has(mark: str, annotation: Any) -> bool:
    return mark in getattr(annotation, "__metadata__", ())


def without(mark: str, value: Any) -> Any:
    """Dataclasses as nested dicts, without the fields that have a mark or follow from others."""
    if is_dataclass(value):
        return {
            name: without(mark, getattr(value, name))
            for name, annotation in field_types(type(value)).items()
            if not _has(mark, annotation) and type(value).__dataclass_fields__[name].repr
        }
    if isinstance(value, dict):
        return {k: without(mark, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without(mark, v) for v in value]
    return value


def changed(
    marks: set[str], change: Callable[[str], str], annotation: Any, values: Any, kinds: Kinds
) -> Any:
    """Values with the texts of the fields that have all marks changed."""
    if isinstance(values, list):
        return [changed(marks, change, annotation, v, kinds) for v in values]
    cls = class_for(annotation, values, kinds)
    if cls is None or not isinstance(values, dict):
        return values
    types = field_types(cls)
    return {
        key: change(value)
        if isinstance(value, str) and all(_has(mark, types.get(key)) for mark in marks)
        else changed(marks, change, types.get(key), value, kinds)
        for key, value in values.items()
    }


def with_unset(annotation: Any, values: Any, kinds: Kinds = NO_KINDS) -> Any:
    """Values with None in place of the word "none" where a field can be unset."""
    if isinstance(values, list):
        return [with_unset(annotation, v, kinds) for v in values]
    cls = class_for(annotation, values, kinds)
    if cls is None or not isinstance(values, dict):
        return values
    types = field_types(cls)
    known = {f.name: f for f in fields(cls)}
    return {
        key: None
        if value == UNSET and key in known and _can_be_unset(known[key], types[key])
        else with_unset(types.get(key), value, kinds)
        for key, value in values.items()
    }
