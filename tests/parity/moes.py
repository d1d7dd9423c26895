"""Families with experts, as their config.json, for `test_moe_parity.py`."""

from tests.parity.granites import GRANITE4_MOE, GRANITE_MOE, NEMOTRON_MOE
from tests.parity.row import GLOBAL, LOCAL

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 192,
    "rms_norm_eps": 3e-4, "rope_parameters": {"rope_type": "default", "rope_theta": 5003.0},
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENTS = {  # of attention; narrow heads, so that none is as wide as another part
    "num_key_value_heads": 6, "head_dim": None, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 14, "kv_lora_rank": 26,
}  # fmt: skip
PHIMOE = {
    "num_local_experts": 7, "num_experts_per_tok": 2, "intermediate_size": 28,
    "router_aux_loss_coef": 0.3, "router_jitter_noise": 0.21, "attention_bias": True,
}  # fmt: skip
ROWS = {
    "mixtral": (
        "MixtralForCausalLM",
        {
            "num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 28,
            "sliding_window": 9, "router_aux_loss_coef": 0.3, "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "intermediate_size": 80, "decoder_sparse_step": 2, "mlp_only_layers": [3],
            "num_hidden_layers": 4, "norm_topk_prob": True, "attention_bias": True,
            "router_aux_loss_coef": 0.3,
            "use_sliding_window": True, "sliding_window": 9,
        },
    ),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "intermediate_size": 80, "decoder_sparse_step": 2, "mlp_only_layers": [3],
            "num_hidden_layers": 4, "shared_expert_intermediate_size": 44,
            "router_aux_loss_coef": 0.3,
        },
    ),
    "mellum": (
        "MellumForCausalLM",
        {
            "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "intermediate_size": 80, "num_hidden_layers": 4, "norm_topk_prob": True,
            "attention_bias": True, "router_aux_loss_coef": 0.3, "sliding_window": 9,
            "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 5003.0, "factor": 6.0,
                    "original_max_position_embeddings": 13,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 301.0},
            },
        },
    ),
    "ernie4-5-moe": (
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 28, "hidden_act": "relu",
            "intermediate_size": 80, "num_hidden_layers": 5, "moe_num_shared_experts": 3,
            "moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        {
            "num_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 28, "head_dim": None,
            "norm_topk_prob": False, "clip_qkv": 0.9, "attention_bias": True,
            "router_aux_loss_coef": 0.3,
        },
    ),
    "qwen3-5-moe": (
        "Qwen3_5MoeForCausalLM",
        {
            "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "shared_expert_intermediate_size": 44, "router_aux_loss_coef": 0.3,
            "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 9,
            "linear_value_head_dim": 9, "num_hidden_layers": 2, "full_attention_interval": 2,
            "rms_norm_eps": 0.05,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5003.0, "partial_rotary_factor": 0.4,
            },
        },
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        {
            "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "shared_expert_intermediate_size": 44, "router_aux_loss_coef": 0.3,
            "norm_topk_prob": False,
            "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 9,
            "linear_value_head_dim": 9, "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"], "rms_norm_eps": 0.05,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5003.0, "partial_rotary_factor": 0.4,
            },
        },
    ),
    "lfm2-moe": (
        "Lfm2MoeForCausalLM",
        {
            "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "intermediate_size": 80, "num_dense_layers": 2, "num_hidden_layers": 5,
            "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
            "routed_scaling_factor": 1.7, "rms_norm_eps": None, "norm_eps": 3e-4,
            "tie_word_embeddings": True,
        },
    ),
    "granite4-moe": ("GraniteMoeHybridForCausalLM", GRANITE4_MOE),
    "granite-moe": ("GraniteMoeForCausalLM", GRANITE_MOE),
    "granite-moe-shared": (
        "GraniteMoeSharedForCausalLM",
        GRANITE_MOE | {
            "shared_intermediate_size": 44, "hidden_act": "relu", "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 5003.0, "factor": 6.0,
                "original_max_position_embeddings": 13,
            },
        },
    ),
    "granite-moe-swa": (
        "GraniteMoeSWAForCausalLM",
        GRANITE_MOE | {
            "shared_intermediate_size": 44, "sliding_window": 9, "num_hidden_layers": 5,
            "layer_rope_theta": [0, 301.0, 301.0, 301.0, 0],
        },
    ),
    "granite-moe-swa-thetas": (
        "GraniteMoeSWAForCausalLM",
        GRANITE_MOE | {
            "sliding_window": 9, "hidden_act": "relu", "tie_word_embeddings": False,
            "layer_types": [LOCAL, GLOBAL, LOCAL], "layer_rope_theta": [301.0, 5003.0, 301.0],
        },
    ),
    "phimoe": (
        "PhimoeForCausalLM",
        {
            **PHIMOE, "sliding_window": 9, "lm_head_bias": True, "tie_word_embeddings": True,
            "original_max_position_embeddings": 160, "max_position_embeddings": 320,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 5003.0, "original_max_position_embeddings":
                160, "short_factor": [1.1, 1.3, 1.6, 2.2, 3.1], "long_factor": [2.0] * 5,
                "short_mscale": 1.3, "long_mscale": 1.3,
            },
        },
    ),
    "phimoe-plain": (
        "PhimoeForCausalLM", PHIMOE | {"hidden_act": "relu", "attention_bias": False},
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1ForCausalLM",
        {
            "num_experts": 7, "moe_topk": [3] * 3, "intermediate_size": 28, "hidden_act": "relu",
            "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": {
                "rope_type": "dynamic", "rope_theta": 5003.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "hunyuan-moe-plain": (
        "HunYuanMoEV1ForCausalLM", {"num_experts": 7, "moe_topk": 3, "intermediate_size": 28},
    ),
    "nemotron-h-moe": ("NemotronHForCausalLM", NEMOTRON_MOE | {"moe_latent_size": 20}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 28,
            "num_hidden_layers": 2, "sliding_window": 9, "router_aux_loss_coef": 0.3,
            "output_router_logits": True,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 5003.0, "factor": 6.0, "truncate": False,
                "original_max_position_embeddings": 13,
            },
        },
    ),
    "gemma4-moe": (
        "Gemma4ForCausalLM",
        {
            "enable_moe_block": True, "num_experts": 7, "top_k_experts": 3,
            "moe_intermediate_size": 28, "intermediate_size": 80,
            "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4, "global_head_dim": 14, "attention_k_eq_v": True,
            "num_global_key_value_heads": 3, "hidden_size_per_layer_input": 0,
            "rms_norm_eps": 0.01, "final_logit_softcapping": 2.3, "rope_parameters": None,
        },
    ),
    "dots1": (
        "Dots1ForCausalLM",
        {
            "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "intermediate_size": 80, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
            "num_hidden_layers": 4, "first_k_dense_replace": 2, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "sliding_window": None, "attention_bias": True,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        LATENTS | {
            "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "intermediate_size": 80, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
            "topk_method": "group_limited_greedy", "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7, "q_lora_rank": None,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        LATENTS | {
            "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "intermediate_size": 80, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
            "first_k_dense_replace": 2, "routed_scaling_factor": 2.5, "q_lora_rank": 18,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 5003.0, "factor": 6.0, "mscale": 0.9,
                "mscale_all_dim": 0.7, "original_max_position_embeddings": 13,
            },
        },
    ),
    "mistral4": (
        "Mistral4ForCausalLM",
        LATENTS | {
            "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "intermediate_size": 80, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
            "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "q_lora_rank": 18,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 5003.0, "factor": 6.0, "mscale": 0.9,
                "mscale_all_dim": 0.7, "original_max_position_embeddings": 13,
                "llama_4_scaling_beta": 0.37,
            },
        },
    ),
    "exaone-moe": (
        "ExaoneMoeForCausalLM",
        {
            "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "intermediate_size": 80, "num_shared_experts": 2, "n_group": 4, "topk_group": 2,
            "num_hidden_layers": 4, "routed_scaling_factor": 1.7, "sliding_window": 9,
            "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 5003.0, "factor": 6.0,
                "original_max_position_embeddings": 13,
            },
        },
    ),
    "glm4-moe": (
        "Glm4MoeForCausalLM",
        {
            "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "intermediate_size": 80, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
            "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "use_qk_norm": True,
            "attention_bias": True, "head_dim": 20,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5003.0, "partial_rotary_factor": 0.3,
            },
        },
    ),
    "solar-open": (
        "SolarOpenForCausalLM",
        {
            "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
            "attention_bias": True, "hidden_act": "relu", "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 5003.0, "factor": 6.0,
                "original_max_position_embeddings": 13,
            },
        },
    ),
    "afmoe": (
        "AfmoeForCausalLM",
        {
            "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "intermediate_size": 80, "num_shared_experts": 2, "num_dense_layers": 2,
            "num_hidden_layers": 5, "route_scale": 1.7, "sliding_window": 9, "mup_enabled": True,
            "attention_bias": True, "layer_types": [
                "sliding_attention", "full_attention", "full_attention", "sliding_attention",
                "full_attention",
            ],
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5003.0, "factor": 3.5},
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {
            "num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 28,
            "intermediate_size_mlp": 80, "num_hidden_layers": 5, "moe_layers": [1, 2, 4],
            "no_rope_layers": [1, 0, 1, 1, 0], "attention_chunk_size": 9,
            "attention_bias": True, "attn_temperature_tuning": False,  # see test_llama4
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 5003.0, "factor": 6.0,
                "original_max_position_embeddings": 13,
            },
        },
    ),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM",
        {
            "num_local_experts": 12, "num_experts_per_tok": 3, "intermediate_size": 28,
            "head_dim": 20, "rope_parameters": {
                "rope_type": "default", "rope_theta": 5003.0, "partial_rotary_factor": 0.3,
            },
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLiteForCausalLM",
        LATENTS | {
            "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "intermediate_size": 80, "n_shared_experts": 2, "v_head_dim": 22, "q_lora_rank": 18,
            "mlp_layer_types": ["dense", "sparse", "dense"], "routed_scaling_factor": 1.8,
        },
    ),
}  # fmt: skip
