"""Wrong arguments of the Python functions: a sentence that names the argument, never a traceback or
an option of the command line."""

import numpy as np
import pytest

import lmwright.api as lm
from lmwright.api.arguments import named_here
from tests.saved_run import save_run, tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = tiny_run(tmp_path_factory.mktemp("arguments"))
    save_run(made)
    return made


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda run: lm.launch("a", on="local:1", detach="no"), "'no' must be True or False"),
        (
            lambda run: lm.launch(run.dir, on="kaggle", failures="3"),
            "'3' must be a whole number",
        ),
        (lambda run: lm.launch(run.dir, on="local:1", bucket="gs://a"), "^bucket: has no effect"),
        (
            lambda run: lm.launch(run, on="local:1x1"),
            "Run: is not a file; give the path of a run f",
        ),
        (
            lambda run: lm.launch({"name": "a"}, on="local:1x1"),
            "dict: is not a file; give the path",
        ),
        (lambda run: lm.publish(run, "a/b", public="False"), "public: 'False' must be True or Fal"),
        (lambda run: lm.publish(run, "a/b", gguf=8), "gguf: 8 must be a list"),
        (lambda run: lm.publish(run, "a/b", dry_run=True, checkpoints="3"), "^checkpoints: there"),
        (lambda run: lm.plan(run, on="v5e-1", quick=np.zeros(2)), "quick: .* True or False"),
        (
            lambda run: lm.plan(run, on="any", finalists=2),
            "^finalists: .* search=True or",
        ),
        (lambda run: lm.evaluate(run, precision=np.zeros(2)), "precision: .* is not one of"),
        (lambda run: lm.evaluate_tasks(run, []), "^tasks: names none"),
        (lambda run: lm.compare_tasks({"a": 1}, "b"), "dict: does not name a model"),
        (lambda run: lm.load_run("a\0b"), "contains a NUL"),
        (lambda run: lm.load_run("\ud800"), "is not text, so"),
        (lambda run: lm.load_model(run, devices=999), "^devices=999: this machine has"),
        (lambda run: lm.generate(run, "a", on_text=3), "on_text: 3 must be a function"),
        (lambda run: lm.generate(run, "a", steps="9"), "steps: '9' must be a whole number"),
        (lambda run: lm.load_run(run, run), "^overrides: Run.{,99} must be a text$"),
    ],
)
def test_a_wrong_argument_is_named_as_python_names_it(call, told, run):
    with pytest.raises(lm.UserError, match=told) as error:
        call(run)
    assert "--" not in str(error.value)


def test_options_in_messages_are_arguments_and_commands_stay():
    assert named_here("leave out --max-rows, or run `lmwright eval A --max-rows 2`") == (
        "leave out max_rows, or run `lmwright eval A --max-rows 2`"
    )
    told = "write it with lmwright export A --dtype bf16; say --public, or --spot, or --disk a-1"
    assert named_here(told, {"public"}) == (
        'write it with lmwright export A --dtype bf16; say public=True, or capacity="spot", or '
        'disks="a-1"'
    )
