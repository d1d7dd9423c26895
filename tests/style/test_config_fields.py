"""The sections of a run: every field is read somewhere, and says what it is by its type."""

import ast
from dataclasses import fields
from typing import get_args

import pytest

from lmwright.config.fields import all_sections, field_types
from lmwright.core.sharding import AXES
from lmwright.formats.open import RUN_FILES
from tests.style.sources import PACKAGE, name_of, parsed, python_files

SECTIONS = list(dict.fromkeys(all_sections(RUN_FILES.kinds)))
# Where a field may be said, checked or renamed, which is not yet to be read.
NOT_READING = ("config", "presets/", "commands.py", "cli.py", "quickstart.py")
# Read by `getattr` with each name of a list in turn.
READ_IN_A_LOOP = {"Mesh": AXES}


def reads():
    """Names that some code reads as an attribute, `x.name`."""
    found = {}
    for path in python_files("src"):
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith(NOT_READING) or place.endswith("_hf.py"):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.setdefault(node.attr, set()).add(name_of(path))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                name = getattr(node.args[1], "value", None)
                found.setdefault(name, set()).add(name_of(path))
    return found


READS = reads()


@pytest.mark.parametrize("cls", SECTIONS, ids=lambda cls: cls.__name__)
def test_every_field_is_read(cls):
    looped = READ_IN_A_LOOP.get(cls.__name__, ())
    unread = {f.name for f in fields(cls) if f.name not in READS} - set(looped)
    # `kind` picks the class, and the class is what is read.
    assert unread <= {"kind"}


@pytest.mark.parametrize("cls", SECTIONS, ids=lambda cls: cls.__name__)
def test_sections_are_frozen_strict_and_say_choices_in_words(cls):
    assert cls.__dataclass_params__.frozen and all(f.kw_only for f in fields(cls))
    assert cls.__pydantic_config__["extra"] == "forbid"
    assert cls.__doc__
    for name, annotation in field_types(cls).items():
        branches = set(everything_in(annotation))
        assert bool not in branches, f"{name}: name the choices instead of a boolean"
        default = cls.__dataclass_fields__[name].default
        assert not (isinstance(default, int | float) and default < 0), f"{name}: no sentinels"


def everything_in(annotation):
    """An annotation and all that it is made of."""
    yield annotation
    for inner in get_args(annotation):
        yield from everything_in(inner)


def test_the_walk_reaches_the_sections():
    names = {cls.__name__ for cls in SECTIONS}
    assert {"Run", "Data", "Source", "Llama", "Clm", "AdamW", "Muon", "Wsd", "Shuffle"} <= names


def test_a_field_that_nobody_reads_is_found():
    assert "no_such_field" not in READS and "global_batch_size" in READS
