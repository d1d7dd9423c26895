"""A family whose table of names in Hugging Face is not written yet."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Literal

import pytest

from lmwright.cli.main import main
from lmwright.config.run import Data, Publish, Run, Train, section
from lmwright.errors import UserError
from lmwright.models import CLASSES, KINDS
from lmwright.models.hf import TABLES
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS as KINDS_OF_OPTIM
from lmwright.presets.table import models_table
from lmwright.program.trainee import Training
from lmwright.train.publishing import check_publishing


@section
class Young(Llama):
    kind: Literal["young"] = "young"


MODEL = Young(
    vocab_size=320, embed_dim=16, mlp_dim=24, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4, seq_len=48,
)  # fmt: skip
NO_TABLE = r"model.kind: 'young' has no table of its names in Hugging Face, .*/models/hf/young.py"


@pytest.fixture
def young(monkeypatch):
    module = ModuleType("lmwright.models.young")
    module.Young = Young
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(KINDS._members, "young", "young.Young")
    monkeypatch.setitem(TABLES._members, "young", "young.YoungHf")


def test_what_needs_the_table_names_its_file_and_other_families_go_on(young):
    with pytest.raises(UserError, match=NO_TABLE):
        MODEL.hf  # noqa: B018
    assert [*TABLES] == [*CLASSES]
    assert len(TABLES) == len(CLASSES)
    assert models_table().splitlines()[-1].startswith("| `young` |  | ")


def test_of_a_run(young, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    train = Train(steps=3, global_batch_size=2, publish_every_steps=1)
    run = Run(
        name="x", dir="x", model=MODEL, objective=Clm(), data=Data(dir="x"), train=train,
        optim=KINDS_OF_OPTIM["adamw"](learning_rate=1e-3),
        publish=Publish(repo="me/it", license="mit"),
    )  # fmt: skip
    with pytest.raises(UserError, match=NO_TABLE):
        check_publishing(run, Training(run))
    check_publishing(replace(run, model=Llama(**vars(MODEL) | {"kind": "llama"})), Training(run))
    (tmp_path / "config.json").write_text('{"architectures": ["NoneOfThese"]}')
    assert main(["import", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "NoneOfThese" in capsys.readouterr().err
