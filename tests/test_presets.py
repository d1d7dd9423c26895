"""Model presets: their size is that of the published model, by an independent count."""

from dataclasses import replace

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from lmwright import presets
from lmwright.core.param import count_params
from lmwright.formats.hf_read import model_from_config
from lmwright.formats.open import load_run
from lmwright.models.counts import count_active
from lmwright.presets import models

ALL = presets.of_section("model")
MODELS = models.PRESETS | models.SHORT
# tests/parity/test_fanformer counts the other
OF_LLAMA = [name for name, make in MODELS.items() if make().kind == "llama"]
WITH_EXPERTS = {  # of the published models: in their files, active ones as their pages say
    "olmoe-1b-7b": (6_919_161_856, 1.3e9),
    "qwen1-5-moe-a2-7b": (14_315_784_192, 2.69e9),  # as transformers counts its config.json
    "qwen3-30b-a3b": (30_532_122_624, 3.3e9),
    "qwen3-5-35b-a3b": (34_660_610_688, 3.45e9),  # as transformers counts its config.json
    "qwen3-next-80b-a3b": (79_674_391_296, 3.87e9),  # as transformers counts its config.json
    "mellum2-12b-a2-5b": (12_149_923_072, 2.44e9),  # as transformers counts its config.json
    "ernie-4-5-21b-a3b": (21_825_437_888, 3.35e9),  # as transformers counts its config.json
    "granite-3-1-1b-a400m": (1_334_625_280, 0.429e9),  # as transformers counts its config.json
    "granite-3-1-3b-a800m": (3_298_788_864, 0.883e9),  # two bytes each in its files
    "granite-4-0-h-tiny": (6_939_037_248, 1.47e9),  # as transformers counts its config.json
    "granite-4-0-h-small": (32_207_337_984, 9e9),
    # a bias of each expert is no parameter there
    "nemotron-3-nano-30b-a3b": (31_577_940_288, 3.58e9),
    "nemotron-3-super-120b-a12b": (120_668_707_840, 12.8e9),
    "lfm2-8b-a1b": (8_339_930_560, 1.56e9),  # with 704 numbers that are no parameters there
    "gemma4-26b-a4b": (25_233_141_790, 3.82e9),  # with 30 numbers that are no parameters there
    "deepseek-v2-lite": (15_706_484_224, 2.66e9),
    "deepseek-v3": (671_026_419_200, 37.6e9),
    "moonlight-16b-a3b": (None, 2.91e9),
    "glm-4-7-flash": (None, 3.9e9),
    "glm-4-5-air": (None, 13.4e9),
    # with the scales of float8, one of 128 x 128, its files hold 228_703_644_928
    "minimax-m2": (228_689_764_864, 11.0e9),
    "k-exaone-236b-a23b": (236_571_156_352, 23.7e9),  # as transformers counts its config.json
    "solar-open-100b": (102_651_799_552, 12.1e9),  # as transformers counts its defaults
    "llama-4-scout": (107_769_861_120, 17.2e9),  # as transformers counts its config.json
    "llama-4-maverick": (400_711_848_960, 17.2e9),  # as transformers counts its config.json
    "trinity-nano": (6_120_003_328, 1.02e9),  # as transformers counts its config.json
    "trinity-mini": (26_123_974_400, 3.47e9),  # as transformers counts its config.json
    "mistral-small-4-119b": (118_972_826_624, 6.63e9),  # as transformers counts its defaults
    "gpt-oss-20b": (20_914_757_184, 4.19e9),  # 3.61 and 5.13 without the embedding
    "gpt-oss-120b": (116_829_156_672, 5.71e9),
    "mixtral-8x7b": (46_702_792_704, 12.9e9),
    "hunyuan-a13b": (80_393_183_232, 12.7e9),
    "phi-3-5-moe": (41_873_153_344, 6.64e9),
    "moe-6m": (None, 3.7e6),
}

MINIMAX_M2 = {  # config.json of the release
    "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
    "intermediate_size": 1536, "max_position_embeddings": 196_608, "model_type": "minimax_m2",
    "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8,
    "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
    "num_mtp_modules": 3, "output_router_logits": False, "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6, "rope_theta": 5_000_000, "rotary_dim": 64, "router_aux_loss_coef": 0.001,
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "sliding_window": None,
    "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True,
    "vocab_size": 200_064,
}  # fmt: skip

