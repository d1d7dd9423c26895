"""Cures that the errors of a run file name: they are what helps there."""

import re
import shlex
from dataclasses import replace

import pytest
import tomli_w
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmwright.cli.main import main
from lmwright.config.elsewhere import ELSEWHERE
from lmwright.config.load import dump_toml
from lmwright.errors import UserError
from lmwright.formats.open import load_noted, load_run
from lmwright.formats.places import new_place
from lmwright.models.experts import Experts
from lmwright.models.hf import TABLES
from lmwright.models.llama import Llama
from lmwright.models.moe import Mixtral
from lmwright.nn.rope import LinearRope, YarnRope
from tests.in_memory import export_hf
from tests.labeled_run import SIZES
from tests.saved_run import weights_at

DECODER = Llama(mlp_dim=24, **SIZES)

RUN = {
    "name": "a",
    "dir": "runs/a",
    "model": {"preset": "llama-5m"},
    "optim": {"kind": "adamw", "learning_rate": 1e-3},
    "data": {"dir": "data"},
    "objective": {"kind": "clm"},
    "train": {"steps": 9, "global_batch_size": 8},
}


def told(tables, *overrides):
    with pytest.raises(UserError) as caught:
        load_run(tables, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    "override, cure",
    [
        ("num_layers=8", "did you mean model.num_layers?"),
        ("lr=1e-3", "did you mean optim.learning_rate?"),
        ("fsdp=8", "did you mean mesh.fsdp?"),  # of a section that the file does not have
        ("output_dir=x", "did you mean 'dir'?"),
        ("per_device_train_batch_size=4", "did you mean train.global_batch_size?"),
        ("train.micro_batch_size=4", "did you mean 'global_batch_size'?"),
        ("data.cutoff_len=64", "did you mean data.pack.seq_len?"),
        ("train.learning_rate=1e-3", "did you mean optim.learning_rate?"),
        ("optim.lr_scheduler=x", "did you mean optim.schedule.kind?"),
        ("lora_r=8", "did you mean lora.rank?"),
        ("train.packing=true", "leave it out, rows are always packed"),
        ("train.max_steps=9", "did you mean 'steps'?"),
        ("max_target_length=64", "did you mean model.seq_len?"),
        ("trian=3", "did you mean 'train'?"),
        ("data.tokenizer.vocab=9", "did you mean 'vocab_size'?"),
        ("data.tokenizer.special=9", "did you mean 'special_tokens'?"),
        ("optim.weight=9", "did you mean 'weight_decay'?"),
        ("eval.samp=9", "did you mean 'sample_tokens'?"),
    ],
)
def test_a_field_without_its_section_is_named_with_it(override, cure):
    assert told(RUN, override) == (
        f"command line: {override.partition('=')[0]} is not a field; {cure}"
    )


def test_a_size_of_heads_follows_from_the_others():
    """A preset would bring its own, unnoticed."""
    sizes = {"kind": "llama", "vocab_size": 300, "embed_dim": 96, "mlp_dim": 64, "num_layers": 2}
    run = RUN | {"model": sizes | {"num_heads": 4, "num_kv_heads": 2, "seq_len": 64}}
    assert told(run).endswith("model.head_dim is missing; add for example head_dim = 24 in [model]")
    assert "add for example head_dim = 64 in [model]" in told(run, "model.num_heads=10")
    assert 'add for example preset = "llama-5m" in [model]' in told(RUN | {"model": sizes})


def test_a_model_that_is_trained_already_is_not_to_change_its_kind(tmp_path):
    """Its weights would not fit the other."""
    export_hf(DECODER, weights_at(1, DECODER.spec()), None, tmp_path / "model")
    classes = {"recipe": "finetune-classifier", "objective": {"labels": ["a", "b"]}}
    run = {name: RUN[name] for name in ("name", "dir", "data", "train")} | classes
    cure = "name one that does in train.init_from"
    assert told(run, f"train.init_from={tmp_path}/model").endswith(cure)
    assert told(run, "model.preset=llama-5m").endswith("model.kind = 'modernbert'")


def test_a_setting_in_a_table_leaves_the_others_to_the_model_that_is_trained_on(tmp_path):
    experts = Experts(num_experts=4, experts_per_token=1, mlp_dim=8)
    scaled = YarnRope(factor=4.0, original_seq_len=16)
    model = Mixtral(**SIZES, experts=experts, rope_scaling=scaled)
    export_hf(model, weights_at(1, model.spec()), None, tmp_path / "model")
    run = {name: RUN[name] for name in ("name", "dir", "data", "optim", "objective")}
    run |= {"train": RUN["train"] | {"init_from": str(tmp_path / "model")}}
    balanced = load_run(run, ["model.experts.balance_loss=0.5"]).model
    assert balanced.experts == replace(experts, balance_loss=0.5)
    assert balanced.rope_scaling == scaled
    linear = load_run(run, ["model.rope_scaling={kind='linear', factor=2}"]).model
    assert linear.rope_scaling == LinearRope(factor=2.0) and linear.experts == experts


