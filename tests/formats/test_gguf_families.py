"""Every architecture that GGUF has: there and back exactly; transformers agrees where it reads
the file, and llama.cpp where it is installed."""

from dataclasses import replace

import jax
import numpy as np
import pytest

pytest.importorskip("gguf")

from lmwright.core.param import map_params
from lmwright.errors import UserError
from lmwright.formats import proof
from lmwright.formats.gguf_gemma4 import is_unused
from lmwright.formats.gguf_hybrid import turned
from lmwright.formats.gguf_names import config_of
from lmwright.formats.gguf_read import GgufFile
from lmwright.formats.gguf_write import write_gguf
from lmwright.formats.hf_layout import HfTensors
from lmwright.formats.hf_read import model_from_config
from lmwright.formats.load import load_model
from lmwright.formats.proof import agreement, logits
from lmwright.formats.reference import Reference
from lmwright.formats.verify import other_fields
from tests.formats import llama_cpp
from tests.formats.gguf_rows import FAMILIES, GLOBAL, LLAMA3, LOCAL, SIZES

READ_BY_TRANSFORMERS = "MistralForCausalLM"


def model_of(case):
    """(model, random weights) of a family."""
    architecture, rng = case.split()[0], np.random.default_rng(0)
    model = model_from_config(SIZES | {"architectures": [architecture]} | FAMILIES[case], case)
    std = 0.15 if "linear_num_key_heads" in FAMILIES[case] else 0.3  # rounding grows in memories
    w = map_params(lambda p: rng.standard_normal(p.shape).astype("f4") * std, model.spec())
    return model, w


def test_rates_of_memories_come_back():
    """Within what `write_gguf` allows, which a CPU's own float32 exp does not keep."""
    rates = np.random.default_rng(0).uniform(-8, 8, 10_000).astype("f4")
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    there = turned("model.layers.0.linear_attn.A_log", rates, heads, into=True)
    assert there.dtype == np.float32
    back = turned("model.layers.0.linear_attn.A_log", there, heads, into=False)
    np.testing.assert_allclose(back, rates, rtol=2.0**-23, atol=1e-7)


@pytest.mark.parametrize("case", FAMILIES)
def test_a_file_is_the_model_for_llama_cpp_too(case, tmp_path, monkeypatch, record_property):
    """There and back exactly. 48 ids, past the windows, as the proof has them, whose program serves
    here, too; gelu comes from llama.cpp's table of float16 values."""
    if case != READ_BY_TRANSFORMERS:
        monkeypatch.setattr(proof, "transformers_says", lambda *_: Reference(None, "not asked"))
    model, w = model_of(case)
    out = tmp_path / "m.gguf"
    found = write_gguf(model, HfTensors(model, w), lambda: w, None, out, dtype="fp32")
    if case == READ_BY_TRANSFORMERS:
        assert found.folder_to_transformers is not None, found.transformers
        assert found.folder_to_transformers.greedy_agreement > 0.99
    back = load_model(out)
    # norms are stored as 1 + scale and rates as -e^A_log, which rounds
    shifted = case.startswith(
        ("Gemma", "Qwen3_5", "Qwen3Next", "GraniteMoeHybrid", "Nemotron", "Bamba", "Mamba2")
    )
    close = np.testing.assert_allclose if shifted else np.testing.assert_array_equal
    options = {"rtol": 1e-5, "atol": 2e-7} if shifted else {}
    jax.tree.map(lambda a, b: close(np.asarray(a), b, **options), back.weights, w)
    assert not other_fields(model, back.model)  # of `lmwright verify`

    llama_cpp.needed()
    ids = proof.proof_tokens(model, None)
    if getattr(model.rope_scaling, "borders", "whole") == "exact":  # which llama.cpp rounds
        model = replace(model, rope_scaling=replace(model.rope_scaling, borders="whole"))
    if case.startswith("GPT"):  # whose GELU is always the tanh form there
        model = replace(model, mlp="gelu_tanh")
    found = agreement(logits(model, w, ids)[:1], llama_cpp.logits(out, ids[0])[None])
    apart = found.max_abs_diff / found.max_abs_logit
    record_property("llama_cpp_logits", apart)
    # a recurrence adds up rounding: on a CPU with AMX ours is 8e-6 off float64, theirs 4e-6
    rounding = 2e-5 if case.startswith(("Qwen3_5", "Qwen3Next")) else 1e-5
    of_table = case.startswith(("Gemma", "GPT", "Starcoder2", "PhiFor"))
    assert apart < (1e-3 if of_table else rounding)


