"""Every way to get a run file wrong ends in one sentence: where, what, and the cure."""

from dataclasses import replace
from typing import Literal

import pytest

from lmwright.cli.main import main
from lmwright.config.rows import HELD_AS, LEARNED_BY, TEXTS
from lmwright.config.run import PositiveInt, section
from lmwright.core.contract import Objective
from lmwright.errors import UserError
from lmwright.formats.open import RUN_FILES, load_run
from lmwright.objectives import KINDS

RUN_FILE = """\
recipe = "quickstart"
name = "tiny"
dir = "runs/tiny"
[data]
dir = "data"
[[data.sources]]
path = "a.txt"
"""


def said(tmp_path, text, *overrides, load=load_run):
    """The message, with the file's folder taken out."""
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.step=3", ["train.step is not a field", "'steps'"]),
        ("train.kind=x", ["train.kind is not a field", "the fields here are"]),
        ("data.tokenizer.kind=byte", ["data.tokenizer.kind is not a field", "path"]),
        ("trian.steps=3", ["trian is not a field", "'train'"]),
        ("data.sources.0.pth=x", ["data.sources.0.pth", "'path'"]),
        ("model.embeddim=3", ["model.embeddim is not", "'embed_dim'"]),
        ("optim.schedule.warmup=3", ["optim.schedule.warmup is", "'warmup_steps'"]),
        ("train.steps=3.5", ["train.steps must be an integer, not 3.5"]),
        ("train.steps='3'", ["an integer, not '3'", "without quotes"]),
        ("train.steps=true", ["train.steps must be an integer, not true"]),
        ("train.steps=0", ["train.steps must be a number above 0, not 0"]),
        ("seed=4294967296", ["seed must be a number below 4294967296, not 4294967296"]),
        ("model.num_layers=2147483648", ["model.num_layers must be a number of at most 10000"]),
        ("seed=-1", ["seed must be a number of at least 0, not -1"]),
        ("train.ema_decay=1.0", ["train.ema_decay must be a number below 1"]),
        ("optim.learning_rate=nan", ["optim.learning_rate", "not nan"]),
        ("optim.clip_norm=off", ["optim.clip_norm must be a number, not 'off'"]),
        ("name=3", ["name must be text, not 3", "'\"3\"'"]),
        ("train=3", ["train must be a table, not 3"]),
        ("train.precision=bf32", ["one of fp32, bf16", "not 'bf32'", "did you mean"]),
        ("mesh.fsdp=all", ["mesh.fsdp must be an integer or 'rest', not 'all'"]),
        ("mesh.fsdp=0", ["mesh.fsdp must be a number above 0, not 0"]),
        ("eval.prompts=x", ["eval.prompts must be a list, not 'x'"]),
        ("eval.prompts=['a', 3]", ["eval.prompts.1 must be text, not 3"]),
        ("optim.kind=lino", ["optim.kind: no kind 'lino'", "'lion'", "adamw, adam8bit"]),
        ("optim.schedule.kind=cos", ["optim.schedule.kind", "'cosine'", "constant, linear"]),
        ("optim.kind=lion", ["optim.learning_rate is missing", "add optim.learning_rate="]),
        ("objective.kind=tag", ["objective.labels is missing", '["O", "B-PER", "I-PER"]']),
        ("objective.kind=classify", ["labels is missing", '["negative", "positive"]']),
        ("optim.schedule.kind=wsd", ["decay_steps is missing", "decay_steps=100 there"]),
        ("model.preset=llama-5n", ["model.preset", "'llama-5n'", "'llama-5m'"]),
        ("model.preset=gemma3", ["did you mean one of gemma3-1b, gemma3-4b, gemma3-12b,"]),
        ("recipe=quick", ["recipe: there is no 'quick'", "'quickstart'"]),
        ("recipe=3", ["recipe: there is no 3", "quickstart, pretrain"]),
        ("model.preset=3", ["there is no 3; `lmwright config presets` lists all"]),
        ("data.sources.4.path=x", ["data.sources is a list of 1"]),
        ("data.sources.path=x", ["as in data.sources.0"]),
        ("train.steps.x=3", ["train.steps is a value without fields"]),
        ("data.0.x=3", ["data is not a list"]),
    ],
)
def test_a_bad_override_is_named(tmp_path, override, parts):
    message = said(tmp_path, RUN_FILE, override)
    assert message.startswith("command line: ")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "text", ["train.steps", "--train.steps=3", "=3", "a b=3", "eval.prompts=[a"]
)
def test_what_is_no_override_says_how_to_write_one(tmp_path, text):
    message = said(tmp_path, RUN_FILE, text)
    assert message.startswith(repr(text)) and (
        "section.field=value" in message or "['a'" in message
    )