LOCAL, GLOBAL = "sliding_attention", "full_attention"
MELLUM2 = {  # config.json of the release
    "architectures": ["MellumForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 0, "dtype": "bfloat16", "eos_token_id": 28, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2304, "initializer_range": 0.02,
    "intermediate_size": 7168, "layer_types": [LOCAL, LOCAL, LOCAL, GLOBAL] * 7,
    "max_position_embeddings": 131_072, "max_window_layers": 0,
    "mlp_layer_types": ["sparse"] * 28, "model_type": "mellum", "moe_intermediate_size": 896,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        GLOBAL: {
            "attention_factor": 1.2772588722239782, "beta_fast": 32.0, "beta_slow": 1.0,
            "factor": 16.0, "original_max_position_embeddings": 8192, "rope_theta": 500_000.0,
            "rope_type": "yarn",
        },
        LOCAL: {"rope_theta": 500_000.0, "rope_type": "default"},
    },
    "router_aux_loss_coef": 0.001, "sliding_window": 1024, "tie_word_embeddings": False,
    "use_cache": True, "use_sliding_window": True, "vocab_size": 98_304,
}  # fmt: skip

K_EXAONE = {  # config.json of the release, with the name that its class has now
    "architectures": ["ExaoneMoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
    "dtype": "bfloat16", "eos_token_id": 53, "first_last_k_dense_replace": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 6144, "initializer_range": 0.02,
    "intermediate_size": 18_432, "is_moe_layer": [False] + [True] * 47,
    "layer_types": [LOCAL, LOCAL, LOCAL, GLOBAL] * 12, "max_position_embeddings": 262_144,
    "model_type": "exaone_moe", "moe_intermediate_size": 2048, "n_group": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8,
    "num_shared_experts": 1, "pad_token_id": 0, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "rope_theta": 1_000_000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "sliding_window": 128, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True, "vocab_size": 153_600,
}  # fmt: skip

SOLAR_OPEN = {  # config.json of the release
    "architectures": ["SolarOpenForCausalLM"], "first_k_dense_replace": 0, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10_240,
    "max_position_embeddings": 131_072, "model_type": "solar_open", "moe_intermediate_size": 1280,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 8, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 2.0, "original_max_position_embeddings": 65_536, "type": "yarn",
    },
    "rope_theta": 1_000_000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
    "vocab_size": 196_608,
}  # fmt: skip
TRINITY_NANO = {  # config.json of the release
    "architectures": ["AfmoeForCausalLM"], "attention_dropout": 0.0, "dtype": "bfloat16",
    "global_attn_every_n_layers": 4, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "initializer_range": 0.02, "intermediate_size": 3072,
    "layer_types": [LOCAL, LOCAL, LOCAL, GLOBAL] * 14, "max_position_embeddings": 131_072,
    "model_type": "afmoe", "moe_intermediate_size": 256, "mup_enabled": True, "n_group": 1,
    "num_attention_heads": 8, "num_dense_layers": 2, "num_expert_groups": 1, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 56, "num_key_value_heads": 2,
    "num_limited_groups": 1, "num_shared_experts": 1, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "rope_theta": 10_000, "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid",
    "sliding_window": 2048, "tie_word_embeddings": False, "topk_group": 1, "use_cache": True,
    "use_grouped_mm": True, "vocab_size": 200_192,
}  # fmt: skip

GPT_OSS = {  # config.json of the release
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200_002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
    "intermediate_size": 2880, "max_position_embeddings": 131_072, "model_type": "gpt_oss",
    "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199_999,
    "quantization_config": {"quant_method": "mxfp4"}, "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
        "original_max_position_embeddings": 4096, "truncate": False,
    },
    "rope_theta": 150_000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201_088,
}  # fmt: skip

