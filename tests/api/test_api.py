"""The Python functions: the whole way of a run gives what the commands print and write, and each
option of a command is a parameter."""

import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import MappingProxyType

import click
import numpy as np
import pytest

import lmwright.api as lm
from lmwright.cli import cloud, data, models, runs
from lmwright.cli.main import main
from lmwright.config.load import dump_toml
from lmwright.models.eurobert import EuroBert
from lmwright.objectives.mlm import Mlm
from lmwright.train.hooks import Hook
from tests.labeled_run import PAIRS, SIZES, TEXTS, labeled_run, prepared_run
from tests.saved_run import save_run

OF_TASKS = ("tasks", "shots", "limit", "chat", "data")
OF_LONG_TEXTS = {"by_position", "needle", "lengths", "depths", "tries", "seed"}
TEXT = "the cat sat on the mat, and the dog lay beside it. " * 40


def tables(root):
    """A run as a notebook writes it."""
    (root / "text.txt").write_text("\n".join(f"{i} {TEXT}" for i in range(40)))
    return {
        "recipe": "pretrain",
        "name": "small",
        "dir": root / "run",
        "model": {"preset": "llama-5m", "vocab_size": 300, "seq_len": 64, "num_layers": 2},
        "data": {
            "dir": root / "data",
            "sources": [{"path": root / "text.txt"}],
            "tokenizer": {"vocab_size": 300},
            "holdout_fraction": 0.1,
            "workers": 1,
        },
        "train": {"steps": 6, "global_batch_size": 8, "precision": "fp32"},
        "metrics": {"trackers": ()},
    }


class Seen(Hook):
    """Counts the moments of a session."""

    def __init__(self):
        self.moments = Counter()

    def after_step(self, session, step):
        self.moments["step"] += 1

    def after_evaluate(self, session, step):
        self.moments["evaluate"] += 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("api")
    run = lm.load_run(tables(root), "optim.learning_rate=1e-2")
    made = lm.prepare(run)
    assert made.dir == run.data.dir and "shuffle" in made.stages
    seen = Seen()
    outcome = lm.train(run, hooks=[seen])
    assert (outcome.step, outcome.exit_code) == (6, 0)
    assert seen.moments == {"step": 6, "evaluate": 1}
    return run


def shown(capsys, *words):
    """Output of a command."""
    capsys.readouterr()
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_a_run_is_the_same_from_tables_a_file_and_its_directory(trained, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(trained))
    assert lm.load_run(file) == lm.load_run(trained.dir) == trained
    assert lm.train(trained.dir).step == 6  # is done
    file.write_text(file.read_text() + '[sweep.grid]\n"optim.learning_rate" = [1e-3, 1e-2]\n')
    assert lm.prepare(file).dir == trained.data.dir
    assert lm.sweep(file, dry_run=True) == 0


def test_a_run_that_was_changed_is_read_again(trained, tmp_path):
    assert lm.load_run(trained, "train.steps=9").train.steps == 9
    for part, told in (
        (replace(trained.train, steps="9"), "train.steps must be an integer, not '9'"),
        (replace(trained.train, steps=0), "train.steps must be"),
    ):
        with pytest.raises(lm.UserError, match=told):
            lm.plan(replace(trained, train=part), on="v5e-1", quick=True)
    moved = replace(trained, dir=tmp_path / "other")
    assert lm.train(moved).step == 6 and lm.load_model(moved).step == 6


def test_a_recipes_warm_up_is_fitted_when_the_data_or_the_length_is_known(tmp_path, capsys):
    given = tables(tmp_path)
    del given["train"]["steps"]
    run = lm.load_run(given, "train.epochs=1")
    assert run.optim.schedule.warmup_steps == 500  # nothing is prepared
    lm.prepare(run)
    renamed = replace(run, name="other")
    assert lm.load_run(renamed) == lm.load_run(given | {"name": "other"}, "train.epochs=1")
    assert "the 500 of recipe pretrain do not fit into the" in capsys.readouterr().err
    lm.load_run(lm.load_run(renamed))
    assert capsys.readouterr().err.count("do not fit") == 1  # of the same run, it is told once
    short = replace(run, train=replace(run.train, epochs=None, steps=20))
    assert lm.load_run(lm.load_run(short), "train.steps=10").optim.schedule.warmup_steps == 1
    own = replace(run.optim, schedule=replace(run.optim.schedule, warmup_steps=300))
    with pytest.raises(lm.UserError, match="warmup_steps: 300 steps do not fit"):
        lm.load_run(replace(short, optim=own))