@pytest.mark.parametrize(
    ("text", "start", "parts"),
    [
        (RUN_FILE + 'pth = "x"\n', "run.toml:8: ", ["data.sources.0.pth", "'path'"]),
        (RUN_FILE + "[trian]\nsteps = 3\n", "run.toml:8: ", ["trian is not a field", "'train'"]),
        (RUN_FILE + "[train]\n\nsteps = '3'\n", "run.toml:10: ", ["train.steps must be"]),
        (RUN_FILE + "[mesh]\ndata = 1979-05-27\n", "run.toml:9: ", ["mesh.data is a date"]),
        (RUN_FILE + "[[mesh]]\ndata = 1\n", "run.toml:9: ", ["mesh must be a table"]),
        (RUN_FILE + "[[data.sources]]\n", "run.toml:8: ", ["data.sources.1.path is missing"]),
        (RUN_FILE.replace('dir = "data"', ""), "run.toml:4: ", ["data.dir is missing"]),
        (RUN_FILE.replace("quickstart", "quickstrat"), "run.toml:1: ", ["'quickstart'"]),
        ("name = foo\n", "run.toml:1: ", ["not valid TOML", "text needs quotes"]),
        (RUN_FILE + "[train]\nremat = 'full'\n", "run.toml:9: ", ["others call 'full' is 'block'"]),
        (RUN_FILE + "[train]\nema = 0.9\n", "run.toml:9: ", ["did you mean 'ema_decay'?"]),
        (RUN_FILE + "[optim]\nlr = 1e-4\n", "run.toml:9: ", ["did you mean 'learning_rate'?"]),
        ('name = "foo\na = 2\n', "run.toml:1: ", ["not valid TOML", "a quote is not closed"]),
        ("train = {steps = 3,\n", "run.toml:1: ", ["not valid TOML", "stands on one line"]),
        ("train = {steps = 3,}\n", "run.toml:1: ", ["without a comma at its end"]),
        ("a = 1\na = 2\n", "run.toml:2: ", ["not valid TOML", "given twice"]),
        ("a = 1\nb = [1,\n", "run.toml:3: ", ["not valid TOML", "not closed"]),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, text, start, parts):
    message = said(tmp_path, text)
    assert message.startswith(start)
    for part in parts:
        assert part in message


def test_all_errors_of_a_file_are_said_at_once(tmp_path):
    path = tmp_path / "run.toml"
    text = RUN_FILE.replace("[data]", "[modle]\nvocab_size = 512\n[data]").replace('"tiny"', "3")
    path.write_text(text + "[optim]\nclip_norm = 'off'\n[train]\nstpes = 3\n")
    with pytest.raises(UserError) as caught:
        load_run(path, ["seed=-1"])
    first, *lines = str(caught.value).replace(f"{tmp_path}/", "").splitlines()
    assert first == "5 errors in the run:"
    starts = (
        "run.toml:4: modle",
        "run.toml:13: train.stpes",
        "run.toml:2: name",
        "run.toml:11: optim",
    )
    for start in (*starts, "command line: seed"):
        assert any(line.strip().startswith(start) for line in lines), start


def test_sizes_of_a_family_are_not_to_come_from_a_preset_of_another(tmp_path):
    (tmp_path / "run.toml").write_text(RUN_FILE)
    with pytest.raises(UserError) as caught:
        load_run(tmp_path / "run.toml", ["model.kind=gemma"])
    said = str(caught.value)
    assert "mlp_dim is missing; set it, or a preset of a gemma model, if `lmwright models` " in said
    assert "llama" not in said


def test_a_field_that_is_there_under_a_misspelt_name_is_not_missing_too(tmp_path):
    text = RUN_FILE.replace('recipe = "quickstart"\n', "").replace("name", "nmae")
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_run(path)
    assert "nmae is not a field; did you mean 'name'?" in str(caught.value)
    assert "name is missing" not in str(caught.value)


@pytest.mark.parametrize(
    "override, named",
    [
        (
            "objective.mask_ratio=2",
            "command line: objective.mask_ratio must be a number of at most",
        ),
        ("objective.mask_ratio=x", "objective.mask_ratio must be a number or a table, not 'x'"),
        ("objective.mask_ratio={start=0.5, end=2}", "objective.mask_ratio.end must be a number of"),
        (
            "objective.mask_ratio={start=0.5, und=0.2}",
            "mask_ratio.und is not a field; did you mean",
        ),
        ("objective.mask_ratio={start=0.5}", "objective.mask_ratio.end is missing"),
        (
            "objective.mask_ratio={start=0.5, end=0.5}",
            "objective.mask_ratio.end: 0.5 equals start",
        ),
    ],
)
def test_a_number_that_may_be_a_table(tmp_path, override, named):
    text = RUN_FILE.replace("quickstart", "pretrain-encoder")
    text += '[model]\npreset = "eurobert-210m"\n[train]\nsteps = 9000\nglobal_batch_size = 8\n'
    assert named in said(tmp_path, text, override)


def test_sections_that_contradict_each_other_are_said_at_once(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    with pytest.raises(UserError) as caught:
        load_run(path, ["data.pack.seq_len=513", "plan.prices={v9=1}"])
    message = str(caught.value)
    assert message.startswith("2 errors in the run:")
    assert "data.pack.seq_len: " in message and "plan.prices.v9: " in message


def test_a_yaml_file_is_told_that_run_files_are_toml(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  steps: 3\n")
    with pytest.raises(UserError, match="run files are TOML, not YAML"):
        load_run(path)


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(UserError, match="no such run file"):
            load_run(path)
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"name = '\xff'\n")
    with pytest.raises(UserError, match="byte 8 is not UTF-8"):
        load_run(bad)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["train.steps=10", "optim.schedule.warmup_steps=30"], "30 steps do not fit into"),
        (["optim.schedule={kind='wsd', warmup_steps=200, decay_steps=200}"], "before 200 of decay"),
        (["data.pack.seq_len=513"], "data.pack.seq_len: 513 is longer than model.seq_len = 512"),
        (["data.pack.seq_len=1"], "data.pack.seq_len: a row of 1 token leaves nothing to predict"),
        (["mesh.data=rest"], "are both 'rest'"),
        (["lora.targets=['q_prj']"], "lora.targets: 'q_prj' matches no weight; there are: all, "),
        (["checkpoint.keep_every_steps=75"], "checkpoint.keep_every_steps: 75 is not a multiple"),
        (
            ["model.preset=llama-1m", "data.tokenizer.vocab_size=4096"],
            "data.tokenizer.vocab_size: 4096 is more than",
        ),
        (["data.tokenizer.special_tokens=['a', 'a']"], "special_tokens"),
        (["data.tokenizer={path='x', train='unigram'}"], "data.tokenizer.train: has no effect"),
        (["data.sources.0={path='x', use='eval', weight=2}"], "weight: has no effect"),
        (["data.sources=[{path='x', name='a'}, {path='y', name='a'}]"], "sources.1.name: 'a'"),
        (["data.sources.0={path='x', format='csv', documents='line'}"], "documents: has no effect"),
        (["data.sources.0={path='x', min_tokens=6, max_tokens=5}"], "min_tokens: 6 is above"),
        (
            ["data.normalize.dedup=exact", "data.sources=[{path='x', min_tokens=6}, {path='x'}]"],
            'data.normalize.dedup: "exact" keeps the documents',
        ),
        (["data.sources.0.sample_tokens=6"], "sources.0.sample_tokens: its tokens cannot be"),
        (
            ["model.preset=moe-6m", "train.mlp_chunk_tokens=8", "train.remat=block"],
            "train.mlp_chunk_tokens: has no effect on a qwen3-moe model",
        ),
        (
            ["data.sources.0={path='x', rows='messages'}", "data.pack.method=chunk"],
            'data.pack.method: "chunk" cuts examples',
        ),
        (
            [
                "data.sources.0={path='x', rows='messages'}",
                "data.pack={method='best-fit', attention='row'}",
            ],
            'data.pack.attention: "row" lets an example see',
        ),
        (["model.num_kv_heads=3"], "not a multiple of model.num_kv_heads = 3"),
        (["dir="], "dir: is empty"),
        (["data.dir="], "data.dir: is empty"),
        (
            ["train.init_from=x", "data.tokenizer.vocab_size=500"],
            "data.tokenizer: would be trained here, but the weights of train.init_from = 'x'",
        ),
    ],
)
def test_sections_that_contradict_each_other(tmp_path, overrides, part):
    assert part in said(tmp_path, RUN_FILE, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.steps=31"],  # one more than the warm-up
        ["optim.schedule={kind='wsd', warmup_steps=100, decay_steps=100}"],
        ["data.pack.seq_len=512"],
        ["mesh.data=rest", "mesh.fsdp=1"],
        ["checkpoint.keep_every_steps=150"],
        ["data.tokenizer.path=x"],
        ["data.sources.0={path='x', format='txt', documents='line', weight=2}"],
        ["data.sources.0={path='x', min_tokens=5, max_tokens=5}"],
        ["data.normalize.dedup=exact", "data.sources=[{path='x', min_tokens=6}, {path='y'}]"],
    ],
)
def test_the_edge_of_each_check_is_allowed(tmp_path, overrides):
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    load_run(path, overrides)


