"""A single section: built from outside fields, or changed by overrides."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lmwright.config.errors import MISSING, nearest
from lmwright.config.fields import field_types, to_plain, with_unset
from lmwright.config.text import parse_override
from lmwright.errors import UserError


def validate(kind: type, fields: dict[str, Any], where: str) -> Any:
    """Builds `kind(**fields)`. Raises UserError, prefixed with `where`, for the first field of a
    wrong type or out of bounds."""
    try:
        return _adapter(kind).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in _without_tags(first["loc"], fields))
        if first["type"] in MISSING:
            raise UserError(f"{where}{name}: is missing; give it a value") from None
        raise UserError(
            f"{where}{name}: {first['input']!r} does not fit ({first['msg']}); correct it"
        ) from None


@cache
def _adapter(kind: type) -> TypeAdapter:
    return TypeAdapter(kind)


def _without_tags(place: tuple[Any, ...], fields: Any) -> list[Any]:
    """Path of an error as users write it, without the union tags of pydantic."""
    keys = []
    for part in place:
        if isinstance(fields, dict) and part not in fields and fields.get("kind") == part:
            continue
        keys.append(part)
        fields = fields.get(part) if isinstance(fields, dict) else None
    return keys


def with_overrides(model: Any, overrides: Sequence[str], what: str) -> Any:
    """Model with overrides like `model.rope_scaling.factor=4` applied; `model.` may be left out.
    Raises UserError for a field that `what` does not have or an invalid value."""
    plain = to_plain(model)
    parsed = [(*parse_override(text), text) for text in overrides]
    for keys, value, text in sorted(parsed, key=lambda item: item[0][-1] != "kind"):
        first, *inner = keys[1:] if keys[0] == "model" and keys[1:] else keys
        names = list(field_types(type(model)))
        if first not in names:
            cure = nearest(str(first), names, what="the model's fields are")
            raise UserError(f"{text}: {what} has no such field; {cure}")
        if not inner:
            plain[first] = value
            continue
        table = plain.get(first) if isinstance(plain.get(first), dict) else {}
        if inner == ["kind"] and table.get("kind") != value:
            table = {}  # another kind starts anew
        plain[first] = _put(table, inner, value)
    return validate(type(model), with_unset(type(model), plain), "model.")


def _put(table: dict[str, Any], keys: list[Any], value: Any) -> dict[str, Any]:
    """The table with one value put in, at any depth."""
    key, *inner = keys
    if inner:
        value = _put(table.get(key) if isinstance(table.get(key), dict) else {}, inner, value)
    return {**table, key: value}