def test_a_plan_is_that_of_the_command(trained, capsys):
    answer = lm.plan(trained, on="v5e-8", quick=True)
    told = shown(capsys, "plan", trained.dir, "--on", "v5e-8", "--quick", "--json")
    assert answer.fits and answer.figures == json.loads(told)
    assert str(answer) in shown(capsys, "plan", trained.dir, "--on", "v5e-8", "--quick")
    assert lm.plan("llama-15m", on="v5e-1", quick=True).figures["slice"] == "v5e-1"
    with pytest.raises(lm.UserError, match=r'^on: missing; .* on="v4-32", or on="any"'):
        lm.plan(trained)


def test_losses_are_those_of_the_command(trained, capsys):
    (held_out,) = lm.evaluate(trained.dir)
    record = lm.read_run(trained.dir)
    assert record.train["loss"].steps[-1] == 6 and record.name == "small"
    (curves,) = record.evals.values()
    assert curves["loss"].values[-1] == pytest.approx(held_out.loss)
    assert f"{held_out.loss:.4f}" in shown(capsys, "eval", trained.dir)
    file = trained.data.sources[0].path
    (of_text,) = lm.evaluate(trained.dir, text=file, context=32, max_chars=900)
    words = ("--text", file, "--context", "32", "--max-chars", "900")
    assert f"{of_text.loss:.4f}" in shown(capsys, "eval", trained.dir, *words)
    with pytest.raises(lm.UserError, match="context: has no effect without text"):
        lm.evaluate(trained.dir, context=32)


def test_texts_are_those_of_the_command(trained, capsys):
    options = {"max_new_tokens": 9, "temperature": 0.7, "seed": 4}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    told = shown(capsys, "generate", trained.dir, "--prompt", "the cat", *words)
    loaded = lm.load_model(trained.dir)
    for model in (trained.dir, loaded, loaded):  # which keeps its weights
        (one,) = lm.generate(model, "the cat", **options)
        assert told == f"the cat{one.text}\n" and len(one.tokens) == 9
    told = {0: "", 1: ""}
    two = lm.generate(
        loaded, ["the", "a dog"], max_new_tokens=3,
        on_text=lambda number, text: told.update({number: told[number] + text}),
    )  # fmt: skip
    assert [*told.values()] == [each.text for each in two]
    with pytest.raises(lm.UserError, match="give it to load_model"):
        lm.generate(loaded, "a", adapter="b")
    with pytest.raises(lm.UserError, match="has no chat template"):
        lm.generate(loaded, "a", chat=True)


def test_a_written_model_is_the_run(trained, tmp_path):
    assert lm.export(trained.dir, tmp_path / "hf").source_to_folder.greedy_agreement == 1
    assert lm.verify(trained.dir, tmp_path / "hf").same
    lm.import_model(tmp_path / "hf", tmp_path / "again", "seq_len=128")
    assert lm.load_model(tmp_path / "again").model.seq_len == 128
    assert lm.report(trained.dir, out=tmp_path / "page.html").read_text().startswith("<!")


@pytest.mark.parametrize("kind", ["classes", "vectors"])
def test_of_texts_is_what_the_commands_write(kind, tmp_path, capsys):
    model = EuroBert(**SIZES, mlp_dim=32)
    rows = [{"text": a, "other": b} for a, b in PAIRS]
    run = prepared_run(tmp_path, model, Mlm(mask_token_id=1), rows)
    if kind == "classes":
        run = labeled_run(tmp_path, model)
    save_run(run, steps=(4,))
    file, seconds = tmp_path / "texts.jsonl", [b for _, b in PAIRS[:7]]
    loaded = lm.load_model(run.dir)
    if kind == "vectors":
        told = shown(capsys, "embed", run.dir, str(file), "--dim", "4").splitlines()
        found = lm.embed(loaded, TEXTS[:50], dim=4)
        np.testing.assert_allclose(found, [json.loads(row)["embedding"] for row in told], rtol=1e-5)
        return
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:7]))
    for pairs, words in ((None, ()), (seconds, ("--pair-column", "other"))):
        told = map(json.loads, shown(capsys, "predict", run.dir, str(file), *words).splitlines())
        found = lm.predict(loaded, TEXTS[:7], pairs)
        assert found == [{k: v for k, v in row.items() if k not in ("row", "id")} for row in told]
    assert lm.predict(loaded, []) == []
    with pytest.raises(lm.UserError, match="pairs: 1 for 2 texts; give one for each"):
        lm.predict(loaded, TEXTS[:2], seconds[:1])


