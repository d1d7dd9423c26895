"""The page about models says what the registry says, and its figures are those of the files."""

import dataclasses
import re
from pathlib import Path

import pytest

from lmwright.models import KINDS
from lmwright.models.hf.over import OF_FILES
from lmwright.models.hf.table import Table
from lmwright.presets.table import models_command, models_table

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_table_of_the_registry(capsys):
    models_command()
    table = capsys.readouterr().out.strip()
    assert table == models_table() and all(f"| `{kind}` |" in table for kind in KINDS)
    page = (ROOT / "docs" / "models.md").read_text()
    assert table in page, "put the output of `lmwright models` into docs/models.md"


OF_CONFIG = (
    "name", "mark", "model_types", "weights", "body_prefix", "classifier", "answers", "body",
    "detector", "gguf_types", "keys", "optional", "pairs", "quantized", "own_head", "defaults",
    "own_defaults",
)  # fmt: skip


def test_what_a_table_says_of_files_holds_under_another_head_too():
    """A new attribute of `Table` is of files, or belongs here."""
    assert {*Table.__annotations__} == {*OF_FILES, *OF_CONFIG}


def test_the_page_about_adding_a_family_counts_right():
    page = (ROOT / "docs" / "internals" / "add-a-family.md").read_text()
    counted = re.findall(r"^\| `(\S+\.py)` \| (\d+) \|", page, re.M)
    assert len(counted) >= 2
    for path, lines in counted:
        assert len((ROOT / path).read_text().splitlines()) == int(lines), path
    total = int(re.search(r"^\| together \| (\d+) \|", page, re.M)[1])
    others = re.findall(r"^\| .* in `\S+` \| (\d+) \|", page, re.M)
    assert total == sum(int(n) for _, n in counted) + sum(map(int, others))


def test_the_page_shows_the_code_as_it_is():
    page = (ROOT / "docs" / "internals" / "add-a-family.md").read_text()
    code = {
        line.strip() for line in (ROOT / "src/lmwright/models/olmo2.py").read_text().split("\n")
    }
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)[:3]
    shown = [line.strip() for block in blocks for line in block.splitlines()]
    assert len(shown) > 20 and [line for line in shown if line not in code | {"...", ""}] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_the_parity_table(kind):
    """Each family of the registry is compared with transformers somewhere."""
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "parity").glob("*.py"))
    names = KINDS[kind].hf.architectures
    encoders = [f'"{name.removesuffix("ForMaskedLM")}"' for name in names]  # as tables name them
    assert any(name in tests for name in (*names, *encoders))


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_those_of_the_nearest_class_that_says_them(kind):
    """Of several bases, dataclasses take the first one's fields, also those that it only inherits
    from `Decoder`: another base's defaults are lost without a word."""
    order = KINDS[kind].__mro__
    for field in dataclasses.fields(KINDS[kind]):
        said = [base.__dict__[field.name] for base in order if field.name in base.__dict__]
        if field.default_factory is dataclasses.MISSING:
            assert said[:1] in ([], [field.default]), field.name