@pytest.mark.parametrize(
    "model, objective, override, cure",
    [
        ("llama-5m", "clm", "optim.kind=lion", "optim.learning_rate=0.001"),  # that of the file
        (
            "modernbert-base", "mlm", "objective.kind=classify",
            """'objective.labels=["negative", "positive"]'""",
        ),
    ],
)  # fmt: skip
def test_what_another_kind_on_the_command_line_leaves_out_is_to_be_said_there(
    model, objective, override, cure
):
    """In the file it would be left out again."""
    run = RUN | {"model": {"preset": model}, "objective": {"kind": objective}}
    assert re.findall("leaves nothing of .*; add (.*) there", told(run, override)) == [cure]
    found = load_run(run, [override, *shlex.split(cure)])
    assert found.optim.learning_rate == 1e-3


def test_a_kind_within_a_section_that_another_kind_has_emptied():
    """It is in the file, where it would be left out again."""
    optim = RUN["optim"] | {"schedule": {"kind": "linear", "warmup_steps": 2}}
    override = ["optim.kind=lion", "optim.learning_rate=0.001", "optim.schedule.warmup_steps=3"]
    run = RUN | {"optim": optim, "model": {"preset": "llama-5m"}}
    (cure,) = re.findall("leaves nothing of .*; add (.*) there", told(run, *override))
    assert cure == "optim.schedule.kind=linear"
    assert load_run(run, [*override, cure]).optim.schedule.warmup_steps == 3


def test_a_date_in_a_list_is_to_be_text(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(RUN) + "[eval]\nprompts = [1979-05-27]\n")
    assert "eval.prompts holds a date; put it in quotes" in told(str(file))
    assert "eval.prompts holds a date" in told(RUN, "eval.prompts=[1979-05-27]")


