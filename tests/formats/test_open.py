"""What lies at a path is decided once, whichever verb asks."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from lmwright.cli.main import main
from lmwright.config.load import dump_toml
from lmwright.config.run import Data, Run, Train
from lmwright.core.param import init_weights
from lmwright.errors import UserError
from lmwright.formats.adapter_verbs import merge_command
from lmwright.formats.load import load_model
from lmwright.formats.open import (
    ADAPTER,
    GGUF,
    HF,
    RUN,
    RUN_FILES,
    find_model,
    init_fields,
    load_run,
    open_place,
    open_run,
)
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from tests.in_memory import export_hf
from tests.time_limit import time_limit

MODEL = Llama(
    vocab_size=53, embed_dim=32, mlp_dim=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    seq_len=24,
)  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """One of each: a run directory without checkpoints, a Hugging Face folder, an adapter."""
    root = tmp_path_factory.mktemp("places")
    run = Run(
        name="x", dir=str(root / "run"), model=MODEL, objective=Clm(), data=Data(dir="data"),
        optim=KINDS["adamw"](learning_rate=1e-3), train=Train(steps=2, global_batch_size=2),
    )  # fmt: skip
    (root / "run" / "checkpoints" / "7").mkdir(parents=True)
    (root / "run" / "run.toml").write_text(dump_toml(run))
    export_hf(MODEL, init_weights(MODEL.spec(), jax.random.key(0)), None, root / "hf")
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (root / "empty").mkdir()
    return root


@pytest.mark.parametrize(
    "path, kind, step",
    [
        ("run", RUN, None),
        ("run/checkpoints/7", RUN, 7),
        ("hf", HF, None),
        ("x.gguf", GGUF, None),
        ("adapter", ADAPTER, None),
    ],
)
def test_kinds_of_places(places, path, kind, step):
    place = open_place(places / path)
    assert (place.kind, place.step) == (kind, step)
    assert place.path == places / ("run" if kind == RUN else path)


def test_the_home_folder_is_known(places, monkeypatch):
    monkeypatch.setenv("HOME", str(places))
    assert open_place("~/hf").path == places / "hf"


@pytest.mark.parametrize("path", ["run", "run/checkpoints/7", "hf"])
def test_the_model_is_read_without_weights(places, path):
    assert open_place(places / path).model == find_model(str(places / path)) == MODEL
    assert init_fields(str(places / path))["model",]["embed_dim"] == 32


def test_a_run_file_a_run_directory_and_a_preset(places):
    assert find_model(str(places / "run" / "run.toml")) == MODEL
    assert find_model(str(places / "run"), ["model.num_layers=3"]).num_layers == 3
    assert find_model("llama-1m", ["num_layers=3"]).num_layers == 3
    with pytest.raises(UserError, match=r"neither a run file, .*did you mean 'llama-1m'"):
        find_model("lama-1m")


@pytest.mark.parametrize("ask", [load_model, lambda path: find_model(path), init_fields])
def test_an_adapter_alone_is_no_model(places, ask):
    with pytest.raises(UserError, match=r"is an adapter.*lmwright adapters merge"):
        ask(str(places / "adapter"))


def test_folders_given_as_a_run(places):
    with pytest.raises(UserError, match=r"hf: is a model folder.* train\.init_from in a run file"):
        load_run(places / "hf")
    with pytest.raises(UserError, match=r"checkpoints: no such run file .*; give .*/run$"):
        load_run(places / "run" / "checkpoints")


@pytest.mark.parametrize(
    "base, adapter, says",
    [
        ("adapter", "hf", "adapter: is an adapter; name its base first and then the adapter"),
        ("hf", "run", "run: is a run; export its adapter first: lmwright adapters export .*run F"),
    ],
)
def test_what_is_no_pair_of_base_and_adapter(places, tmp_path, base, adapter, says):
    with pytest.raises(UserError, match=says):
        merge_command(places / base, places / adapter, tmp_path / "out")


@pytest.mark.parametrize("verb", [["generate", "--prompt", "x"], ["train"]])
def test_a_run_without_its_run_file_says_how_to_go_on(verb, tmp_path, capsys):
    folder = tmp_path / "mine"
    (folder / "checkpoints" / "3").mkdir(parents=True)
    (folder / "checkpoints" / "3" / "hashes.json").write_text("{}")
    assert main([*verb[:1], str(folder), *verb[1:]]) == 2
    cure = f"its run.toml is lost; lmwright train RUN.toml dir={folder}, with the run file"
    assert cure in capsys.readouterr().err


def test_a_missing_folder_beside_others_is_no_hub_name(places, monkeypatch):
    monkeypatch.chdir(places.parent)
    for name, hub in ((f"{places.name}/gone", False), ("owner/name", True)):
        with pytest.raises(UserError) as caught:
            open_place(name)
        assert (f"write hf://{name}" in str(caught.value)) == hub


@pytest.mark.parametrize("path", ["hf", "adapter", "empty", "nowhere"])
def test_where_only_a_run_will_do(places, path):
    with pytest.raises(UserError, match=r"not a run directory \(no run\.toml\)"):
        open_run(places / path)


@pytest.mark.parametrize(
    "line", ["eval FILE", "generate FILE --prompt a", "adapters export FILE out"]
)
def test_a_run_file_in_the_place_of_what_it_trains(places, line, capsys):
    file = places / "run" / "run.toml"
    assert main(line.replace("FILE", str(file)).split()) == 2
    told = capsys.readouterr().err
    assert f"is a run file; give the directory ({places / 'run'}) in which it trained" in told


def test_a_checkpoint_that_is_not_there(places, capsys):
    assert main(["generate", str(places / "run" / "checkpoints" / "8"), "--prompt", "a"]) == 2
    assert "there is no checkpoint 8" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["s3://bucket/model", "https://example.com/model"])
def test_no_other_urls(name):
    for ask in (open_place, load_model, find_model):
        with pytest.raises(UserError, match="cannot load a model from this URL; write hf://"):
            ask(name)


def test_the_registries_name_every_kind():
    """A registry imports its members one by one, by names that nothing else checks."""
    for section, kinds in RUN_FILES.kinds.items():
        for kind in kinds:
            fields = kinds[kind].__dataclass_fields__
            assert fields["kind"].default == kind, f"{section}.kind"


def test_places_of_a_run_directory_are_found_from_any_folder(places, tmp_path, monkeypatch):
    """They are relative to the folder that its own `dir` is relative to."""
    project = tmp_path / "project"
    for folder in ("runs/x", "data", "elsewhere"):
        (project / folder).mkdir(parents=True)
    run = load_run(places / "run" / "run.toml")
    run = replace(run, dir="runs/x", train=replace(run.train, init_from="base"))
    (project / "runs/x/run.toml").write_text(dump_toml(run))
    (project / "runs/x/env.json").write_text("{}")
    (project / "base").symlink_to(places / "hf")
    for here, there in ((".", "."), ("elsewhere", "../elsewhere/.."), ("..", "project")):
        monkeypatch.chdir(project / here)
        for name in (Path(there, "runs/x"), project / "runs/x"):
            found = load_run(name)
            assert Path(found.train.init_from).samefile(project / "base")
            assert Path(found.data.dir).samefile(project / "data")
    shutil.rmtree(project / "data")  # what is nowhere keeps its name
    assert load_run(project / "runs/x").data.dir == "data"


@pytest.mark.parametrize("name", ["m.gguf", "hf/config.json", "hf/tokenizer.json", "run/run.toml"])
def test_a_pipe_in_the_place_of_a_file_is_refused(name, tmp_path):
    """Who opens it waits until somebody writes there."""
    place = tmp_path / name.partition("/")[0]
    if "/" in name:
        place.mkdir()
        (place / "config.json").write_text("{}")
        (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with time_limit(20), pytest.raises(UserError, match=rf"{name}: is a pipe or a device; put a"):
        open_place(place).model  # noqa: B018
