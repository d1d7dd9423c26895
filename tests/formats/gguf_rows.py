"""Each architecture that GGUF has, as config.json, for `test_gguf_families.py`."""

SIZES = {
    "vocab_size": 97, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 3e-4,
    "max_position_embeddings": 192, "rope_theta": 5003.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 5003.0,
}  # fmt: skip
LOCAL, GLOBAL = "sliding_attention", "full_attention"
GEMMA = {"sliding_window": 9, "query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA4 = {
    "sliding_window": 9, "num_hidden_layers": 6, "layer_types": [LOCAL, GLOBAL] * 3,
    "global_head_dim": 64, "rope_parameters": {
        GLOBAL: {"rope_type": "proportional", "rope_theta": 5003.0, "partial_rotary_factor": 0.25},
        LOCAL: {"rope_type": "default", "rope_theta": 301.0}},
}  # fmt: skip
HYBRID = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "rms_norm_eps": 1e-6,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 6, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_d_conv": 4,
    "shared_intermediate_size": 160, "embedding_multiplier": 3.7, "attention_multiplier": 0.11,
    "residual_multiplier": 0.43, "logits_scaling": 2.3, "head_dim": 16,
}  # fmt: skip
BAMBA = {
    "mamba_n_heads": 6, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 2,
    "head_dim": 32,
}  # fmt: skip
MAMBA2 = {
    "num_heads": 6, "head_dim": 32, "state_size": 32, "conv_kernel": 4, "layer_norm_epsilon": 3e-4,
}  # fmt: skip
GRANITE_MOE = {
    "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64,
    "embedding_multiplier": 3.7, "attention_multiplier": 0.11, "residual_multiplier": 0.43,
    "logits_scaling": 2.3, "rope_parameters": LLAMA3, "attention_bias": True,
    "tie_word_embeddings": True,
}  # fmt: skip
NEMOTRON = {
    "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32,
    "layer_norm_epsilon": 3e-4, "conv_kernel": 4,
}  # fmt: skip
NEMOTRON_MOE = NEMOTRON | {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 96, "intermediate_size": 64, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip
SHARED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
    "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7, "norm_topk_prob": True,
}  # fmt: skip
LATENTS = {
    "num_key_value_heads": 6, "head_dim": None, "kv_lora_rank": 64, "q_lora_rank": 96,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
NEOX = {"rotary_emb_base": 5003, "layer_norm_eps": 3e-4}
FAMILIES = {
    "LlamaForCausalLM llama3": {"rope_parameters": LLAMA3},
    "LlamaForCausalLM linear": {
        "rope_parameters": {"rope_type": "linear", "factor": 3.5, "rope_theta": 5003.0}},
    "MistralForCausalLM": {"sliding_window": None},
    "ArceeForCausalLM": {"hidden_act": "relu2", "rope_parameters": LLAMA3},
    "Qwen2ForCausalLM": {"use_sliding_window": False, "head_dim": 16},
    "Qwen3ForCausalLM": {"use_sliding_window": False},
    "MixtralForCausalLM": {
        "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen3MoeForCausalLM": {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
    "Qwen2MoeForCausalLM": {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96, "norm_topk_prob": False, "head_dim": 16},
    "MellumForCausalLM": {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "sliding_window": 9, "layer_types": [LOCAL, LOCAL, GLOBAL, LOCAL],
        "rope_parameters": {
            GLOBAL: {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48,
                "attention_factor": 1.1386294361119891, "rope_theta": 5003.0},
            LOCAL: {"rope_type": "default", "rope_theta": 5003.0}}},
    "OlmoeForCausalLM": {
        "num_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "num_key_value_heads": 6},
    "GptOssForCausalLM": {
        "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5003.0}},
    "GptOssForCausalLM yarn": {
        "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48,
            "rope_theta": 5003.0, "truncate": False}},
    "Olmo2ForCausalLM": {"head_dim": 16},
    "SmolLM3ForCausalLM": {
        "num_hidden_layers": 6, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48,
            "rope_theta": 5003.0}},
    **{
        f"Ministral3ForCausalLM{name}": {"rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12,
            "rope_theta": 5003.0, "llama_4_scaling_beta": 0.37, **more}}
        for name, more in {
            "": {"mscale": 1.0, "mscale_all_dim": 1.0},
            " uneven": {"mscale": 1.0, "mscale_all_dim": 0.6}}.items()},
    "Phi3ForCausalLM": {"head_dim": 16, "sliding_window": None, "rope_parameters": {
        "rope_type": "default", "rope_theta": 5003.0, "partial_rotary_factor": 0.75}},
    "Glm4ForCausalLM": {"attention_bias": True, "rope_parameters": {
        "rope_type": "default", "rope_theta": 5003.0, "partial_rotary_factor": 0.5}},
    "GlmForCausalLM": {"attention_bias": False, "head_dim": 16, "rope_parameters": {
        "rope_type": "default", "rope_theta": 5003.0, "partial_rotary_factor": 0.5}},
    "Ernie4_5ForCausalLM": {"use_bias": False, "tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48,
        "rope_theta": 5003.0}},
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 64,
        "moe_num_shared_experts": 3, "moe_layer_start_index": 2, "tie_word_embeddings": True},
    "Ernie4_5_MoeForCausalLM alone": {
        "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 64,
        "moe_num_shared_experts": 0, "moe_layer_start_index": 0, "tie_word_embeddings": False},
    "CohereForCausalLM": {
        "head_dim": 16, "layer_norm_eps": 3e-4, "logit_scale": 0.43, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48,
            "rope_theta": 5003.0}},
    "CohereForCausalLM norms": {
        "head_dim": 16, "layer_norm_eps": 3e-4, "logit_scale": 0.43, "num_hidden_layers": 64,
        "use_qk_norm": True},
    **{
        f"Cohere2ForCausalLM {every}": {
            "head_dim": 16, "layer_norm_eps": 3e-4, "logit_scale": 0.43, "sliding_window": 9,
            "num_hidden_layers": 6, "layer_types": types}
        for every, types in {
            4: [LOCAL] * 3 + [GLOBAL] + [LOCAL] * 2, 3: [LOCAL, LOCAL, GLOBAL] * 2,
            0: [LOCAL] * 6}.items()},
    "Starcoder2ForCausalLM": {
        "head_dim": 16, "norm_epsilon": 3e-4, "sliding_window": None, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48,
            "rope_theta": 5003.0}},
    "Starcoder2ForCausalLM untied": {
        "head_dim": 16, "norm_epsilon": 3e-4, "sliding_window": None,
        "tie_word_embeddings": False},
    "NemotronForCausalLM": {
        "norm_eps": 3e-4, "head_dim": 16, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "linear", "rope_theta": 5003.0, "factor": 2.5,
            "partial_rotary_factor": 0.5}},
    "NemotronForCausalLM plain": {"norm_eps": 3e-4, "head_dim": 16},
    "Jais2ForCausalLM tied": {"layer_norm_eps": 3e-4, "tie_word_embeddings": True},
    "Jais2ForCausalLM": {"layer_norm_eps": 3e-4, "rope_parameters": {
        "rope_type": "default", "rope_theta": 5003.0}},
    "StableLmForCausalLM": {
        "layer_norm_eps": 3e-4, "use_qkv_bias": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 5003.0, "partial_rotary_factor": 0.5}},
    "StableLmForCausalLM norms": {
        "layer_norm_eps": 3e-4, "qk_layernorm": True, "use_parallel_residual": True},
    "PhiForCausalLM": {"layer_norm_eps": 3e-4, "rope_parameters": {
        "rope_type": "linear", "factor": 3.5, "rope_theta": 5003.0, "partial_rotary_factor": 0.5}},
    "OlmoForCausalLM": {"head_dim": 16, "clip_qkv": 1.3, "tie_word_embeddings": True},
    "OlmoForCausalLM free": {"head_dim": 16, "num_hidden_layers": 2, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48,
        "rope_theta": 5003.0}},
    "Exaone4ForCausalLM": {"sliding_window": None, "head_dim": 16, "rope_parameters": LLAMA3},
    "Exaone4ForCausalLM windows": {
        "sliding_window": 9, "head_dim": 16, "num_hidden_layers": 64,
        "layer_types": ([LOCAL] * 3 + [GLOBAL]) * 16},
    "NemotronHForCausalLM": NEMOTRON | {
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", GLOBAL, "mlp"]},
    "NemotronHForCausalLM experts": NEMOTRON_MOE | {
        "layers_block_type": ["linear_attention", "moe", "linear_attention", GLOBAL, "moe"]},
    "NemotronHForCausalLM latents": NEMOTRON_MOE | {
        "layers_block_type": ["linear_attention", "moe", GLOBAL, "moe"], "moe_latent_size": 32},
    "ExaoneMoeForCausalLM": SHARED | {
        "num_experts": 8, "num_shared_experts": 2, "sliding_window": 9, "n_group": 2,
        "layer_types": [LOCAL, GLOBAL, LOCAL, LOCAL], "rope_parameters": LLAMA3},
    "HunYuanDenseV1ForCausalLM": {"tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 5003.0, "alpha": 50.0, "factor": 1.0}},
    "HunYuanMoEV1ForCausalLM": {
        "num_experts": 5, "moe_topk": 2, "rope_parameters": {
            "rope_type": "dynamic", "rope_theta": 5003.0, "alpha": 50.0, "factor": 1.0}},
    "HunYuanMoEV1ForCausalLM tied": {
        "num_experts": 5, "moe_topk": 2, "tie_word_embeddings": True},
    "SeedOssForCausalLM": {"attention_bias": True},
    "ApertusForCausalLM": {"rope_parameters": LLAMA3, "hidden_act": "xielu"},
    "SolarOpenForCausalLM": SHARED | {"n_group": 2, "attention_bias": True, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48,
        "rope_theta": 5003.0}},
    "Llama4ForCausalLM": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 64,
        "intermediate_size_mlp": 160, "interleave_moe_layer_step": 2, "rope_parameters": LLAMA3},
    "AfmoeForCausalLM": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
        "num_shared_experts": 2, "num_dense_layers": 2, "num_hidden_layers": 6, "head_dim": 32,
        "route_scale": 1.7, "sliding_window": 9, "mup_enabled": True,
        "tie_word_embeddings": True},
    "MiniMaxM2ForCausalLM": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "rope_parameters": {
            "rope_type": "default", "rope_theta": 5003.0, "partial_rotary_factor": 0.5}},
    "GPTNeoXForCausalLM": NEOX | {"rotary_pct": 0.5},
    "GPTNeoXForCausalLM sequential": NEOX | {
        "use_parallel_residual": False, "hidden_act": "gelu_new", "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}},
    "GPT2LMHeadModel": {"layer_norm_epsilon": 3e-4, "n_positions": 192},
    "GPT2LMHeadModel untied": {
        "layer_norm_epsilon": 3e-4, "activation_function": "gelu", "tie_word_embeddings": False},
    "GPTBigCodeForCausalLM": {"layer_norm_epsilon": 3e-4, "n_positions": 192},
    "GPTBigCodeForCausalLM untied": {"layer_norm_epsilon": 3e-4, "tie_word_embeddings": False},
    "Olmo3ForCausalLM": {
        "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 9, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}},
    "GemmaForCausalLM": {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    "Gemma2ForCausalLM": GEMMA | {
        "attn_logit_softcapping": 21.0, "final_logit_softcapping": 17.0, "rope_theta": 10_000.0},
    "Gemma3ForCausalLM": GEMMA | {
        "num_hidden_layers": 7, "rope_theta": 500_000.0, "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6},
    "Gemma4ForCausalLM": GEMMA4 | {
        "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 97,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 17.0},
    "Gemma4ForCausalLM keys": GEMMA4 | {
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "num_hidden_layers": 4,
        "layer_types": [LOCAL, LOCAL, LOCAL, GLOBAL]},
    "Lfm2ForCausalLM": {
        "layer_types": ["conv", GLOBAL, "conv", "conv"], "norm_eps": 3e-4, "conv_L_cache": 4,
        "block_auto_adjust_ff_dim": False, "head_dim": 16, "tie_word_embeddings": True},
    "Lfm2MoeForCausalLM": {
        "layer_types": ["conv", GLOBAL, "conv", GLOBAL], "norm_eps": 3e-4, "head_dim": 16,
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "num_dense_layers": 1},
    "GraniteForCausalLM": {
        "embedding_multiplier": 3.7, "attention_multiplier": 0.11, "residual_multiplier": 0.43,
        "logits_scaling": 2.3, "rope_parameters": LLAMA3, "attention_bias": True,
        "mlp_bias": True},
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": GRANITE_MOE | {
        "shared_intermediate_size": 96, "tie_word_embeddings": False, "attention_bias": False},
    "GraniteMoeHybridForCausalLM": MAMBA | {
        "layer_types": ["linear_attention", GLOBAL] * 2, "num_local_experts": 0,
        "mamba_n_groups": 2, "attention_bias": True},
    "GraniteMoeHybridForCausalLM experts": MAMBA | {
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "num_local_experts": 5,
        "num_experts_per_tok": 2, "intermediate_size": 64, "tie_word_embeddings": True},
    "BambaForCausalLM": BAMBA | {
        "attn_layer_indices": [1, 2], "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5003.0, "partial_rotary_factor": 0.625}},
    "BambaForCausalLM yarn": BAMBA | {
        "attn_layer_indices": [3], "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48,
            "rope_theta": 5003.0}},
    "Mamba2ForCausalLM": MAMBA2 | {"n_groups": 2},
    "Mamba2ForCausalLM tied": MAMBA2 | {"n_groups": 1, "tie_word_embeddings": True},
    "Qwen3_5ForCausalLM": HYBRID | {"rope_parameters": {
        "rope_type": "default", "rope_theta": 5003.0, "partial_rotary_factor": 0.25}},
    "Qwen3_5ForCausalLM heads": HYBRID | {
        "linear_num_value_heads": 6, "tie_word_embeddings": True, "full_attention_interval": 3,
        "num_hidden_layers": 7, "linear_conv_kernel_dim": 3,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48,
            "rope_theta": 5003.0, "partial_rotary_factor": 0.5}},
    "Qwen3_5MoeForCausalLM": HYBRID | {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96, "linear_num_value_heads": 4,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5003.0, "partial_rotary_factor": 0.25}},
    "Qwen3NextForCausalLM": HYBRID | {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "linear_num_value_heads": 4},
    "Dots1ForCausalLM": SHARED | {"sliding_window": None, "num_key_value_heads": 6},
    "Glm4MoeForCausalLM": SHARED | {
        "attention_bias": True, "use_qk_norm": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 5003.0, "partial_rotary_factor": 0.5}},
    "DeepseekV2ForCausalLM": SHARED | LATENTS | {
        "q_lora_rank": None, "norm_topk_prob": False, "num_hidden_layers": 27},
    "DeepseekV3ForCausalLM": SHARED | LATENTS | {
        "n_group": 4, "topk_group": 2,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48,
            "rope_theta": 5003.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "Mistral4ForCausalLM": SHARED | LATENTS | {"rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12,
        "rope_theta": 5003.0, "llama_4_scaling_beta": 0.37, "mscale": 1.0,
        "mscale_all_dim": 1.0}},
    "Glm4MoeLiteForCausalLM": SHARED | LATENTS,
    "EuroBertForMaskedLM llada": {"masked_diffusion": {"predicts": "next"}},
    "Qwen2ForCausalLM dream": {"masked_diffusion": {"predicts": "own"}, "head_dim": 16},
}  # fmt: skip