C, F = "conv", "full_attention"
LFM2 = {  # as released
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 1024,
    "block_ff_dim": 6656, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256, "block_norm_eps": 1e-5, "block_out_init_scale": 1.0,
    "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1, "conv_L_cache": 3,
    "conv_bias": False, "conv_dim": 1024, "conv_dim_out": 1024, "conv_use_xavier_init": True,
    "eos_token_id": 7, "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 6656,
    "layer_types": [C, C, F, C, C, F, C, C, F, C, F, C, F, C, F, C],
    "max_position_embeddings": 128_000, "model_type": "lfm2", "norm_eps": 1e-5,
    "num_attention_heads": 16, "num_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "pad_token_id": 0, "rope_theta": 1_000_000.0, "use_cache": True, "use_pos_enc": True,
    "vocab_size": 65_536,
}  # fmt: skip
LFM2_MOE = {
    "architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3,
    "conv_bias": False, "eos_token_id": 7, "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 7168,
    "layer_types": [C, C, F, C, C, C, F, C, C, C, F, C, C, C, F, C, C, C, F, C, C, F, C, C],
    "max_position_embeddings": 128_000, "model_type": "lfm2_moe", "moe_intermediate_size": 1792,
    "norm_eps": 1e-5, "norm_topk_prob": True, "num_attention_heads": 32, "num_dense_layers": 2,
    "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "pad_token_id": 0, "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
    "routed_scaling_factor": 1.0, "tie_word_embeddings": True, "use_expert_bias": True,
    "vocab_size": 65_536,
}  # fmt: skip
M, A = "mamba", "attention"
GRANITE4 = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "attention_multiplier": 0.015625, "bos_token_id": 100_257,
    "embedding_multiplier": 12, "eos_token_id": 100_257, "hidden_act": "silu", "hidden_size": 768,
    "initializer_range": 0.1, "intermediate_size": 2048, "logits_scaling": 3,
    "layer_types": [*[M] * 10, A, M, M, A, M, M, M, A, *[M] * 9, A, *[M] * 4],
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 32,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
    "mamba_proj_bias": False, "max_position_embeddings": 32_768,
    "model_type": "granitemoehybrid", "num_attention_heads": 12, "num_experts_per_tok": 0,
    "num_hidden_layers": 32, "num_key_value_heads": 4, "num_local_experts": 0,
    "position_embedding_type": "nope", "residual_multiplier": 0.246, "rms_norm_eps": 1e-5,
    "rope_theta": 10_000, "shared_intermediate_size": 2048, "tie_word_embeddings": True,
    "vocab_size": 100_352,
}  # fmt: skip
STARCODER2 = {  # as released
    "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 6144,
    "initializer_range": 0.01275, "intermediate_size": 24_576, "max_position_embeddings": 16_384,
    "mlp_type": "default", "model_type": "starcoder2", "norm_epsilon": 1e-5,
    "norm_type": "layer_norm", "num_attention_heads": 48, "num_hidden_layers": 40,
    "num_key_value_heads": 4, "rope_theta": 100_000, "sliding_window": 4096,
    "tie_word_embeddings": False, "use_bias": True, "use_cache": True, "vocab_size": 49_152,
}  # fmt: skip
PHI_2 = {  # as released
    "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 50_256,
    "embd_pdrop": 0.0, "eos_token_id": 50_256, "hidden_act": "gelu_new", "hidden_size": 2560,
    "initializer_range": 0.02, "intermediate_size": 10_240, "layer_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "model_type": "phi", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4,
    "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None, "rope_theta": 10_000.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 51_200,
}  # fmt: skip
FALCON_H1 = {  # as released
    "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "attn_layer_indices": None,
    "embedding_multiplier": 5.656854249492381, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 2048,
    "key_multiplier": 0.39062499999999994, "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
    "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_n_heads": 24, "mamba_norm_before_gate": False, "mamba_proj_bias": False,
    "mamba_rms_norm": False, "mamba_use_mlp": True, "max_position_embeddings": 16_384,
    "mlp_bias": False, "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "model_type": "falcon_h1", "num_attention_heads": 8, "num_hidden_layers": 36,
    "num_key_value_heads": 2, "projectors_bias": False, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 1e11, "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False,
    "vocab_size": 32_784,
}  # fmt: skip
BAMBA = {  # as released
    "architectures": ["BambaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "bos_token_id": 128_000,
    "eos_token_id": 128_001, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14_336, "mamba_chunk_size": 256,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False,
    "max_position_embeddings": 262_144, "mlp_bias": False, "model_type": "bamba",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_logits_to_keep": 1, "pad_token_id": 0, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 128_256,
}  # fmt: skip
QWEN3_NEXT = {  # as released
    "architectures": ["Qwen3NextForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151_643,
    "decoder_sparse_step": 1, "eos_token_id": 151_645, "full_attention_interval": 4,
    "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144, "mlp_only_layers": [], "model_type": "qwen3_next",
    "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
    "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
    "num_key_value_heads": 2, "output_router_logits": False, "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10_000_000,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151_936,
}  # fmt: skip

# Counts in the safetensors metadata of the published models, and ours of kisoku.
PUBLISHED = {
    "llama-135m": 134_515_008,
    "llama-360m": 361_821_120,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "kisoku-3b": 3_325_627_392,
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
    "llama-13b": 13_015_864_320,
    "llama-34b": 33_743_970_304,
    "llama-70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", OF_LLAMA)
def test_size_equals_that_of_transformers(name):
    model = MODELS[name]()
    with torch.device("meta"):  # shapes without memory
        reference = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=model.vocab_size,
                hidden_size=model.embed_dim,
                intermediate_size=model.mlp_dim,
                num_hidden_layers=model.num_layers,
                num_attention_heads=model.num_heads,
                num_key_value_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                tie_word_embeddings=model.head == "tied",
            )
        )
        reference.tie_weights()
    count = sum(p.numel() for p in {id(p): p for p in reference.parameters()}.values())
    assert count_params(model.spec()) == count == PUBLISHED.get(name, count)


