"""Run files: layers, where values come from, and the round trip through TOML."""

import json
import re
import tomllib
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmwright import presets
from lmwright.cli.main import main
from lmwright.config.load import dump_toml
from lmwright.config.run import Tokenizer
from lmwright.config.show import show
from lmwright.config.text import leaves, parse_override, read_toml
from lmwright.errors import UserError
from lmwright.formats.open import load_run, resolve_layers
from lmwright.optim.build import make_schedule

RUN_FILE = """\
# a comment, then a recipe
recipe = "quickstart"
name = "tiny"
dir = "runs/tiny"

[data]
dir = "data"

[[data.sources]]
path = "a.txt"

[[data.sources]]
path = "b.jsonl"
use = "eval"

[model]
qk_norm = "head"
rope_theta = 500000

[eval]
prompts = [
  "one # not a comment",
  'two = 2',
]
sample_tokens = 32
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return path


def test_layers_and_their_origin(run_file):
    overrides = ["train.steps=77", "data.sources.1.path=c.jsonl", "optim.schedule.warmup_steps=5"]
    run, origin = resolve_layers(run_file, overrides)
    assert run.train.steps == 77
    assert origin["train", "steps"] == "command line"
    assert [s.path for s in run.data.sources] == ["a.txt", "c.jsonl"]
    assert origin["data", "sources", 0, "path"] == f"{run_file}:10"
    assert origin["data", "sources", 1, "path"] == "command line"
    assert origin["data", "sources", 1, "use"] == f"{run_file}:14"
    assert origin["data", "sources", 1, "format"] == "default"
    assert run.model.qk_norm == "head"
    assert origin["model", "qk_norm"] == f"{run_file}:17"
    assert origin["model", "embed_dim"] == "preset llama-5m"
    assert origin["model", "bias"] == "default"
    assert run.model.rope_theta == 500000.0 and isinstance(run.model.rope_theta, float)
    assert origin["optim", "learning_rate"] == "recipe quickstart"
    assert run.optim.schedule.warmup_steps == 5
    assert run.eval.prompts == ("one # not a comment", "two = 2")
    assert origin["eval", "prompts"] == f"{run_file}:21"
    assert origin["eval", "sample_tokens"] == f"{run_file}:25"


def test_every_leaf_has_an_origin(run_file):
    run, origin = resolve_layers(run_file)
    known = {"default", "recipe quickstart", "preset llama-5m"}
    assert {label for label in origin.values() if label not in known} == {
        f"{run_file}:{line}" for line in (3, 4, 7, 10, 13, 14, 17, 18, 21, 25)
    }
    said = tomllib.loads(dump_toml(run))
    assert {keys for keys, _ in leaves(said)} == set(origin)


def test_a_preset_named_later_replaces_the_recipes_but_not_the_file(run_file):
    run, origin = resolve_layers(run_file, ["model.preset=llama-15m"])
    assert run.model.vocab_size == 32_000
    assert origin["model", "vocab_size"] == "preset llama-15m"
    assert run.model.qk_norm == "head"
    run_file.write_text(RUN_FILE.replace("[model]", '[model]\npreset = "llama-1m"'))
    smaller = "data.tokenizer.vocab_size=2048"
    assert load_run(run_file, [smaller]).model.vocab_size == 2048
    assert load_run(run_file, ["model.preset=llama-15m"]).model.vocab_size == 32_000


def test_another_recipe_from_the_command_line(run_file):
    overrides = ["recipe=pretrain", "train.steps=1000", "train.global_batch_size=8"]
    run, origin = resolve_layers(run_file, [*overrides, "model.preset=llama-1m",
                                            "data.tokenizer.vocab_size=2048"])  # fmt: skip
    assert run.objective.z_loss == 1e-4
    assert origin["objective", "z_loss"] == "recipe pretrain"


def test_another_kind_starts_its_section_anew(run_file):
    overrides = ["optim.learning_rate=1e-4", "optim.kind=lion"]
    for order in (overrides, overrides[::-1]):
        run, origin = resolve_layers(run_file, order)
        assert (run.optim.kind, run.optim.learning_rate) == ("lion", 1e-4)
        assert run.optim.schedule.warmup_steps == 0  # not the recipe's
        assert origin["optim", "schedule", "warmup_steps"] == "default"


def test_none_unsets_what_is_set_by_default(run_file):
    before = load_run(run_file)
    run = load_run(run_file, ["optim.clip_norm=none", "eval.max_rows=none"])
    assert before.optim.clip_norm == 1.0 and before.eval.max_rows is not None
    assert run.optim.clip_norm is None and run.eval.max_rows is None
    run_file.write_text(dump_toml(run))
    assert load_run(run_file) == run


def test_none_unsets_what_a_preset_sets(run_file):
    changes = ["model.preset=mistral-7b", "model.seq_len=4096"]
    run = load_run(run_file, changes)
    assert run.model.window == 4096
    run = load_run(run_file, [*changes, "model.window=none"])
    assert run.model.window is None
    run_file.write_text(dump_toml(run))
    assert load_run(run_file) == run


def test_a_run_directory_stands_for_its_run_file(run_file):
    assert load_run(run_file.parent) == load_run(run_file)


def test_show_is_a_run_file_of_the_same_run(run_file, tmp_path):
    run, origin = resolve_layers(run_file, ["optim.clip_norm=none", "data.workers=3"])
    again = tmp_path / "again.toml"
    for defaults in (False, True):
        text = show(run, origin, defaults=defaults)
        again.write_text(text)
        assert load_run(again) == run
        assert f"# {run_file}:17" in text and "# preset llama-5m" in text
        assert ("# default" in text) == defaults


def test_show_counts_what_it_leaves_out(run_file):
    run, origin = resolve_layers(run_file)
    every = show(run, origin, defaults=True)
    less = show(run, origin)
    count = re.search(r"^# (\d+) more have their defaults: --all$", less, re.M)
    assert int(count[1]) == every.count("# default") > 50
    values = [text.count(" = ") for text in (every, less)]
    assert values[0] - values[1] <= int(count[1])  # a kind stays with its table


def test_show_of_a_run_directory_says_what_is_not_a_default(run_file):
    folder = run_file.parent / "trained"
    folder.mkdir()
    run = load_run(run_file, [f"dir={folder}"])
    (folder / "run.toml").write_text(dump_toml(run))
    (folder / "env.json").write_text("{}")
    kept, origin = resolve_layers(folder, ["train.remat=none"])
    text = show(kept, origin)
    assert re.search(r'^remat = "none" +# command line$', text, re.M)
    assert "[limits]" not in text and "[limits]" in show(kept, origin, defaults=True)


def test_windows_line_ends_and_a_byte_order_mark(run_file):
    before = resolve_layers(run_file)
    run_file.write_bytes(b"\xef\xbb\xbf" + RUN_FILE.replace("\n", "\r\n").encode())
    assert resolve_layers(run_file) == before


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
POSITIVE = st.integers(1, 2**40)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=TEXT,
    seed=st.integers(0, 2**32 - 1),
    prompts=st.lists(TEXT, max_size=4),
    paths=st.lists(TEXT, max_size=3),
    rate=st.floats(1e-12, 1e6),
    kind=st.sampled_from(["adamw", "lion", "muon", "adafactor", "adam8bit"]),
    clip=st.none() | st.floats(1e-6, 1e6),
    keep=st.none() | POSITIVE,
)
def test_load_of_dump_is_the_same_run(
    run_file, tmp_path, name, seed, prompts, paths, rate, kind, clip, keep
):
    base = load_run(run_file, [f"optim.kind={kind}", "optim.learning_rate=1"])
    run = replace(
        base,
        name=name,
        seed=seed,
        optim=replace(base.optim, learning_rate=rate, clip_norm=clip),
        eval=replace(base.eval, prompts=tuple(prompts), max_rows=keep),
        data=replace(
            base.data,
            workers=keep,
            sources=tuple(replace(base.data.sources[0], path=path) for path in paths),
        ),
    )
    dumped = tmp_path / "dumped.toml"
    dumped.write_bytes(dump_toml(run).encode())
    assert load_run(dumped) == run


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tables=st.lists(
        st.tuples(
            st.sampled_from(["[{}]", "[[{}]]"]),
            st.lists(TEXT | st.lists(TEXT, max_size=2) | st.integers(), min_size=1, max_size=3),
        ),
        max_size=5,
    ),
    gap=st.sampled_from(["", "\n", "# a = 1\n", "\n# [x]\n\n"]),
)
def test_lines_point_at_the_keys(tmp_path, tables, gap):
    """Written out with every key unique, so that a search for its name finds the line."""
    text, count = gap, 0
    for number, (header, values) in enumerate(tables):
        array = header == "[[{}]]"
        text += header.format("shared" if array else f"table{number}") + "\n" + gap
        for value in values:
            items = value if isinstance(value, list) else [value]
            said = [json.dumps(v, ensure_ascii=False).replace("\x7f", "") for v in items]
            said = "[\n" + ",\n".join(said) + "]" if isinstance(value, list) else said[0]
            text += f"key{count:03} = {said}\n" + gap
            count += 1
    path = tmp_path / "lines.toml"
    path.write_text(text)
    values, lines = read_toml(path)
    found = [(keys, lines[keys]) for keys, _ in leaves(values)]
    assert len(found) == count
    for keys, line in found:
        assert text.split("\n")[line - 1].startswith(f"{keys[-1]} = ")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=3", 3),
        ("a.b=3e-4", 3e-4),
        ("a.b = none", "none"),
        ("a.b=runs/x=y", "runs/x=y"),
        ("a.b='3'", "3"),
        ("a.b=true", True),
        ("a.b=['x', 'y']", ["x", "y"]),
        ("a.b={c = 1}", {"c": 1}),
        ("a.b=2024-01-01", "2024-01-01"),
        ("a.b=1\nc=2", "1\nc=2"),
        ("a.b=", ""),
    ],
)
def test_override_values_are_toml_or_bare_words(text, value):
    keys, found = parse_override(text)
    assert keys == ("a", "b")
    assert found == value and type(found) is type(value)


def test_recipes_and_presets_hold_only_known_fields(run_file):
    for name in presets.all_recipes():
        encoders = {"encoder": "eurobert-210m", "modernbert": "modernbert-base"}
        encoders |= {"diffusion": "llada-8b", "classifier": "eurobert-210m"}
        encoders |= {"deberta": "deberta-v3-base", "regression": "modernbert-base"}
        encoders |= {"embedder": "modernbert-base", "tagger": "eurobert-210m",
                     "answers": "modernbert-base", "multilabel": "eurobert-210m",
                     "similarity": "eurobert-210m"}  # fmt: skip
        model = encoders.get(name.rpartition("-")[2], "llama-5m")
        given = ["train.steps=20000", "train.global_batch_size=8", f"model.preset={model}"]
        if model != "llama-5m":
            llama = ("qk_norm", "rope_theta")
            text = "".join(x for x in RUN_FILE.splitlines(True) if not x.startswith(llama))
            run_file.write_text(text)
            given += ["eval.prompts=[]"]
        rows = ["data.sources.0.rows=alpaca"] if name.endswith("alpaca") else []
        rows += (
            ['objective.labels=["a", "b"]']
            if name.endswith(("classifier", "multilabel", "tagger"))
            else []
        )
        load_run(run_file, [f"recipe={name}", *given, *rows])
    for name, function in presets.of_section("model").items():
        model = function()
        assert is_dataclass(model) and {f.name for f in fields(model)} >= {"kind"}
        assert function.__doc__ and name == name.lower()


@pytest.mark.parametrize(
    "words, said",
    [
        (["objective.generator_layers=13"], "makes the generator larger than the discriminator"),
        (["model.preset=modernbert-base"], "'rtd' has no head for 'modernbert'"),
        (["model.preset=llama-5m"], "'rtd' needs a model that looks both .* 'deberta'"),
        (["lora.kind=lora"], "lora: objective.kind = 'rtd' trains two models whole"),
        (["objective.generator_from=hf"], "objective.generator_from: hf has no effect without"),
        (["objective.kind=mlm", "optim.clip_over=part"], "optim.clip_over: .* trains one model"),
    ],
)
def test_what_does_not_go_with_two_models(words, said, tmp_path):
    path = tmp_path / "run.toml"
    text = 'recipe = "pretrain-deberta"\nname = "t"\ndir = "run"\ndata.dir = "data"\n'
    if not words[0].startswith("model"):
        text += 'model.preset = "deberta-v3-base"\n'
    path.write_text(text + "train.steps = 20000\ntrain.global_batch_size = 8\n")
    with pytest.raises(UserError, match=said) as error:
        load_run(path, words)
    assert "\n" not in str(error.value)


def test_how_a_recipe_trains_a_tokenizer_is_left_out_where_one_is_imported(tmp_path):
    path = tmp_path / "run.toml"
    text = 'recipe = "pretrain-encoder"\nname = "t"\ndir = "run"\nmodel.preset = "eurobert-210m"\n'
    text += '[data]\ndir = "data"\n[train]\nsteps = 20000\nglobal_batch_size = 8\n'
    path.write_text(text)
    assert "<|mask|>" in load_run(path).data.tokenizer.special_tokens
    imported = load_run(path, ["data.tokenizer.path=tok"]).data.tokenizer
    assert imported == Tokenizer(path="tok")
    with pytest.raises(UserError, match=r"special_tokens: has no effect beside"):
        load_run(path, ["data.tokenizer.path=tok", 'data.tokenizer.special_tokens=["<|x|>"]'])


def test_the_example_of_deberta_is_a_run(tmp_path):
    page = Path(__file__).parents[1] / "docs" / "deberta.md"
    path = tmp_path / "run.toml"
    path.write_text(page.read_text().split("```toml\n")[1].split("```")[0])
    run = load_run(path)
    assert run.objective.kind == "rtd" and run.objective.detector_weight == 10
    assert run.optim.schedule.warmup_steps == 30


def test_the_example_of_the_docs_is_a_run(tmp_path):
    page = Path(__file__).parents[1] / "docs" / "config.md"
    path = tmp_path / "run.toml"
    path.write_text(page.read_text().split("```toml\n")[1].split("```")[0])
    run, origin = resolve_layers(path, ["train.steps=2000"])
    assert origin["model", "qk_norm"] == f"{path}:13"  # as the page shows
    assert run.train.steps == 2000


@pytest.mark.parametrize("steps, warmup", [(1, 0), (4, 1), (25, 2), (30, 3), (31, 30)])
def test_a_short_trial_fits_the_warm_up_of_a_recipe_and_says_so(
    run_file, tmp_path, monkeypatch, capsys, steps, warmup
):
    monkeypatch.chdir(tmp_path)
    optim = load_run(run_file, [f"train.steps={steps}"]).optim
    assert optim.schedule.warmup_steps == warmup
    make_schedule(optim, steps)  # which refuses what does not fit
    assert main(["train", str(run_file), f"train.steps={steps}"]) == 2  # nothing is prepared
    notes = capsys.readouterr().err.splitlines()[:-1]
    if warmup == 30:
        assert not notes
    else:
        said = "warmup_steps: the 30 of recipe quickstart do not fit into train.steps ="
        assert len(notes) == 1 and said in notes[0] and notes[0].endswith(f"using {warmup}")


@pytest.mark.parametrize("steps, warmup, cooldown", [(4, 1, 2), (900, 90, 809), (6000, 3000, 2000)])
def test_a_short_trial_fits_the_cool_down_of_a_recipe(run_file, steps, warmup, cooldown):
    said = ["recipe=pretrain-xlstm", "model.preset=llama-1m", "train.global_batch_size=8"]
    optim = load_run(run_file, [*said, f"train.steps={steps}"]).optim
    assert (optim.schedule.warmup_steps, optim.schedule.cooldown_steps) == (warmup, cooldown)
    make_schedule(optim, steps)  # which refuses what does not fit