def test_places_below_the_users_home(monkeypatch, tmp_path):
    """Only a shell expands them, and not in a run file; sources are expanded, too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    run = load_run(RUN | {"dir": "~/runs/a", "data": {"dir": "~/data"}}, [])
    assert (run.dir, run.data.dir) == (f"{tmp_path}/runs/a", f"{tmp_path}/data")
    assert new_place("~/out") == tmp_path / "out"


def test_a_batch_that_does_not_divide_into_microbatches(tmp_path, capsys):
    """No device is needed to tell, so the commands that have none refuse it, too."""
    (tmp_path / "run.toml").write_text(tomli_w.dumps(RUN))
    for verb in (["config", "show"], ["prepare"]):
        assert main([*verb, str(tmp_path / "run.toml"), "train.num_microbatches=3"]) == 2
        assert capsys.readouterr().err.endswith(
            "train.global_batch_size: 8 rows do not divide into 3 microbatches; use a multiple of "
            "3 (nearest: 6 or 9)\n"
        )
    adapters = "lora.adapters=[{name='a', rows=6}, {name='b'}]"
    assert told(RUN, "train.num_microbatches=4", adapters).startswith(
        "lora.adapters.rows: 6 rows of 'a' do not divide into 4 microbatches; use a multiple of 4"
    )
    assert load_run(RUN, ["train.num_microbatches=2", adapters]).lora.rows_of(8) == {"a": 6, "b": 2}


def test_a_longer_or_shorter_run_keeps_the_warm_up_with_which_it_began(tmp_path):
    """Which a short trial had fitted to its steps; one that is said stays as it is said."""
    run = RUN | {"recipe": "pretrain", "dir": str(tmp_path), "model": {"preset": "llama-5m"}}
    run = {name: table for name, table in run.items() if name != "optim"}
    short = load_run(run, ["train.steps=100"])
    assert short.optim.schedule.warmup_steps == 10
    (tmp_path / "run.toml").write_text(dump_toml(short))
    longer, notes = load_noted(run, ["train.steps=2000"])
    assert longer.optim.schedule == short.optim.schedule
    assert notes == [
        "optim.schedule.warmup_steps: 10 instead of the 500 of recipe pretrain, as "
        f"{tmp_path} began"
    ]
    shorter = load_run(run, ["train.steps=60"])
    assert shorter.optim.schedule == short.optim.schedule
    assert load_run(run, ["train.steps=10"]).optim.schedule.warmup_steps == 1  # 10 do not fit
    said = load_run(run, ["train.steps=2000", "optim.schedule.warmup_steps=300"])
    assert said.optim.schedule.warmup_steps == 300
    other = load_run(run | {"dir": f"{tmp_path}/other"}, ["train.steps=2000"])
    assert other.optim.schedule.warmup_steps == 500


@pytest.mark.parametrize(
    ("tables", "place"),
    [
        ({"name": "a\ud800"}, "name: "),
        ({"a\ud800": 1}, ""),
        ({"data": {"dir": "\udcff"}}, "data.dir: "),
    ],
)
def test_tables_of_python_with_half_a_character_are_told(tables, place):
    assert re.fullmatch(rf"the run: {place}'.*' is not UTF-8 text; correct it", told(RUN | tables))


@pytest.mark.parametrize(
    ("value", "cure"),
    [("9" * 6000, "a number has too many digits"), ("[" * 6000, "lists or tables are nested too")],
)
def test_toml_that_python_does_not_read_is_told(value, cure, tmp_path):
    """Both gave a traceback."""
    assert told(RUN, f"train.steps={value}").startswith(f"command line: train.steps: {cure}")
    path = tmp_path / "run.toml"
    path.write_text(f"a = {value}{']' * value.count('[')}\n")
    assert told(path).startswith(f"{path}: {cure}")


@pytest.mark.parametrize("name", ["a." * 3000 + "a", "train." + "9" * 6000])
def test_names_of_thousands_of_parts_or_digits_are_told(name, tmp_path):
    """They gave a traceback."""
    assert told(RUN, f"{name}=1").startswith(f"{name[:40]}...: is not a field of a run; write ")
    path = tmp_path / "run.toml"
    path.write_text("a." * 3000 + "a = 1\n")
    assert told(path).startswith(f"{path}: lists or tables are nested too deeply")


def test_the_length_is_said_anew_over_the_other_way_of_saying_it():
    file = {**RUN, "train": {"epochs": 2, "global_batch_size": 8}}
    cure = "train.epochs=none"
    assert cure in told(file, "train.steps=4")
    train = load_run(file, ["train.steps=4", cure]).train
    assert train.steps == 4 and train.epochs is None


@pytest.mark.parametrize(
    ("refused", "allowed", "part"),
    [
        (
            ["train.mlp_chunk_tokens=256", "train.remat=block"],
            ["train.mlp_chunk_tokens=128", "train.remat=block"],
            "256 has no effect on rows of 256 tokens",
        ),
        (
            ["train.loss_chunk_tokens=256", "train.head_gradient=once"],
            ["train.loss_chunk_tokens=255", "train.head_gradient=once"],
            "train.head_gradient: 'once' has no effect on rows of 256 tokens",
        ),
        (
            ["limits.session_hours=0.5", "limits.margin_minutes=30"],
            ["limits.session_hours=0.5", "limits.margin_minutes=29.9"],
            "0.5 hours are not more than limits.margin_minutes = 30",
        ),
        (
            ["train.steps=99", "metrics.profile_steps=[98, 100]"],
            ["train.steps=99", "metrics.profile_steps=[99, 99]"],
            "step 100 is after the last step of the run, 99",
        ),
        (
            ["metrics.profile_steps=[11, 10]"],
            ["metrics.profile_steps=[10, 10]"],
            "[11, 10] ends before it begins",
        ),
        (
            ["model.vocab_size=300", "data.tokenizer.vocab_size=301"],
            ["model.vocab_size=300", "data.tokenizer.vocab_size=300"],
            "301 is more than model.vocab_size = 300",
        ),
    ],
)
def test_the_edges_of_numbers_that_belong_together(refused, allowed, part, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('recipe = "quickstart"\ndata.sources = [{path = "a.txt"}]\n')
    load_run(path, ["name=t", "dir=runs/t", "data.dir=data", *allowed])
    with pytest.raises(UserError) as caught:
        load_run(path, ["name=t", "dir=runs/t", "data.dir=data", *refused])
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "name, kind", [(name, kind) for (at, name), kind in ELSEWHERE.items() if at == "model.kind"]
)
def test_a_model_type_of_transformers_is_told_its_kind(name, kind):
    """As config.json of that model type names its architecture."""
    assert CONFIG_MAPPING[name].model_type == name
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] in TABLES[kind]().architectures
    assert f"no kind {name!r}; what others call {name!r} is {kind!r} here; " in told(
        RUN | {"model": {"kind": name}}
    )