def teacher(**sizes):
    sizes = {"embed_dim": 8, "mlp_dim": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8} | sizes
    fields = "".join(f", {name} = {size}" for name, size in sizes.items())
    model = f"{{kind = 'llama', num_layers = 1{fields}}}"
    return f"objective={{kind = 'distill', teacher = 'x', teacher_model = {model}}}"


TWO = "lora={adapters = [{name = 'a'}, {name = 'b'}]}"


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (
            ["lora.rank=4", "train.head_gradient=once", "train.loss_chunk_tokens=8"],
            "head is frozen",
        ),
        (["lora={adapters=[{name='a'}, {name='a'}]}"], "lora.adapters: two have the name 'a'"),
        (["lora={init_from='x', adapters=[{name='a'}]}"], "lora.init_from: has no effect beside"),
        (["lora={adapters=[{name='a', rows=9}]}"], "lora.adapters.rows: 16 rows of train.global"),
        ([TWO, "train.skip_spikes=rollback"], 'train.skip_spikes: "rollback" goes back with all'),
        (["lora.dropout=0.1", "qat.weights=int4"], "lora: with [qat] the adapter is inside"),
        (["lora.init_from=x", "qat.weights=int4"], "lora.init_from: an adapter of PEFT has no"),
        (["objective.kind=dpo"], '"dpo" compares with the base; add a [lora] section'),
        (["objective.kind=kto"], '"kto" compares with the base; add a [lora] section'),
        (["objective.kind=dpo", "lora.rank=4", "qat.weights=int4"], 'qat: objective.kind = "dpo"'),
        (["objective.kind=distill"], "objective.teacher: is missing; name a model"),
        (["objective.kind=distill", "qat.weights=int4"], "there is no train.init_from to learn"),
        ([teacher(vocab_size=64, seq_len=512)], "objective.teacher: predicts 64 tokens and the"),
        ([teacher(vocab_size=8192, seq_len=64)], "objective.teacher: is built for rows of 64 tok"),
    ],
)
def test_kinds_refuse_what_does_not_go_with_them(tmp_path, overrides, part):
    assert part in said(tmp_path, RUN_FILE, *overrides)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["objective.kind=embed", TWO], "lora.adapters: objective.kind = 'embed' compares all"),
        (["objective.kind=answer", "data.pack.seq_len=128"], "objective.window_tokens: 384 are"),
        (["objective.kind=answer", "data.normalize.unicode=nfc"], "data.normalize.unicode: 'nfc'"),
    ],
)
def test_objectives_of_encoders_do_so_too(tmp_path, overrides, part):
    text = RUN_FILE.replace("quickstart", "pretrain-encoder")
    text += '[model]\npreset = "modernbert-base"\n[train]\nsteps = 9000\nglobal_batch_size = 8\n'
    assert part in said(tmp_path, text, *overrides)


