"""docs/coming-from.md: every field of ours is one, and so is every one of theirs."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from lmwright.config.elsewhere import CALLED
from lmwright.formats.open import RUN_FILES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coming-from.md"
TABLES = {
    "transformers' `TrainingArguments`": "transformers.TrainingArguments",
    "TRL's `SFTConfig`": "trl.SFTConfig",
    "PEFT's `LoraConfig`": "peft.LoraConfig",
    "`BitsAndBytesConfig`": "transformers.BitsAndBytesConfig",
    "axolotl's YAML": None,  # no class has its keys
    "LLaMA-Factory's YAML, unsloth, torchtune": None,
    "MaxText's YAML": None,  # not on PyPI in a form that installs
}


def table(heading):
    """(their names, our names) of each row under a heading; in parentheses stand values."""
    text = PAGE.read_text()
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)[1]
    for line in re.findall(r"^\| (`.*) \|$", section, re.M):
        left, right = re.sub(r"\([^()]*\)", "", line).split(" | ")
        yield re.findall(r"`(\w+)`", left), re.findall(r"`([a-z_0-9.]+)`", right)


def fields(schema):
    """Dotted names of all fields of a run file."""

    def properties(node, depth=0):
        if ref := node.get("$ref"):
            return properties(schema["$defs"][ref.rsplit("/", 1)[-1]], depth)
        found = dict(node.get("properties", {}))
        for each in (*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())):
            found |= properties(each, depth)
        return found | (properties(node["items"], depth) if "items" in node else {})

    def walk(node, prefix, depth):
        for name, below in properties(node).items():
            yield prefix + name
            if depth:
                yield from walk(below, f"{prefix}{name}.", depth - 1)

    return set(walk(schema, "", 3))


def test_our_fields_are_there():
    known = fields(RUN_FILES.schema())
    named = [name for heading in TABLES for _, ours in table(heading) for name in ours]
    assert len(named) > 70
    assert [name for name in named if "." in name and name not in known] == []


@pytest.mark.parametrize(("heading", "place"), [t for t in TABLES.items() if t[1]])
def test_their_fields_are_there(heading, place):
    module, name = place.split(".")
    cls = getattr(pytest.importorskip(module), name)
    known = set(inspect.signature(cls.__init__).parameters)
    if dataclasses.is_dataclass(cls):
        known |= {field.name for field in dataclasses.fields(cls)}
    named = [name for theirs, _ in table(heading) for name in theirs]
    assert len(named) >= 4 and [name for name in named if name not in known] == []


def test_the_errors_and_the_page_say_the_same():
    known = fields(RUN_FILES.schema()) | {"model.preset"}
    assert [ours for ours in CALLED.values() if ours not in known] == []
    rows = [row for heading in TABLES for row in table(heading)]
    named = [(name, ours) for theirs, ours in rows for name in theirs if name in CALLED]
    assert len(named) > 100
    assert [name for name, ours in named if CALLED[name] not in ours] == []
