"""A model from fields that came from outside, checked field by field."""

from typing import Any

from pydantic import TypeAdapter, ValidationError

from podsmith.errors import UserError


def validated(kind: type, fields: dict[str, Any], where: str) -> Any:
    """`kind(**fields)`. Raises UserError, after the words `where`, for the first that does not
    fit its type or its bounds."""
    try:
        return TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"{where}{name}: {first['input']!r} does not fit ({first['msg']}); correct it"
        ) from None