def test_blocks_are_compared_with_the_rows_of_a_run(tmp_path):
    text = RUN_FILE.replace("quickstart", "pretrain-diffusion")
    text += '[model]\npreset = "llada-8b"\n[train]\nsteps = 9000\nglobal_batch_size = 8\n'
    told = said(tmp_path, text, "objective.block_tokens=64", "data.pack.seq_len=64")
    assert "objective.block_tokens: 64 is not below the 64 tokens of a row" in told


def test_what_a_training_would_refuse_is_refused_where_a_run_is_shown(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE + "min_tokens = 9\nmax_tokens = 8\n[objective]\nkind = 'distill'\n")
    assert main(["config", "show", str(path)]) == 2
    told = capsys.readouterr().err
    assert "2 errors in the run:" in told
    assert "objective.teacher: is missing" in told and "sources.0.min_tokens: 9 is above" in told


def test_objectives_are_named_by_what_they_learn_from():
    named = {kind: words for words, kinds in LEARNED_BY.items() for kind in kinds}
    assert named == {kind: objective.learns_from for kind, objective in KINDS.items()}
    assert {words for held in HELD_AS.values() for words in held} | {TEXTS} == set(LEARNED_BY)


@section
class Square(Objective):
    kind: Literal["square"] = "square"
    side: PositiveInt


