"""A model from fields that came from outside, checked field by field."""

from typing import Any

from pydantic import TypeAdapter, ValidationError

from lmwright.config.errors import MISSING
from lmwright.errors import UserError


def validated(kind: type, fields: dict[str, Any], where: str) -> Any:
    """`kind(**fields)`. Raises UserError, after the words `where`, for the first that does not
    fit its type or its bounds."""
    try:
        return TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in _without_tags(first["loc"], fields))
        if first["type"] in MISSING:
            raise UserError(f"{where}{name}: is missing; give it a value") from None
        raise UserError(
            f"{where}{name}: {first['input']!r} does not fit ({first['msg']}); correct it"
        ) from None


def _without_tags(place: tuple[Any, ...], fields: Any) -> list[Any]:
    """A place in the fields as users write it: pydantic names the kind of a union, too."""
    found = []
    for part in place:
        if isinstance(fields, dict) and part not in fields and fields.get("kind") == part:
            continue
        found.append(part)
        fields = fields.get(part) if isinstance(fields, dict) else None
    return found