@pytest.mark.parametrize(
    ("function", "command", "apart"),
    [
        (lm.prepare, data.prepare, ()),
        (lm.plan, runs.plan, {"out", "json", "measured", "keep", "forget"}),
        (lm.train, runs.train, ()),
        (lm.sweep, runs.sweep, ()),
        (lm.report, runs.report, {"markdown"}),
        (lm.evaluate, models.evaluate, {*OF_LONG_TEXTS, *OF_TASKS, "out", "against"}),
        (lm.export, models.export, ()),
        (lm.import_model, models.import_, {"model", "tokenizer", "tied_logits"}),
        (lm.verify, models.verify, {"as_json"}),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)  # fmt: skip
def test_options_of_commands_are_parameters(function, command, apart):
    options = {p.name for p in command.params if isinstance(p, click.Option)} - set(apart)
    assert options <= set(inspect.signature(function).parameters)
    assert set(OF_TASKS) < set(inspect.signature(lm.evaluate_tasks).parameters)


def test_a_launch_is_that_of_the_command(trained, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(trained))
    told = shown(capsys, "launch", str(file), "--on", "local:2x4", "--dry-run", "--name", "a")
    assert lm.launch(file, on="local:2x4", dry_run=True, name="a") == 0
    without_port = lambda text: re.sub(r"127.0.0.1:\d+", "", text)  # noqa: E731
    assert without_port(capsys.readouterr().out) == without_port(told)
    with pytest.raises(lm.UserError, match=r"^zone: has no effect here"):
        lm.launch(file, on="local:2x4", zone="us-central2-b")
    assert {"zone", "capacity"} <= {p.name for p in cloud.launch.params}


def test_a_script_without_a_main_guard_and_a_notebook(trained, tmp_path):
    """Workers do not run the script again, and a notebook has an event loop that runs."""
    wanted = tables(tmp_path)
    wanted["data"]["workers"] = 2
    script = tmp_path / "script.py"
    script.write_text(
        f"import asyncio\nfrom pathlib import *\nimport lmwright.api as lm\nprint('once')\n"
        f"async def cell():\n    made = lm.prepare({wanted})\n"
        f"    print(made.stages, lm.load_model({trained.dir!r}).step)\n"
        "asyncio.run(cell())\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("once") == 1 and done.stdout.rstrip().endswith(" 6")


def test_a_wrong_run_says_where(tmp_path):
    wrong = tables(tmp_path)
    wrong["train"]["stpes"] = 3
    with pytest.raises(lm.UserError, match=r"^the run: train.stpes is not a field; did you mean"):
        lm.load_run(wrong)


def test_none_unsets_what_a_default_or_a_recipe_sets(tmp_path):
    run = tables(tmp_path) | {"optim": {"kind": "adamw", "learning_rate": 1e-3}}
    assert lm.load_run(run).optim.clip_norm == 1.0
    for none in (None, "none"):
        given = run | {"optim": run["optim"] | {"clip_norm": none}, "eval": {"max_rows": none}}
        found = lm.load_run(given)
        assert found.optim.clip_norm is None and found.eval.max_rows is None
    assert lm.load_run(run | {"lora": None, "plan": {"on": None}}).lora is None
    with pytest.raises(lm.UserError, match="learning_rate must be a number"):
        lm.load_run(run | {"optim": run["optim"] | {"learning_rate": None}})


@pytest.mark.parametrize("wrap", [lambda inner: {"a": inner}, lambda inner: [inner]])
def test_tables_nested_too_deeply_are_refused(wrap, tmp_path):
    deep = 1
    for _ in range(3000):
        deep = wrap(deep)
    with pytest.raises(lm.UserError, match=r"^the run: x.*: .* nested too deeply"):
        lm.load_run(tables(tmp_path) | {"x": deep})


def test_numbers_of_numpy_and_paths_are_values(tmp_path):
    plain, other = tables(tmp_path), tables(tmp_path)
    plain["train"]["steps"] = 7
    plain["optim"] = {"kind": "adamw", "learning_rate": 0.25, "beta2": 0.75}
    other["name"] = np.str_("small")
    other["train"]["steps"] = np.int64(7)
    optim = {"kind": "adamw", "learning_rate": np.array(0.25), "beta2": np.float32(0.75)}
    other["optim"] = MappingProxyType(optim)
    plain["eval"], other["eval"] = {"prompts": ["a", "b"]}, {"prompts": (*np.array(["a", "b"]),)}
    assert lm.load_run(other) == lm.load_run(plain)


def test_a_path_is_a_model_to_start_from_as_text_is(trained, tmp_path):
    start = {"steps": 2, "global_batch_size": 8, "init_from": trained.dir}
    plain = tables(tmp_path) | {"train": start}
    del plain["model"], plain["data"]["tokenizer"]
    other = plain | {"train": start | {"init_from": Path(trained.dir)}}
    assert lm.load_run(other) == lm.load_run(plain)


@pytest.mark.parametrize(
    ("section", "name", "value", "told"),
    [
        ("eval", "prompts", {"a"}, "eval.prompts is a value of type set, .*; give text,"),
        ("eval", "prompts", ["a", b"b"], "eval.prompts.1 is a value of type bytes"),
        ("eval", "prompts", [date(2026, 1, 1)], "eval.prompts.0 is a value of type date"),
        ("train", "steps", np.arange(2), "train.steps is a value of type ndarray"),
        ("optim", "kind", Mlm, "optim.kind is a value of type "),
        ("train", "steps", np.float32(2.5), "train.steps must be an integer, not 2.5"),
        ("train", 3, 1, "train.3: names of fields are text; put it in quotes"),
    ],
)
def test_what_no_run_file_can_hold_is_named(section, name, value, told, tmp_path):
    wrong = tables(tmp_path)
    wrong.setdefault(section, {})[name] = value
    with pytest.raises(lm.UserError, match=f"^the run: {told}"):
        lm.load_run(wrong)


def test_the_environment_is_set_before_jax_is_imported():
    code = (
        "import sys, os, lmwright.api\n"
        "assert 'jax' not in sys.modules and 'torch' not in sys.modules\n"
        "print(os.environ['TF_CPP_MIN_LOG_LEVEL'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda run: lm.evaluate(run, max_rows=-3), "max_rows: -3 must be at least 1"),
        (lambda run: lm.evaluate(run, text="a", context=0), "context: 0 must be at least 1"),
        (lambda run: lm.evaluate(run, kernels="fast"), "kernels: 'fast' is not one of"),
        (lambda run: lm.prepare(run, keep="none"), "keep: 'none' is not one of 'all', 'store'"),
        (lambda run: lm.train(run, rehearse=True), "rehearse: True is not one of"),
        (lambda run: lm.train(run, hooks=Seen()), "hooks: .* must be a list"),
        (
            lambda run: lm.train(run, hooks=[Seen]),
            "hooks: .* is not a hook; give an object of a class",
        ),
        (lambda run: lm.train(run, hooks=[print]), r"hooks: .* as in hooks=\[Mine\(\)\]"),
        (lambda run: lm.load_run(run, ["a=1"]), "overrides: .* each on its own"),
        (lambda run: lm.load_model(None), "NoneType: does not name a model"),
        (lambda run: lm.generate(None, "a"), "NoneType: does not name a model"),
        (lambda run: lm.embed({"dir": "a"}, "a"), "dict: does not name a model"),
        (lambda run: lm.evaluate(lm.load_model(run)), "a loaded model: .* give its path"),
        (lambda run: lm.generate(run, "a", temperature="0.8"), "temperature: '0.8' must be a num"),
        (lambda run: lm.generate(run, {"role": "user"}), "prompts: .* must be a list"),
        (lambda run: lm.generate(run, [[{"role": "user"}]]), "hold messages; add chat=True"),
        (lambda run: lm.generate(run, [1, 2]), "prompts: 1 must be a text"),
        (lambda run: lm.generate(run, "a", max_tokens=9), "max_tokens: .* 'max_new_tokens'"),
        (lambda run: lm.publish(run, "a/b", publc=True), "publc: is not an option; .* 'public'"),
        (lambda run: lm.launch(run.dir, on="local:1", detatch=True), "detatch: .* 'detach'"),
    ],
)
def test_a_wrong_argument_says_which(call, told, trained):
    with pytest.raises(lm.UserError, match=told):
        call(trained)


def test_a_parameter_that_is_not_there_names_the_function(trained):
    with pytest.raises(TypeError, match=r"^load_run\(\) got an unexpected .* 'steps'"):
        lm.load_run(trained, steps=3)


def test_one_text_is_a_list_of_one_and_any_iterable_a_list(trained):
    loaded = lm.load_model(trained)
    two = lm.generate(loaded, (text for text in ("the", "a")), max_new_tokens=np.int64(3))
    assert two == lm.generate(loaded, ["the", "a"], max_new_tokens=3)
    (whole,) = lm.generate(loaded, "the cat", max_new_tokens=40)
    (cut,) = lm.generate(loaded, "the cat", max_new_tokens=40, stop="zat the")
    assert cut.text == whole.text  # not at a t
    packed = lm.prepare(trained, stages="pack")
    assert set(packed.stages) == {"pack"}
    shown = repr(packed)  # what a notebook shows of a cell's last line
    assert "counts=" in shown and "xxh3" not in shown and len(shown) < 1000