@section
class Round(Objective):
    kind: Literal["round"] = "round"
    radius: PositiveInt
    center: tuple[float, float] = (0.0, 0.0)


SHAPES = replace(
    RUN_FILES, kinds={**RUN_FILES.kinds, "objective": {"square": Square, "round": Round}}
)


def test_several_kinds_of_any_registry(tmp_path):
    text = RUN_FILE.replace('recipe = "quickstart"\n', "")
    text += '[model]\npreset = "llama-5m"\n[optim]\nkind = "lion"\nlearning_rate = 1e-4\n'
    text += "[train]\nsteps = 3\nglobal_batch_size = 2\n[objective]\n"
    path = tmp_path / "run.toml"
    path.write_text(text + 'kind = "round"\nradius = 3\ncenter = [1, 2.5]\n')
    assert SHAPES.load(path).objective == Round(radius=3, center=(1.0, 2.5))
    assert SHAPES.load(path, ["objective.kind=square", "objective.side=4"]).objective == Square(
        side=4
    )

    def told(more):
        return said(tmp_path, text + more, load=SHAPES.load)

    assert 'add kind = "square" or "round" in [objective]' in told("radius = 3\n")
    assert "'radius'" in told('kind = "round"\nraduis = 3\n')
    assert "objective.side is not a field" in told('kind = "round"\nradius = 3\nside = 3\n')
    assert "objective.center must be" in told('kind = "round"\nradius = 3\ncenter = 3\n')
    assert "objective.center.1 is missing" in told('kind = "round"\nradius = 3\ncenter = [3]\n')
