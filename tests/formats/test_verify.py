"""verify: the same model in other clothes is the same; a changed one is not."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmwright.cli.main import main
from lmwright.config.run import Tokenizer
from lmwright.core.param import map_params
from lmwright.data.tokens.tokenizer import save_tokenizer, train_tokenizer
from lmwright.errors import UserError
from lmwright.formats import reference
from lmwright.formats.verify import compare, other_fields, verify, verify_command
from lmwright.models.experts import Experts
from lmwright.models.llama import Llama
from lmwright.models.moe import Mixtral
from tests.in_memory import export_hf

MODEL = Llama(
    vocab_size=331, embed_dim=32, mlp_dim=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, seq_len=48, rope_theta=4001.0, head="untied",
)  # fmt: skip


def weights(seed=0):
    rng = np.random.default_rng(seed)
    return map_params(lambda p: rng.standard_normal(p.shape).astype("f4") * 0.2, MODEL.spec())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The model, its copy in bf16 and GGUF, one with a weight changed, one with another config."""
    root = tmp_path_factory.mktemp("models")
    texts = ["Once upon a time there was a function that returned the number of bytes."] * 20
    save_tokenizer(train_tokenizer(texts, Tokenizer(vocab_size=300)), root / "tokenizer")
    other = ["entirely different words make other merges, as one would think"] * 20
    save_tokenizer(train_tokenizer(other, Tokenizer(vocab_size=300)), root / "tokenizer2")
    changed = weights()
    changed["layers"]["up"][1, 3, 4] += 1.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.importlib.util, "find_spec", lambda name: None)
        export_hf(MODEL, weights(), root / "tokenizer", root / "a")
        export_hf(MODEL, weights(), root / "tokenizer", root / "bf16", dtype="bf16")
        export_hf(MODEL, changed, root / "tokenizer", root / "changed")
        export_hf(replace(MODEL, rope_theta=4100.0), weights(), root / "tokenizer", root / "theta")
        export_hf(MODEL, weights(), root / "tokenizer2", root / "words")
    return root


def test_the_same(folders):
    found = verify(folders / "a", folders / "a")
    assert found.same and found.tensors.equal == found.tensors.compared == 21
    assert found.logits.max_abs_diff == 0.0 and found.logits.kl < 1e-12
    assert found.tokenizer.startswith("the same ids")


def test_rounding_is_a_matter_of_tolerance(folders, capsys):
    assert main(["verify", str(folders / "a"), str(folders / "bf16")]) == 1
    said = capsys.readouterr().out
    assert "NOT the same" in said and "differs most" in said
    assert main(["verify", str(folders / "a"), str(folders / "bf16"), "--tolerance", "0.1"]) == 0


@pytest.mark.parametrize("tolerance", [-1.0, float("nan")])
def test_a_tolerance_that_nothing_meets_is_refused(folders, tolerance):
    with pytest.raises(UserError, match=f"tolerance: {tolerance} must be at least 0"):
        verify(folders / "a", folders / "a", tolerance=tolerance)


def test_a_changed_weight_is_named(folders, capsys):
    assert verify_command(str(folders / "a"), str(folders / "changed"), as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["tensors"]["worst"] == "model.layers.1.mlp.up_proj.weight"
    assert found["tensors"]["max_abs_diff"] == pytest.approx(1.5, rel=1e-6)
    assert found["tensors"]["equal"] == found["tensors"]["compared"] - 1 and not found["same"]


def test_json_has_no_numbers_that_it_cannot_hold(tmp_path, capsys):
    w = weights()
    export_hf(MODEL, w, None, tmp_path / "a")
    (tmp_path / "a" / "convert.json").unlink()
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["model.norm.weight"][0] = np.nan
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    assert verify_command(str(tmp_path / "a"), str(tmp_path / "a"), as_json=True) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["logits"]["max_abs_diff"] == "NaN"


def test_a_config_that_differs_is_named(folders):
    """Even where the prompts are too short for it to show."""
    found = verify(folders / "a", folders / "theta")
    assert found.tensors.equal == found.tensors.compared and not found.same
    assert found.config == {"rope_theta": (4001.0, 4100.0)}
    assert "config: rope_theta is 4001.0 and 4100.0" in found.lines()


def test_what_balances_experts_is_of_training_alone():
    first = Mixtral(
        vocab_size=331, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        seq_len=48, experts=Experts(num_experts=4, experts_per_token=2, mlp_dim=8),
    )  # fmt: skip
    for change, named in ({"z_loss": 0.1}, []), ({"experts_per_token": 1}, ["experts"]):
        other = replace(first, experts=replace(first.experts, **change))
        assert [*other_fields(first, other)] == named


def test_another_tokenizer_is_another_model(folders):
    found = verify(folders / "a", folders / "words")
    assert not found.same and "other ids" in found.tokenizer


def test_gguf_is_one_more_form(folders, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    from lmwright.formats.convert import export_command

    monkeypatch.setattr(reference.importlib.util, "find_spec", lambda name: None)
    export_command(folders / "a", tmp_path / "a.gguf")
    assert verify(folders / "a", tmp_path / "a.gguf").same
    assert not verify(folders / "changed", tmp_path / "a.gguf").same


def test_without_room_for_logits_tensors_decide(folders, monkeypatch):
    monkeypatch.setattr(reference.psutil, "virtual_memory", lambda: type("M", (), {"available": 9}))
    assert verify(folders / "a", folders / "a").same
    found = verify(folders / "a", folders / "changed")
    assert not found.same and found.logits is None and "GiB of memory" in found.why_no_logits


def test_names_and_shapes():
    a = {"x": np.ones(3, "f4"), "y": np.zeros((2, 2), "f2"), "z": np.full(2, np.nan, "f4")}
    b = {"x": np.ones(3, "f8"), "y": np.zeros((2, 3), "f2"), "w": np.ones(1), "z": a["z"]}
    found = compare(a, b)
    assert (found.only_a, found.only_b, found.other_shape) == ((), ("w",), ("y",))
    assert found.equal == 1 and found.worst == "z"  # what is not a number equals nothing
