"""Folders in float8 with scales of blocks, as DeepSeek-V3 is released: transformers computes from
them what it computes from the folder that `import` writes."""

import json

import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.errors import UserError
from lmwright.formats.hf_read import import_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

IDS = torch.arange(40).reshape(2, 20)
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 24, "q_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


def quantized(weight, rows, columns):
    """float8 of a weight [out, in] and its scales, block by block."""
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    grid = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    scale = torch.empty(grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
    return codes, scale


def folder(path, rows=8, columns=8, **said):
    """A folder of the linear layers in float8, and the values that they stand for."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**SIZES)
    model = transformers.DeepseekV3ForCausalLM(config).float()
    model.save_pretrained(path)
    tensors, values = load_file(path / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("_proj.weight") or "with_mqa" in n]:
        codes, scale = quantized(tensors[name], rows, columns)
        whole = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        values[name] = codes.float() * whole[: codes.shape[0], : codes.shape[1]]
        tensors |= {name: codes, f"{name}_scale_inv": scale}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
              "weight_block_size": [rows, columns]}  # fmt: skip
    config["quantization_config"] = scheme | said
    (path / "config.json").write_text(json.dumps(config))
    return values


def logits(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits.numpy()


def test_the_written_folder_computes_what_the_float8_folder_does(tmp_path):
    folder(tmp_path / "float8")
    assert main(["import", str(tmp_path / "float8"), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    found, wanted = logits(tmp_path / "out"), logits(tmp_path / "float8")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_for_the_whole(shape, tmp_path):
    """As Ministral 3 and Devstral Small 2 are released, with scales for inputs beside them."""
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if k in transformers.Ministral3Config().to_dict()}
    model = transformers.Ministral3ForCausalLM(transformers.Ministral3Config(**sizes)).float()
    model.save_pretrained(tmp_path / "float8")
    file = tmp_path / "float8" / "model.safetensors"
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        codes, scale = quantized(tensors[name], *tensors[name].shape)
        tensors |= {name: codes, f"{name}_scale_inv": scale.reshape(shape)}
        tensors[name.replace("weight", "activation_scale")] = torch.tensor(0.7)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "float8" / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None,
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    (tmp_path / "float8" / "config.json").write_text(json.dumps(config))
    assert main(["import", str(tmp_path / "float8"), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    found, wanted = logits(tmp_path / "out"), logits(tmp_path / "float8")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_blocks_that_are_cut_off_at_the_ends(tmp_path):
    """As those of `kv_a_proj_with_mqa`, of 576 rows in blocks of 128; bit for bit."""
    values = folder(tmp_path, rows=20, columns=12)
    _, tree, _ = import_hf(tmp_path)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert values[name].shape == (32, 32)
    np.testing.assert_array_equal(tree["layers"]["kv_a"][0].T, values[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": [8]}, "a scale for each block of weight_block_size"),
        ({"fmt": "e5m2"}, "a scale for each block of weight_block_size"),
        ({"weight_block_size": None}, r"_scale_inv do not agree; download the folder again"),
        ({"weight_block_size": [8, 4]}, r"_scale_inv do not agree; download the folder again"),
    ],
)
def test_what_is_not_read_is_one_sentence(change, message, tmp_path):
    folder(tmp_path, **change)
    with pytest.raises(UserError, match=message):
        import_hf(tmp_path)


def test_a_scale_that_is_missing_is_named(tmp_path):
    folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(n for n in tensors if n.endswith("_scale_inv"))
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"lacks {name}; download"):
        import_hf(tmp_path)
