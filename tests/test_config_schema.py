"""The JSON schema of run files, with which editors complete and check them."""

import json
import tomllib
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from lmwright import presets
from lmwright.cli.main import main
from lmwright.config.fields import all_sections, field_types
from lmwright.config.run import Run
from lmwright.formats.open import RUN_FILES, run_schema

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_schema_describes_every_field():
    schema = run_schema()
    json.dumps(schema)
    defined = schema["$defs"]
    for cls in all_sections(RUN_FILES.kinds):
        about = schema if cls is Run else defined[cls.__name__]
        assert set(field_types(cls)) <= set(about["properties"])
        assert about["additionalProperties"] is False
    assert schema["properties"]["recipe"]["enum"] == list(presets.all_recipes())
    assert "llama-5m" in defined["Llama"]["properties"]["preset"]["enum"]
    steps = defined["Train"]["properties"]["steps"]
    clip, workers = defined["AdamW"]["properties"]["clip_norm"], defined["Data"]["properties"]
    assert {"const": "none"} in clip["anyOf"] and "null" not in json.dumps(schema)
    assert workers["workers"]["anyOf"] == [
        {"exclusiveMaximum": 2**63, "exclusiveMinimum": 0, "type": "integer"},
        {"const": "none"},
    ]
    assert {"const": "none"} not in defined["Tokenizer"]["properties"]["path"]["anyOf"]
    assert steps["anyOf"][0]["exclusiveMinimum"] == 0
    assert "Optimizer steps" in steps["description"]


@pytest.fixture(scope="module")
def problems():
    """What the printed schema has against the text of a run file."""
    jsonschema = pytest.importorskip("jsonschema")
    with redirect_stdout(StringIO()) as printed:
        assert main(["config", "schema"]) == 0
    schema = json.loads(printed.getvalue())
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    return lambda text: [error.message for error in check.iter_errors(tomllib.loads(text))]


def test_every_example_is_valid(problems):
    files = sorted(EXAMPLES.rglob("*.toml"))
    assert {path.name: problems(path.read_text()) for path in files} == {
        path.name: [] for path in files
    }


@pytest.mark.parametrize(
    "text, said",
    [
        ('[sweep.grid]\n"train.steps" = 3', "3 is not of type 'array'"),
        ("[[sweep.cases]]\n'train.steps' = 3\nseed = 1", "'name' is a required property"),
        ("[sweep]\ngird = {}", "('gird' was unexpected)"),
        ("[swep]", "('swep' was unexpected)"),
    ],
)
def test_what_no_run_file_may_hold(problems, text, said):
    assert any(said in problem for problem in problems(text))
