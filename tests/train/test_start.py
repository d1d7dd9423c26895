"""Runs that start from other weights: exactly those, with their model and tokenizer."""

import json
import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tomli_w

from lmwright.cli.main import main
from lmwright.config.run import (
    Checkpoint,
    Data,
    Eval,
    Metrics,
    Pack,
    Run,
    Source,
    Tokenizer,
    Train,
)  # fmt: skip
from lmwright.core.param import walk
from lmwright.data.prepare import prepare
from lmwright.data.rows.store import TokenStore
from lmwright.errors import UserError
from lmwright.evals.held_out import encode_prompts
from lmwright.formats.convert import export_command
from lmwright.formats.load import load_model
from lmwright.formats.open import load_run, open_place
from lmwright.formats.weights import host_weights
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.optim.build import rate_shares
from lmwright.optim.kinds import Group
from lmwright.program.length import of_rows
from lmwright.program.plan import resolve
from lmwright.program.stores import open_stores
from lmwright.program.trainee import Frozen
from lmwright.train.session import _note_no_evals, train
from lmwright.train.start import first_state

ONE = slice(0, 1)


def test_evaluations_without_rows_are_told(base):
    stores = {"model": SimpleNamespace(eval_sources=())}
    run = load_run(base / "run")
    assert not _note_no_evals(replace(run, eval=Eval()), stores)
    started = replace(run, eval=Eval(first="start"))
    assert _note_no_evals(started, stores).startswith("nothing is held out, so eval.first")
    run = replace(run, eval=Eval(every_steps=2, first="start"))
    assert _note_no_evals(run, stores).startswith("nothing is held out, so eval.every_steps")
    assert not _note_no_evals(run, stores | {"b": SimpleNamespace(eval_sources=("x",))})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run of two steps and its Hugging Face folder."""
    root = tmp_path_factory.mktemp("base")
    lines = [json.dumps({"text": f"the cat {i} sat on mat {i * 7}"}) for i in range(60)]
    (root / "text.jsonl").write_text("\n".join(lines) + "\n")
    run = Run(
        name="base",
        dir=str(root / "run"),
        model=Llama(
            vocab_size=320, embed_dim=16, mlp_dim=24, num_layers=2, num_heads=4, num_kv_heads=2,
            head_dim=4, seq_len=48, rope_theta=5000.0,
        ),
        objective=Clm(),
        optim=KINDS["adamw"](learning_rate=0.01),
        data=Data(
            dir=str(root / "data"),
            workers=1,
            sources=(Source(path=str(root / "text.jsonl")),),
            tokenizer=Tokenizer(vocab_size=290),
            pack=Pack(seq_len=32),
        ),
        train=Train(steps=2, global_batch_size=2, precision="fp32"),
        checkpoint=Checkpoint(save_every_steps=1),
        metrics=Metrics(trackers=()),
    )  # fmt: skip
    prepare(run.data, 32)
    train(run, jax.devices()[ONE])
    export_command(root / "run", root / "hf")
    chats = [{"prompt": f"cat {i}", "completion": f"mat {i * 7}"} for i in range(40)]
    (root / "chats.jsonl").write_text("".join(json.dumps(c) + "\n" for c in chats))
    return root


def tuned(base, tmp_path, init_from, **tables):
    """A run file that leaves the model and the tokenizer to `init_from`."""
    said = {
        "name": "tuned",
        "dir": str(tmp_path / "run"),
        "objective": {"kind": "sft"},
        "optim": {"kind": "adamw", "learning_rate": 1e-3, "schedule": {"kind": "constant"}},
        "data": {
            "dir": str(base / "tuned-data"),
            "workers": 1,
            "holdout_fraction": 0.2,
            "sources": [{"path": str(base / "chats.jsonl"), "rows": "prompt"}],
            "chat": {"template": "none"},
            "pack": {"method": "best-fit", "seq_len": 32},
        },
        "train": {
            "epochs": 1.5, "global_batch_size": 2, "precision": "fp32", "init_from": str(init_from),
        },
        "eval": {"first": "start"},
        "checkpoint": {"save_every_steps": 2},
        "metrics": {"trackers": []},
    }  # fmt: skip
    for name, table in tables.items():
        said[name] = said.get(name, {}) | table
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(said))
    return path


def test_steps_by_the_size_of_a_factor_that_is_zero_are_refused(base, tmp_path, capfd):
    """Adafactor's default moves a weight of zero by a thousandth of the rate; transformers' Trainer
    uses absolute steps."""
    optim = {"kind": "adafactor", "learning_rate": 0.01}
    path = tuned(base, tmp_path, base / "hf", optim=optim, lora={"rank": 2})
    assert main(["train", str(path)]) == 2
    said = capfd.readouterr().err
    assert 'optim.step_size: "relative" moves a weight by its own size' in said
    assert said.rstrip().endswith('set "absolute"') and not (tmp_path / "run").exists()
    run = load_run(path, ["optim.step_size=absolute"])
    train(run, jax.devices()[ONE])
    factors = load_model(run.dir).weights["layers"]
    before = load_model(base / "hf").weights["layers"]
    moved = [np.abs(np.asarray(a) - np.asarray(b)).max() for (_, a), (_, b) in
             zip(walk(factors), walk(before), strict=True)]  # fmt: skip
    assert max(moved) > 1e-4


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["optim.kind=adafactor", "optim.learning_rate=0.01", "optim.step_size=absolute",
          "optim.min_weight_rms=0.1"], "optim.min_weight_rms: has no effect"),
        (["data.shuffle.epochs=3"], "or train.epochs to train so many passes"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_refused(words, told, base, tmp_path, capfd):
    """A user who sets them would believe that they do something."""
    assert main(["train", str(tuned(base, tmp_path, base / "hf")), *words]) == 2
    assert told in capfd.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize("devices", [ONE, slice(2, 4)])
@pytest.mark.parametrize("place", ["hf", "run", "run/checkpoints/1"])
def test_the_first_state_holds_those_weights(place, devices, base, tmp_path):
    run = load_run(tuned(base, tmp_path, base / place))
    assert run.model.rope_theta == 5000.0 and run.model.embed_dim == 16
    prepare(run.data, 32)
    run = replace(run, train=replace(run.train, steps=3, epochs=None))
    Path(run.dir).mkdir()
    plan = resolve(run, jax.devices()[devices])
    state = first_state(plan, open_stores(plan)["model"], Frozen({}))
    wanted = host_weights(open_place(base / place))
    for (_, ours), (_, theirs) in zip(
        walk(state["trained"]["model"]["weights"]), walk(wanted), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(ours), theirs)
    assert int(state["step"]) == 0
    assert not any(
        np.asarray(a).any() for a in jax.tree.leaves(state["trained"]["model"]["optimizer"])
    )
    written = json.loads((tmp_path / "run/init.json").read_text())
    assert written["checkpoint"] == (1 if place.endswith("1") else None)
    if place != "hf":
        newest = host_weights(open_place(base / "run"))
        same = np.array_equal(newest["embed"], wanted["embed"])
        assert same == (place == "run")


def test_tuning_goes_on_without_its_source(base, tmp_path):
    moved = tmp_path / "hf"
    shutil.copytree(base / "hf", moved)
    file = tuned(base, tmp_path, moved)
    run = load_run(file)
    prepare(run.data, 32)
    whole = train(run, jax.devices()[ONE])
    evals = [e for e in lines_of(run.dir) if e["kind"] == "eval"]
    assert [e["step"] for e in evals] == [0, whole.step]
    assert evals[1]["loss"] < evals[0]["loss"]
    rows = TokenStore.open(run.data.dir).epoch_rows
    assert whole.step == -(-3 * rows // 4)
    shutil.rmtree(moved)
    longer = load_run(file, ["train.epochs=2"])
    assert train(longer, jax.devices()[ONE]).step > whole.step
    assert load_run(Path(run.dir)).model == run.model


def lines_of(run_dir):
    text = (Path(run_dir) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_what_does_not_fit_is_refused(base, tmp_path):
    with pytest.raises(UserError, match=r"train.init_from: .*nowhere.*is not there"):
        load_run(tuned(base, tmp_path, tmp_path / "nowhere"))
    run = load_run(tuned(base, tmp_path, base / "hf", model={"mlp_dim": 28}))
    prepare(run.data, 32)
    with pytest.raises(UserError, match=r"train.init_from: layers.down is \(2, 24, 16\) in"):
        train(run, jax.devices()[ONE])
    assert not Path(run.dir).exists()  # a refusal leaves no run directory behind
    other = tuned(base, tmp_path, base / "hf", data={"dir": str(tmp_path / "other")})
    with pytest.raises(UserError, match=r"data.tokenizer: .*set its path"):
        load_run(other, ["data.tokenizer.vocab_size=270"])


def test_another_tokenizer_is_refused(base, tmp_path):
    file = tuned(base, tmp_path, base / "hf")
    run = load_run(file)
    other = replace(
        run.data,
        dir=str(tmp_path / "other"),
        tokenizer=Tokenizer(vocab_size=280),
    )
    prepare(other, 32)
    with pytest.raises(UserError, match=r"train.init_from: .* uses another tokenizer"):
        steps = replace(run.train, steps=1, epochs=None)
        train(replace(run, data=other, train=steps), jax.devices()[ONE])
    assert not Path(run.dir).exists()


def test_a_whole_model_takes_the_tokenizer_of_its_weights(base, tmp_path):
    table = tomllib.loads((base / "run" / "run.toml").read_text())
    run = {"name": "next", "dir": str(tmp_path / "next"), "recipe": "pretrain"}
    run |= {"model": {k: v for k, v in table["model"].items() if v != "none"}}
    run |= {"data": {"dir": str(tmp_path / "data"), "sources": [{"path": "text.jsonl"}]}}
    run |= {"train": {"steps": 4, "global_batch_size": 2, "init_from": str(base / "run")}}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(run))
    assert load_run(tmp_path / "run.toml").data.tokenizer.path == f"{base}/run/tokenizer"
    gone = ["train.init_from=gone"]
    with pytest.raises(UserError, match=r"^train.init_from: gone: is not there, seen from .*; a"):
        load_run(tmp_path / "run.toml", gone)
    fresh = load_run(tmp_path / "run.toml", ["train.init_from=none"])
    assert fresh.train.init_from is None and fresh.data.tokenizer.path is None
    assert load_run(tmp_path / "run.toml", [*gone, "data.tokenizer.path=t"]).train.init_from


def test_steps_or_epochs(base, tmp_path):
    file = tuned(base, tmp_path, base / "hf")
    with pytest.raises(UserError, match=r"train.epochs: 1.5 and train.steps = 3"):
        load_run(file, ["train.steps=3"])
    run = load_run(file, [f'data.dir="{tmp_path}/not-prepared"'])
    with pytest.raises(UserError, match=r"train.epochs: .*lmwright prepare"):
        train(run, jax.devices()[ONE])


def groups(**rates):
    return tuple(Group(weights=weights, rate=rate) for weights, rate in rates.items())


def test_rates_of_groups(base, tmp_path):
    said = {"groups": [{"weights": "layers.*", "rate": 0.5}]}
    run = load_run(tuned(base, tmp_path, base / "hf", optim=said))
    assert run.optim.groups == groups(**{"layers.*": 0.5}) and hash(run.optim)
    names = [name for name, _ in walk(run.model.spec())]
    both = groups(**{"layers.*": 0.5, "layers.*norm": 0.0})
    shares = rate_shares(replace(run.optim, groups=both), names)
    assert shares["layers.up"] == 0.5 and shares["layers.mlp_norm"] == 0 and "embed" not in shares
    with pytest.raises(UserError, match=r"groups.0.weights: 'head' matches no weight; .*embe"):
        rate_shares(replace(run.optim, groups=groups(head=1.0)), names)


def test_frozen_and_scaled_weights_move_so(base, tmp_path):
    file = tuned(base, tmp_path, base / "hf")
    start, moved = host_weights(open_place(base / "hf")), {}
    for name, rates in (("plain", {}), ("groups", {"embed": 0.0, "layers.up": 0.5})):
        run = load_run(file, ["optim.weight_decay=0.0"])
        run = replace(
            run, dir=str(tmp_path / name), optim=replace(run.optim, groups=groups(**rates))
        )
        prepare(run.data, 32)
        run = replace(run, train=replace(run.train, steps=1, epochs=None))
        train(run, jax.devices()[ONE])
        end = host_weights(open_place(tmp_path / name))
        moved[name] = {path: leaf - dict(walk(start))[path] for path, leaf in walk(end)}
    assert not moved["groups"]["embed"].any() and moved["plain"]["embed"].any()
    half, whole = moved["groups"]["layers.up"], moved["plain"]["layers.up"]
    np.testing.assert_allclose(half, whole / 2, atol=1e-7)
    np.testing.assert_array_equal(moved["groups"]["layers.q"], moved["plain"]["layers.q"])


def test_prompts_of_a_chat(base, tmp_path):
    run = load_run(tuned(base, tmp_path, base / "hf"))
    prepare(run.data, 32)
    one_step = replace(run, train=replace(run.train, steps=1, epochs=None))
    store = open_stores(resolve(one_step, jax.devices()[ONE]))["model"]
    with pytest.raises(UserError, match=r"eval.prompt_format.*has none"):
        encode_prompts(Eval(prompts=("a",), prompt_format="chat"), store)
    chat = replace(run.data.chat, template="chatml")
    pack = replace(run.data.pack, seq_len=128)
    data = replace(run.data, dir=str(tmp_path / "chat"), chat=chat, pack=pack)
    prepare(data, 128)
    from lmwright.data.tokens.tokenizer import load_tokenizer

    store = TokenStore.open(data.dir)
    (ids,) = encode_prompts(Eval(prompts=("a",), prompt_format="chat"), store)
    said = load_tokenizer(store.tokenizer_dir).decode(ids)
    assert said == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert encode_prompts(Eval(prompts=("a",)), store) == ["a"]


def test_a_recipes_warm_up_is_fitted_to_epochs(base, tmp_path, capsys):
    file = tuned(base, tmp_path, base / "hf")
    said = tomllib.loads(file.read_text())
    del said["optim"]
    file.write_text(tomli_w.dumps(said | {"recipe": "pretrain"}))
    wide = ["train.precision=fp32", "train.global_batch_size=8"]
    assert main(["prepare", str(file), *wide]) == 0
    capsys.readouterr()
    assert main(["train", str(file), *wide]) == 0
    out, err = capsys.readouterr()
    note = re.search(r"warmup_steps: the 500 of recipe pretrain do not fit into the (\d+) steps of "
                     r"train.epochs = 1.5; using (\d+)", err)  # fmt: skip
    steps, warmup = map(int, note.groups())
    assert f"done: {steps} steps" in out + err
    trained = load_run(said["dir"])
    assert (trained.train.steps, trained.optim.schedule.warmup_steps) == (steps, warmup)
    assert warmup == max(steps // 10, 1)
    unset = load_run(file, [*wide, "train.steps=none"])  # in place of a number in the file
    assert unset.optim.schedule.warmup_steps == warmup
    assert main(["train", str(file), *wide, "optim.schedule.warmup_steps=500"]) == 2
    assert "warmup_steps: 500 steps do not fit" in capsys.readouterr().err


def test_a_recipes_warm_up_is_fitted_to_data_that_train_prepares(base, tmp_path, capsys):
    file = tuned(base, tmp_path, base / "hf")
    said = tomllib.loads(file.read_text())
    del said["optim"]
    said["data"]["dir"] = str(tmp_path / "data")
    file.write_text(tomli_w.dumps(said | {"recipe": "pretrain"}))
    assert main(["train", str(file), "train.precision=fp32", "train.global_batch_size=8"]) == 0
    assert "warmup_steps: the 500 of recipe pretrain do not fit" in capsys.readouterr().err


def test_a_store_of_other_rows_or_of_more_ids_is_refused(base, tmp_path):
    run = load_run(tuned(base, tmp_path, base / "hf"))
    prepare(run.data, 32)
    run = replace(run, train=replace(run.train, steps=1, epochs=None))
    shorter = replace(run, data=replace(run.data, pack=replace(run.data.pack, seq_len=16)))
    with pytest.raises(UserError, match="rows hold 32 tokens, and the run needs 16; prepare again"):
        open_stores(resolve(shorter, jax.devices()[ONE]))
    smaller = replace(run, model=replace(run.model, vocab_size=100))
    with pytest.raises(UserError, match=r"model.vocab_size: 100 is smaller than the \d+ ids"):
        open_stores(resolve(smaller, jax.devices()[ONE]))
    row = replace(run, data=replace(run.data, pack=replace(run.data.pack, attention="row")))
    plan = resolve(row, jax.devices()[ONE])
    assert plan.compute.one_document
    stores = open_stores(plan)  # of rows with several documents
    assert not of_rows(plan, stores.values()).compute.one_document
