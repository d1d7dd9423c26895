"""Folders of LLaDA and Dream, whose models are remote code: read without it, and written as classes
of transformers."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from lmwright.errors import UserError
from lmwright.formats.hf_read import import_hf
from lmwright.formats.proof import logits
from lmwright.models.conversion import converted
from tests.in_memory import export_hf

V = 60
TRANSFORMERS = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 3e-4, "rope_parameters": {"rope_type": "default", "rope_theta": 5003.0},
    "initializer_range": 0.3, "tie_word_embeddings": False,
}  # fmt: skip
NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | {"mask_token_id": 59}
# config.json of LLaDA-8B-Base but for the sizes
LLADA = {
    "activation_type": "silu", "alibi": False, "architectures": ["LLaDAModelLM"],
    "attention_layer_norm": False, "bias_for_layer_norm": False, "block_group_size": 1,
    "block_type": "llama", "d_model": 32, "embedding_size": V, "include_bias": False,
    "include_qkv_bias": False, "input_emb_norm": False, "layer_norm_type": "rms",
    "mask_token_id": 59, "max_sequence_length": 64, "mlp_hidden_size": 48, "mlp_ratio": 4,
    "model_type": "llada", "multi_query_attention": None, "n_heads": 4, "n_kv_heads": 2,
    "n_layers": 2, "rms_norm_eps": 3e-4, "rope": True, "rope_theta": 5003.0,
    "scale_logits": False, "vocab_size": V, "weight_tying": False,
}  # fmt: skip
DREAM = {
    "architectures": ["DreamModel"], "attention_dropout": 0.0, "hidden_act": "silu",
    "hidden_size": 32, "intermediate_size": 48, "mask_token_id": 59, "max_window_layers": 28,
    "max_position_embeddings": 64, "model_type": "Dream", "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 3e-4, "rope_scaling": None,
    "rope_theta": 5003.0, "sliding_window": None, "tie_word_embeddings": False,
    "use_mrope": False, "use_sliding_window": False, "vocab_size": V,
}  # fmt: skip
BLOCK = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj", "self_attn.k_proj": "k_proj", "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out", "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}  # fmt: skip
IDS = np.random.default_rng(3).integers(0, V, (2, 23)).astype(np.int32)


def by_llada_names(tensors):
    outer = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}
    found = {}
    for name, tensor in tensors.items():
        bare = name.removesuffix(".weight")
        if bare.startswith("model.layers."):
            number, inner = bare.removeprefix("model.layers.").split(".", 1)
            own = f"blocks.{number}.{BLOCK[inner]}"
        else:
            own = outer[bare]
        found[f"model.transformer.{own}.weight"] = tensor
    return found


def build(kind, folder):
    """A folder as released, and transformers' logits of the same weights."""
    torch.manual_seed(1)
    if kind == "llada":
        config = transformers.EuroBertConfig(**TRANSFORMERS, **NO_IDS, attn_implementation="eager")
        theirs, said = transformers.EuroBertForMaskedLM(config), LLADA
    else:
        config = transformers.Qwen2Config(**TRANSFORMERS, attn_implementation="eager")
        config.is_causal = False
        theirs, said = transformers.Qwen2ForCausalLM(config), DREAM
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 0.3)
    tensors = {name: t.contiguous() for name, t in theirs.state_dict().items()}
    folder.mkdir()
    save_file(by_llada_names(tensors) if kind == "llada" else tensors,
              folder / "model.safetensors")  # fmt: skip
    (folder / "config.json").write_text(json.dumps(said))
    with torch.no_grad():
        return theirs.eval()(torch.tensor(IDS, dtype=torch.long)).logits.numpy()


@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_a_released_folder_is_read_and_written_without_remote_code(kind, tmp_path):
    expected = build(kind, tmp_path / "released")
    model, w, _ = import_hf(tmp_path / "released")
    assert model.kind == "llada" and model.predicts == ("own" if kind == "llada" else "next")
    close = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(logits(model, w, IDS), expected, atol=close)
    out = tmp_path / "out"
    proof = export_hf(model, w, None, out)
    assert proof.folder_to_transformers.max_abs_diff < close  # by AutoModel, of config.json alone
    config = json.loads((out / "config.json").read_text())
    if kind == "dream":
        assert config["architectures"] == ["Qwen2ForCausalLM"] and config["is_causal"] is False
        assert config["transformers_version"] == "5.2.0"
        card = (out / "README.md").read_text()
        assert "AutoModelForCausalLM" in card and "causal model without a word" in card
    again, w2, _ = import_hf(out)
    assert again == model
    np.testing.assert_array_equal(logits(again, w2, IDS), logits(model, w, IDS))


@pytest.mark.parametrize(
    "change, told",
    [
        ({"block_type": "sequential"}, "block_type = 'sequential' is not LLaDA's 'llama'"),
        ({"include_qkv_bias": True}, "include_qkv_bias = True is not LLaDA's False"),
        ({"n_layers": None}, "lacks num_hidden_layers"),
    ],
)
def test_what_llada_does_not_have_is_refused(change, told, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLADA | change))
    with pytest.raises(UserError, match=told):
        import_hf(tmp_path)


def test_qwen_2_is_converted_with_its_biases(tmp_path):
    """As Dream was: the same weights, which look both ways."""
    torch.manual_seed(2)
    theirs = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TRANSFORMERS))
    theirs.save_pretrained(tmp_path / "qwen")
    causal, w, _ = import_hf(tmp_path / "qwen")
    model = converted(causal, "llada")
    assert model.bias == "qkv" and model.predicts == "next"
    theirs.config.is_causal = False
    for layer in theirs.model.layers:
        layer.self_attn.is_causal = False
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(IDS, dtype=torch.long)).logits.numpy()
    close = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(logits(model, w, IDS), expected, atol=close)
    assert np.abs(logits(causal, w, IDS) - expected).max() > 100 * close
