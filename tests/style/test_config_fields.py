"""The sections of a run: every field is read somewhere, and says what it is by its type."""

import ast
import inspect
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import get_args

import pydantic.dataclasses

from lmwright.config.fields import all_sections, field_types
from lmwright.core.sharding import AXES
from lmwright.formats.open import RUN_FILES
from tests.style.sources import PACKAGE, name_of, nodes_of, python_files

SECTIONS = list(dict.fromkeys(all_sections(RUN_FILES.kinds)))
# Where a field may be said, checked or renamed, which is not yet to be read.
NOT_READING = ("config", "presets/", "cli/", "models/hf/", "formats/")
# Read by `getattr` with each name of a list in turn.
READ_IN_A_LOOP = {"Mesh": AXES}


@cache
def reads():
    """Names that some code reads as an attribute, `x.name`."""
    found = {}
    for path in python_files("src"):
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith(NOT_READING):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.setdefault(node.attr, set()).add(name_of(path))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                name = getattr(node.args[1], "value", None)
                found.setdefault(name, set()).add(name_of(path))
    return found


def place_of(cls):
    """File and line of a section."""
    return f"{name_of(Path(inspect.getfile(cls)))}:{inspect.getsourcelines(cls)[1]}: {cls.__name__}"


def test_every_field_is_read():
    # `kind` picks the class, and the class is what is read.
    unread = [
        f"{place_of(cls)}.{field.name}"
        for cls in SECTIONS
        for field in fields(cls)
        if field.name not in {"kind", *reads(), *READ_IN_A_LOOP.get(cls.__name__, ())}
    ]
    assert not unread, "\n" + "\n".join(unread)


def offenses(cls):
    """Where a section is not frozen, strict and described, or a field not a choice in words."""
    if not (cls.__dataclass_params__.frozen and all(f.kw_only for f in fields(cls))):
        yield "frozen, with fields by name only"
    if cls.__pydantic_config__["extra"] != "forbid":
        yield "forbid what it does not know"
    if not cls.__doc__:
        yield "say what it is"
    for name, annotation in field_types(cls).items():
        if bool in set(everything_in(annotation)):
            yield f"{name}: name the choices instead of a boolean"
        default = cls.__dataclass_fields__[name].default
        if isinstance(default, int | float) and default < 0:
            yield f"{name}: no sentinels"


def test_sections_are_frozen_strict_and_say_choices_in_words():
    found = [f"{place_of(cls)}: {text}" for cls in SECTIONS for text in offenses(cls)]
    assert not found, "\n" + "\n".join(found)


def test_a_loose_section_is_found():
    @pydantic.dataclasses.dataclass(config={"extra": "ignore"})
    class Loose:
        fast: bool
        steps: int = -1

    Loose.__doc__ = None
    assert len(list(offenses(Loose))) == 5


def everything_in(annotation):
    """An annotation and all that it is made of."""
    yield annotation
    for inner in get_args(annotation):
        yield from everything_in(inner)


def test_the_walk_reaches_the_sections():
    names = {cls.__name__ for cls in SECTIONS}
    assert {"Run", "Data", "Source", "Llama", "Clm", "AdamW", "Muon", "Wsd", "Shuffle"} <= names


def test_a_field_that_nobody_reads_is_found():
    assert "no_such_field" not in reads() and "global_batch_size" in reads()