def test_heads_smaller_than_a_block_change_places(tmp_path, monkeypatch):
    """Values of one block of 32 in Hugging Face's order lie in several in GGUF's."""
    monkeypatch.setattr(proof, "transformers_says", lambda *_: Reference(None, "not asked"))
    heads = {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    monkeypatch.setitem(FAMILIES, "Qwen3_5ForCausalLM", FAMILIES["Qwen3_5ForCausalLM"] | heads)
    model, w = model_of("Qwen3_5ForCausalLM")
    write_gguf(model, HfTensors(model, w), lambda: w, None, tmp_path / "m.gguf", dtype="q8_0")
    file = GgufFile(tmp_path / "m.gguf")
    assert (
        file.kind("blk.0.ssm_out.weight") == "F16" and file.kind("blk.0.attn_qkv.weight") == "Q8_0"
    )


@pytest.mark.parametrize(
    "case, change, field",
    [
        ("MistralForCausalLM", {"sliding_window": 7}, "window"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 144}, "query_dim"),
        ("Gemma3ForCausalLM", {"layer_types": [LOCAL, GLOBAL] * 3 + [LOCAL]}, "pattern"),
        ("Gemma4ForCausalLM", {"num_kv_shared_layers": 3}, "a local layer and then a global one"),
        (
            "Gemma4ForCausalLM keys",
            {
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 8,
            },
            "with experts are neither read",
        ),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("CohereForCausalLM", {"use_qk_norm": True}, "64 layers or more, and in no smaller one"),
        ("CohereForCausalLM norms", {"use_qk_norm": False}, "64 layers or more"),
        ("CohereForCausalLM", {"attention_bias": True}, "has no biases"),
        ("Cohere2ForCausalLM 4", {"layer_types": [GLOBAL] * 6}, "one at least"),
        ("Cohere2ForCausalLM 4", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("Starcoder2ForCausalLM", {"sliding_window": 7}, "window"),
        ("Starcoder2ForCausalLM", {"use_bias": False}, "use_bias"),
        ("Starcoder2ForCausalLM", {"hidden_act": "gelu"}, "is gelu_pytorch_tanh, not gelu"),
        ("StableLmForCausalLM", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("PhiForCausalLM", {"qk_layernorm": True}, "qk_layernorm"),
        ("NemotronForCausalLM", {"head_dim": 32}, "head_dim 32 times 6 heads"),
        ("NemotronForCausalLM", {"hidden_act": "gelu"}, "is relu2, not gelu"),
        ("NemotronForCausalLM", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("Jais2ForCausalLM", {"mlp_bias": False}, "GGUF cannot say mlp_bias = False"),
        ("OlmoForCausalLM", {"attention_bias": True}, "has no biases"),
        ("MellumForCausalLM", {"mlp_layer_types": ["dense"] + ["sparse"] * 3}, "in every layer"),
        (
            "MellumForCausalLM",
            {
                "rope_parameters": {
                    GLOBAL: {"rope_type": "default", "rope_theta": 5003.0},
                    LOCAL: {"rope_type": "default", "rope_theta": 301.0},
                }
            },
            "set model.local_rope_theta = 5003",
        ),
        ("ExaoneMoeForCausalLM", {"layer_types": [GLOBAL] * 4}, "has layers with a window"),
        ("ExaoneMoeForCausalLM", {"tie_word_embeddings": True}, "exaone-moe has no head that is"),
        ("ExaoneMoeForCausalLM", {"mlp_layer_types": ["sparse", "dense"] * 2}, "plain layers bef"),
        ("AfmoeForCausalLM", {"layer_types": [GLOBAL, LOCAL] * 3}, "in all layers but every fo"),
        ("AfmoeForCausalLM", {"mup_enabled": False}, "mup_enabled = False"),
        ("Llama4ForCausalLM", {"attention_chunk_size": 16}, "attention_chunk_size = 8192, not 16"),
        ("Llama4ForCausalLM", {"moe_layers": [0, 3]}, "experts in the last of every so many"),
        ("Llama4ForCausalLM", {"attention_bias": True}, "llama4 has no biases"),
        ("SolarOpenForCausalLM", {"rope_parameters": LLAMA3}, "glm4moe does not compute the rope"),
        (
            "Ernie4_5_MoeForCausalLM",
            {"moe_layer_end_index": 2},
            "plain layers only at the beginning",
        ),
        ("EuroBertForMaskedLM llada", {"attention_bias": True}, "has no biases"),
        ("EuroBertForMaskedLM llada", {"rope_parameters": LLAMA3}, "llada does not compute"),
        ("Qwen3ForCausalLM", {"rope_parameters": LLAMA3}, "qwen3 does not compute"),
        ("Qwen3ForCausalLM", {"attention_bias": True}, "qwen3 has no biases"),
        ("GraniteForCausalLM", {"hidden_act": "relu"}, "hidden_act"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0] * 3}, "rope_pattern"),
        (
            "Glm4MoeLiteForCausalLM",
            {"rope_parameters": {"rope_type": "linear", "factor": 3.5, "rope_theta": 5003.0}},
            "of kind linear here",
        ),
        (  # YaRN that scales nothing is no scaling in GGUF
            "Ministral3ForCausalLM",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 1.0,
                    "original_max_position_embeddings": 12,
                    "rope_theta": 5003.0,
                    "llama_4_scaling_beta": 0.37,
                }
            },
            "^model: cannot be expressed in a GGUF file, whose reader would refuse it ",
        ),
        ("Exaone4ForCausalLM", {"sliding_window": 9}, "EXAONE 4 of 64 layers"),
        ("Exaone4ForCausalLM", {"num_hidden_layers": 64}, "EXAONE 4 of 64 layers"),
        (
            "NemotronHForCausalLM experts",
            {"layers_block_type": ["linear_attention", "moe", "mlp"]},
            "no mlps beside experts",
        ),
        ("NemotronHForCausalLM experts", {"n_group": 4, "topk_group": 2}, "n_group = 4"),
        ("HunYuanDenseV1ForCausalLM", {"attention_bias": True}, "hunyuan-dense has no biases"),
        ("HunYuanMoEV1ForCausalLM", {"attention_bias": True}, "hunyuan-moe has no biases"),
        ("SeedOssForCausalLM", {"attention_out_bias": True}, "attention_out_bias = True"),
        ("Lfm2MoeForCausalLM", {"routed_scaling_factor": 1.7}, "routed_scaling_factor = 1.7"),
        ("Lfm2MoeForCausalLM", {"use_expert_bias": False}, "use_expert_bias = False"),
        ("Lfm2ForCausalLM", {"head_dim": 32}, "llama.cpp's lfm2;"),
        ("Lfm2MoeForCausalLM", {"head_dim": 32}, "llama.cpp's lfm2moe;"),
        ("Lfm2ForCausalLM", {"layer_types": [GLOBAL] * 4}, "mixer_pattern"),
        ("Lfm2MoeForCausalLM", {"layer_types": ["conv"] * 4}, "mixer_pattern"),
        ("Phi3ForCausalLM", {"sliding_window": 7}, "window"),
        ("Phi3ForCausalLM", {"head_dim": 32}, "llama.cpp's phi3"),
        ("GPTNeoXForCausalLM", {"hidden_act": "relu"}, "gptneox is gelu or gelu_new, not relu"),
        ("GPTBigCodeForCausalLM", {"activation_function": "relu"}, "starcoder is gelu_pytorch_ta"),
        ("GPT2LMHeadModel", {"activation_function": "relu"}, "gpt2 is gelu or gelu_new, not relu"),
        ("GPTNeoXForCausalLM", {"attention_bias": False}, "attention_bias = False"),
        ("Olmo3ForCausalLM", {"layer_types": [LOCAL, GLOBAL] * 3}, "pattern"),
        ("Qwen3_5ForCausalLM", {"rms_norm_eps": 1e-5}, "model.norm_eps = 1e-05 instead of 1e-06"),
        ("Qwen3_5ForCausalLM", {"layer_types": [GLOBAL, "linear_attention"] * 2}, "mixer_pattern"),
        ("Qwen3_5ForCausalLM", {"layer_types": ["linear_attention"] * 4}, "mixer_pattern"),
        ("ArceeForCausalLM", {"mlp_bias": True}, "arcee has no biases"),
        ("OlmoeForCausalLM", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("Qwen2MoeForCausalLM", {"tie_word_embeddings": True}, "llama.cpp's qwen2moe has no head"),
        ("ApertusForCausalLM", {"tie_word_embeddings": True}, "llama.cpp's apertus has no head"),
        ("MiniMaxM2ForCausalLM", {"tie_word_embeddings": True}, "minimax-m2 has no head that"),
        ("Dots1ForCausalLM", {"tie_word_embeddings": True}, "llama.cpp's dots1 has no head that"),
        ("Qwen2ForCausalLM", {"head_dim": 32}, "head_dim 32 times 6 heads is not hidden_size 96"),
        ("Qwen2ForCausalLM dream", {"head_dim": 32}, "llama.cpp's dream"),
        ("Olmo2ForCausalLM", {"head_dim": 32}, "llama.cpp's olmo2"),
        ("Dots1ForCausalLM", {"num_key_value_heads": 2}, "dots1 has as many kv heads as heads"),
        ("DeepseekV2ForCausalLM", {"num_hidden_layers": 4}, "only in models of 26 or 27 layers"),
        (
            "DeepseekV2ForCausalLM",
            {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
            "the two best experts of a group",
        ),
        (
            "DeepseekV3ForCausalLM",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 48,
                    "rope_theta": 5003.0,
                    "mscale": 1.0,
                }
            },
            "mscale and mscale_all_dim alike",
        ),
        (
            "Glm4MoeLiteForCausalLM",
            {"mlp_layer_types": ["sparse", "dense"] * 2},
            "plain layers bef",
        ),
    ],
)
def test_what_a_file_cannot_say_is_refused(case, change, field, tmp_path):
    """Even where rounding would hide it."""
    said = SIZES | {"architectures": [case.split()[0]]} | FAMILIES[case] | change
    model = model_from_config(said, case)
    w = map_params(lambda p: np.full(p.shape, 0.01, "f4"), model.spec())
    with pytest.raises(UserError, match=field):
        write_gguf(model, HfTensors(model, w), lambda: w, None, tmp_path / "m.gguf", dtype="q8_0")
    assert list(tmp_path.iterdir()) == []


