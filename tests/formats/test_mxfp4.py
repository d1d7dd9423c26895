"""Experts as gpt-oss is released, in four bits: the model that transformers reads from the same
folder."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmwright.errors import UserError
from lmwright.formats.hf_read import import_hf
from lmwright.formats.proof import logits
from lmwright.formats.safetensors import TensorFiles
from lmwright.formats.written import refuse_changed
from tests.in_memory import export_hf

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")

CONFIG = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "sliding_window": 7,
    "num_local_experts": 3, "num_experts_per_tok": 2, "max_position_embeddings": 8192,
    "pad_token_id": 0,
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}
TOKENS = np.random.default_rng(0).integers(3, 97, (2, 40), dtype=np.int32)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A folder with random codes and scales, as the released ones; biases and sinks are not
    zero."""
    folder, dice = tmp_path_factory.mktemp("released"), np.random.default_rng(1)
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**CONFIG)
    theirs = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
    theirs.to(torch.bfloat16).save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    tensors = {name: a.float().numpy() for name, a in theirs.state_dict().items()}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        for name, rows, width in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            del tensors[f"{at}{name}"]
            shape = (3, rows, width // 32)
            tensors[f"{at}{name}_blocks"] = dice.integers(0, 256, (*shape, 16), dtype=np.uint8)
            tensors[f"{at}{name}_scales"] = dice.integers(121, 127, shape, dtype=np.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": MXFP4}))
    return folder


def test_logits_are_those_of_transformers(released):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(released, dtype=torch.bfloat16)
    theirs = theirs.float().eval()
    with torch.no_grad():
        wanted = theirs(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    model, w, _ = import_hf(released)
    assert model.rope_scaling.borders == "exact" and model.window == 7
    found = logits(model, jax.tree.map(lambda a: a.astype("f4"), w), TOKENS)
    np.testing.assert_allclose(found, wanted, atol=2e-4 * np.abs(wanted).max())


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
    with pytest.raises(UserError, match=r"0\.mlp\.experts\.down_proj has not the shape of all exp"):
        import_hf(tmp_path)
    tensors["model.layers.0.mlp.experts.down_proj_scales"] = scales[:, :-1]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"or its scales do not fit its blocks; download"):
        import_hf(tmp_path)
    (tmp_path / "config.json").write_text(said.replace("mxfp4", "gptq"))
    with pytest.raises(UserError, match=r"quantization_config is not mxfp4, which alone is read"):
        import_hf(tmp_path)