@pytest.mark.parametrize("name", MODELS)
def test_the_name_and_the_docstring_tell_the_size(name):
    count = count_params(MODELS[name]().spec())
    said = name.rsplit("-", 1)[-1]
    size = float(said[:-1]) * {"k": 1e3, "m": 1e6, "b": 1e9}[said[-1]]
    assert 0.9 < count / size < 1.25
    number, unit = MODELS[name].__doc__.split(":")[0].split()
    assert abs(count / {"M": 1e6, "B": 1e9}[unit] - float(number)) <= 0.051


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_models_with_experts(name):
    model = ALL[name]()
    config = model.hf.config(model)
    cls = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        theirs = cls(cls.config_class(**config))
    theirs.tie_weights()
    count, (published, active) = count_params(model.spec()), WITH_EXPERTS[name]
    beside = ("layer_scalar", "correction_bias", "expert_bias")
    fixed = sum(a.numel() for n, a in theirs.named_buffers() if n.endswith(beside))
    assert count == theirs.num_parameters() + fixed == (published or count)
    assert count_active(model) == pytest.approx(active, rel=0.03)
    said = [count, count_active(model)]
    for size, text in zip(said, ALL[name].__doc__.split(" active:")[0].split(", "), strict=True):
        number, unit = text.split()
        assert float(f"{size / {'M': 1e6, 'B': 1e9}[unit]:.3g}") == float(number)
    unsaid = ["z_loss"] + ["balance_loss"] * ("router_aux_loss_coef" not in config)
    same = replace(model, experts=replace(model.experts, **dict.fromkeys(unsaid, 0.0)))
    assert model_from_config(config, "config.json") == same


def test_flops_of_heads_whose_values_are_narrower_than_keys():
    """Of DeepSeek-V2-Lite, by hand: scores over 192 numbers, sums of 128, half a row of keys."""
    weights, length = 2_661_150_208 - 102_400 * 2048, 4096  # the table is looked up
    keys = 3 * 2 * 27 * 16 * (length / 2) * (192 + 128)
    found = ALL["deepseek-v2-lite"]().work(length).flops_per_token()
    assert found == pytest.approx(6 * weights + keys, rel=2e-3)


def test_kisoku_untied():
    untied = replace(MODELS["kisoku-3b"](), head="untied")
    assert count_params(untied.spec()) == 3_480_161_280


@pytest.mark.parametrize("steps, warmup, decay", [(1, 0, 1), (2, 1, 1), (30, 3, 27)])
def test_a_short_trial_fits_the_decay_of_a_recipe(steps, warmup, decay):
    run = load_run({
        "recipe": "pretrain-encoder", "name": "short", "dir": "run", "data": {"dir": "data"},
        "model": {"preset": "ettin-17m"}, "train": {"steps": steps, "global_batch_size": 8},
    })  # fmt: skip
    assert (run.optim.schedule.warmup_steps, run.optim.schedule.decay_steps) == (warmup, decay)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gpt-oss-20b", GPT_OSS),
        ("minimax-m2", MINIMAX_M2),
        ("mellum2-12b-a2.5b", MELLUM2),
        ("k-exaone-236b-a23b", K_EXAONE),
        ("solar-open-100b", SOLAR_OPEN),
        ("trinity-nano", TRINITY_NANO),
        ("qwen3-next-80b-a3b", QWEN3_NEXT),
        ("lfm2-350m", LFM2),
        ("lfm2-8b-a1b", LFM2_MOE),
        ("granite-4-0-h-350m", GRANITE4),
        ("falcon-h1-0-5b", FALCON_H1),
        ("bamba-9b", BAMBA),
        ("starcoder2-15b", STARCODER2),
        ("phi-2", PHI_2),
    ],
)
def test_what_a_release_says_is_the_preset(name, config):
    assert ALL[name]() == model_from_config(config, "config.json")