def test_keys_and_values_that_nothing_reads_are_left():
    """Files made of released Gemma 4 have them in layers that share those of others."""
    config = {"num_hidden_layers": 6, "num_kv_shared_layers": 2}
    for unused in ("blk.4.attn_k.weight", "blk.5.attn_v.weight", "blk.5.attn_k_norm.weight"):
        assert is_unused(unused, config)
    for used in ("blk.3.attn_v.weight", "blk.4.attn_q.weight", "token_embd.weight"):
        assert not is_unused(used, config)


def test_a_file_names_the_layers_with_windows():
    """Released files of OLMo 3 list them; transformers' own default is another pattern."""
    shapes = {"token_embd.weight": (97, 96)}
    meta = {f"olmo2.{key}": value for key, value in {
        "block_count": 4, "embedding_length": 96, "feed_forward_length": 160,
        "attention.head_count": 6, "attention.sliding_window": 9,
        "attention.sliding_window_pattern": [True, False, True, False],
    }.items()}  # fmt: skip
    found = config_of(meta | {"general.architecture": "olmo2"}, shapes, "here")
    assert found["architectures"] == ["Olmo3ForCausalLM"]
    assert found["layer_types"] == [LOCAL, GLOBAL] * 2
    del meta["olmo2.attention.sliding_window"]
    found = config_of(meta | {"general.architecture": "olmo2"}, shapes, "here")
    assert found["architectures"] == ["Olmo2ForCausalLM"]


