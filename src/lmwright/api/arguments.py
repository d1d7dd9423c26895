"""Arguments of the functions: made what their annotations say, or refused with a sentence.

values --annotation of each parameter--> values that the commands would give, or UserError
message of a command --named_here--> the same, with its options as arguments
"""

import functools
import inspect
import operator
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from numbers import Real
from os import PathLike, fspath
from types import UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from lmwright.config.run import Run
from lmwright.errors import UserError

Place = str | PathLike[str] | Run
Count = Annotated[int, "at least 1"]
OPTION = re.compile(
    r"`[^`]*`|lmwright [a-z]+[^;,]*"  # commands, which stay as they are
    r"|(?<![\w-])--(?P<name>[a-z][a-z-]*[a-z])"
    r"(?: (?P<value>any\b|(?=[\w./:-]*[\d/])[\w./:-]*[\w/]))?(?P<place>:)?"
)
WRITTEN = {"disk": "disks", "label": "labels", "secret": "secrets"}
WRITTEN |= {kind: f'capacity="{kind}"' for kind in ("spot", "on-demand", "guaranteed")}
MOST_SHOWN = 80  # characters of a value in a message
P = ParamSpec("P")
T = TypeVar("T")


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """The function with numbers, lists, switches and choices checked before its first line, whose
    errors name arguments where those of the command name options. A text where several are meant
    is one, and any iterable is a list."""
    signature = inspect.signature(function)
    switches = {name for name, each in signature.parameters.items() if each.annotation is bool}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}") from None
        for name, value in given.arguments.items():
            parameter = signature.parameters[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                value = tuple(_made(parameter.annotation, item, name) for item in value)
            elif parameter.kind is not parameter.VAR_KEYWORD:
                value = _made(parameter.annotation, value, name)
            given.arguments[name] = value
        try:
            return function(*given.args, **given.kwargs)
        except UserError as error:
            error.args = (named_here(str(error), switches),)
            raise

    return call


def named_here(message: str, switches: Container[str] = ()) -> str:
    """A command's message with its options written as arguments: `--on v4-32` as `on="v4-32"`, and
    those of `switches` as `quick=True` where they are no place. Commands stay as they are."""

    def written(found: re.Match[str]) -> str:
        if (option := found["name"]) is None:
            return found[0]
        name = WRITTEN.get(option, option.replace("-", "_"))
        if value := found["value"]:
            name += "=" + (value if value.isdecimal() else f'"{value}"')
        elif name in switches and not found["place"]:
            name += "=True"
        return name + (found["place"] or "")

    return OPTION.sub(written, message)


def checked_options(options: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Options that a function passes on, checked by the annotations `kinds`; those that are None
    are left out, and paths are texts."""
    plain = {n: fspath(v) if isinstance(v, PathLike) else v for n, v in options.items()}
    return {n: _made(kinds[n], v, n) for n, v in plain.items() if v is not None}


def refuse_unknown(options: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises UserError for options that are none of these names."""
    from lmwright.config.errors import nearest

    known = [*names]
    if other := next((name for name in options if name not in known), None):
        raise UserError(f"{other}: is not an option; {nearest(other, known, what='there are')}")


def refuse_no_hooks(hooks: Iterable[Any]) -> None:
    """Raises UserError for the first of the hooks that is none, be it the class of one."""
    from lmwright.train.hooks import Hook

    for hook in hooks:
        if not isinstance(hook, Hook):
            raise UserError(
                f"hooks: {hook!r} is not a hook; give an object of a class that extends "
                "lmwright.train.hooks.Hook, as in hooks=[Mine()]"
            )


def _made(kind: Any, value: Any, name: str) -> Any:
    """A value of the kind that an annotation says, where it says one."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and type(None) in parts:
            return None
        kinds = [part for part in parts if part is not type(None)]
        return _made(kinds[0], value, name) if len(kinds) == 1 else value
    if origin is Annotated:
        value = _made(parts[0], value, name)
        if value < 1:
            raise UserError(f"{name}: {value} must be {parts[1]}")
        return value
    if origin is Literal:
        if not isinstance(value, str) or value not in parts:
            known = ", ".join(map(repr, parts))
            raise UserError(f"{name}: {_shown(value)} is not one of {known}")
        return value
    if origin is Callable and not callable(value):
        raise UserError(f"{name}: {_shown(value)} must be a function")
    if origin in (Sequence, tuple):
        return _several(parts[0], value, name)
    return _one(kind, value, name)


def _several(kind: Any, value: Any, name: str) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable) or isinstance(value, Mapping | bytes | bytearray):
        raise UserError(f"{name}: {_shown(value)} must be a list")
    return tuple(_made(kind, item, name) for item in value)


def _one(kind: Any, value: Any, name: str) -> Any:
    if kind is int:
        try:
            return operator.index(value)
        except TypeError:
            raise UserError(f"{name}: {_shown(value)} must be a whole number") from None
    if kind is bool:
        if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):  # numpy's
            raise UserError(f"{name}: {_shown(value)} must be True or False")
        return bool(value)
    if kind is float:
        if not isinstance(value, Real):
            raise UserError(f"{name}: {_shown(value)} must be a number")
        return float(value)
    return _text(value, name) if kind is str else value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        text = "a text, each on its own" if isinstance(value, Sequence) else "a text"
        raise UserError(f"{name}: {_shown(value)} must be {text}")
    try:
        value.encode()
    except UnicodeEncodeError:  # halves of a pair of surrogates
        raise UserError(f"{name}: {value!r} is not UTF-8 text") from None
    return value


def _shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def path_of(place: Any) -> str:
    """Path of a place, which of a run is its directory."""
    if isinstance(place, Run):
        return place.dir
    if not isinstance(place, str | PathLike):
        kind = type(place).__name__
        if kind == "LoadedModel":
            raise UserError("a loaded model: generate, predict and embed take one; give its path")
        raise UserError(f"{kind}: does not name a model; give a path, a hub name or a run")
    from lmwright.formats.places import usable

    path = fspath(place)
    usable(path)
    return path


def prompts_of(prompts: Any, *, chat: bool) -> list[Any]:
    """Texts, or conversations where they are a `chat`; one alone makes a list of one."""
    found = [prompts] if isinstance(prompts, str) else [*_several(Any, prompts, "prompts")]
    found = [found] if found and isinstance(found[0], Mapping) else found
    for prompt in found:
        if isinstance(prompt, str):
            _text(prompt, "prompts")
            continue
        told = isinstance(prompt, Sequence) and all(isinstance(each, Mapping) for each in prompt)
        if not told or not prompt:
            wanted = "a text or a list of messages" if chat else "a text"
            raise UserError(f"prompts: {_shown(prompt)} must be {wanted}")
        if not chat:
            raise UserError("prompts: hold messages; add chat=True")
    return found
