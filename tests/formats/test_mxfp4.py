"""Experts as gpt-oss is released, in four bits: the model that transformers reads from the same
folder."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmwright.errors import UserError
from lmwright.formats.hf_read import import_hf
from lmwright.formats.proof import logits
from lmwright.formats.safetensors import TensorFiles
from lmwright.formats.written import refuse_changed
from lmwright.presets import of_section
from tests.in_memory import export_hf
from tests.released_experts import write_released

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")

TOKENS = np.random.default_rng(0).integers(3, 97, (2, 40), dtype=np.int32)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return write_released(tmp_path_factory.mktemp("released"))


def test_logits_are_those_of_transformers(released):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(released, dtype=torch.bfloat16)
    theirs = theirs.float().eval()
    with torch.no_grad():
        wanted = theirs(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    model, w, _ = import_hf(released)
    assert model.rope_scaling.borders == "exact" and model.window == 7
    found = logits(model, jax.tree.map(lambda a: a.astype("f4"), w), TOKENS)
    np.testing.assert_allclose(found, wanted, atol=2e-4 * np.abs(wanted).max())


def test_transformers_loads_a_model_without_windows(released, tmp_path):
    shutil.copytree(released, tmp_path / "plain")
    said = json.loads((released / "config.json").read_text())
    said |= {"sliding_window": None, "layer_types": ["full_attention"] * said["num_hidden_layers"]}
    (tmp_path / "plain" / "config.json").write_text(json.dumps(said))
    model, w, _ = import_hf(tmp_path / "plain")
    assert model.window is None
    proof = export_hf(model, w, None, tmp_path / "whole")
    assert proof.folder_to_transformers.max_abs_diff < 1e-4
    assert import_hf(tmp_path / "whole")[0] == model


def test_an_export_is_plain_and_the_same(released, tmp_path):
    model, w, _ = import_hf(released)
    proof = export_hf(model, w, None, tmp_path / "out", dtype="bf16", max_shard_bytes=60_000)
    assert proof.folder_to_transformers.max_abs_diff < 1e-4
    found = TensorFiles(tmp_path / "out")
    assert found.described("model.layers.1.mlp.experts.gate_up_proj") == ("bfloat16", (3, 64, 192))
    refuse_changed(model, found, tmp_path / "out")
    _, weights, _ = import_hf(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, weights, w)
    with pytest.raises(UserError, match=r"'int4' is not written for gpt-oss.*use one of fp32"):
        export_hf(model, w, None, tmp_path / "other", dtype="int4")


def test_what_is_damaged_or_other_is_refused(released, tmp_path):
    tensors, said = (
        load_file(released / "model.safetensors"),
        (released / "config.json").read_text(),
    )
    (tmp_path / "config.json").write_text(said)
    scales = tensors.pop("model.layers.0.mlp.experts.down_proj_scales")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"0\.mlp\.experts\.down_proj does not have the shape of all exp"
    ):
        import_hf(tmp_path)
    tensors["model.layers.0.mlp.experts.down_proj_scales"] = scales[:, :-1]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"or its scales do not fit its blocks; download"):
        import_hf(tmp_path)
    (tmp_path / "config.json").write_text(said.replace("mxfp4", "gptq"))
    with pytest.raises(
        UserError, match=r"quantization_config is not mxfp4, the only form that is read"
    ):
        import_hf(tmp_path)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"experts": {"bias": "none"}}, r'experts\.bias: gpt-oss has biases.*write bias = "all"'),
        ({"experts": {"shared_dim": 8}}, r"experts\.shared_dim: gpt-oss has no shared experts"),
        ({"window": None}, r"layer_pattern: has no effect without model\.window"),
    ],
)
def test_settings_that_no_gpt_oss_has(changes, why):
    model = of_section("model")["gpt-oss-20b"]()
    experts = replace(model.experts, **changes.get("experts", {}))
    with pytest.raises(UserError, match=why):
        replace(model, **changes | {"experts": experts})