@pytest.mark.parametrize("name", ["glm4moe", "nemotron_h_moe"])
def test_shares_sum_to_one_only_where_a_file_says_so(name):
    """llama.cpp's own rule; the config.json of transformers' classes has another."""
    meta = {"general.architecture": name, f"{name}.block_count": 1}
    shapes = {"token_embd.weight": (97, 96)}
    assert config_of(meta, shapes, "here")["norm_topk_prob"] is False
    said = meta | {f"{name}.expert_weights_norm": True}
    assert config_of(said, shapes, "here")["norm_topk_prob"] is True


def test_gate_and_up_of_experts_in_one_tensor(tmp_path, monkeypatch):
    """As llama.cpp's converter leaves those of Mistral 4; it computes the same from both forms."""
    gguf = pytest.importorskip("gguf")
    monkeypatch.setattr(proof, "transformers_says", lambda *_: Reference(None, "not asked"))
    model, w = model_of("Mistral4ForCausalLM")
    write_gguf(model, HfTensors(model, w), lambda: w, None, tmp_path / "m.gguf", dtype="fp32")
    file = GgufFile(tmp_path / "m.gguf")
    arrays = {name: file.read(name, None) for name in file.tensors}
    for name in [name for name in arrays if ".ffn_gate_exps." in name]:
        both = [arrays.pop(name.replace("gate", part)) for part in ("gate", "up")]
        arrays[name.replace("gate", "gate_up")] = np.concatenate(both, axis=1)
    writer = gguf.GGUFWriter(tmp_path / "joint.gguf", "mistral4")
    kinds = {bool: writer.add_bool, str: writer.add_string, float: writer.add_float32,
             int: writer.add_uint32}  # fmt: skip
    for key, value in file.meta.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            kinds[type(value)](key, value)
    for name, array in arrays.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    for write in (
        writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file,
        writer.close,
    ):  # fmt: skip
        write()
    back = load_model(tmp_path / "joint.gguf")
    assert not other_fields(model, back.model)
    jax.tree.map(np.testing.assert_array_equal, back.weights, w)
    llama_cpp.needed()
    ids = proof.proof_tokens(model, None)[0]
    found = [llama_cpp.logits(tmp_path / f"{name}.gguf", ids) for name in ("m", "joint")]
    np.testing.assert_allclose(*found, atol=1e-5 * np.abs(found[0]).max())
