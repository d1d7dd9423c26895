"""Rows of Granite, Nemotron-H, Falcon-H1, Bamba and Mamba-2, with Mamba-2 in most layers, in the
table of families."""

from tests.parity.row import GLOBAL, LOCAL, OLD, Row, rope

GRANITE4 = {
    "intermediate_size": 72, "shared_intermediate_size": 80, "num_local_experts": 0,
    "num_experts_per_tok": 0, "mamba_d_state": 14, "mamba_d_conv": 3, "mamba_chunk_size": 128,
}  # fmt: skip
GRANITE4_MOE = {
    "num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 28,
    "shared_intermediate_size": 44, "router_aux_loss_coef": 0.3, "mamba_n_heads": 8,
    "mamba_n_groups": 2, "mamba_d_state": 14, "mamba_chunk_size": 128,
    "layer_types": ["mamba", "attention", "mamba"], "residual_multiplier": 0.55,
    "attention_multiplier": 0.3, "tie_word_embeddings": True,
}  # fmt: skip
GRANITE_MOE = {
    "num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 28,
    "router_aux_loss_coef": 0.3, "embedding_multiplier": 3.7, "attention_multiplier": 0.3,
    "residual_multiplier": 0.55, "logits_scaling": 2.3, "attention_bias": True,
    "tie_word_embeddings": True,
}  # fmt: skip
NEMOTRON_MOE = {
    "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
    "moe_shared_expert_intermediate_size": 44, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2,
    "ssm_state_size": 14, "conv_kernel": 3, "time_step_min": 1e-9, "layer_norm_epsilon": 3e-4,
    "rms_norm_eps": None, "rope_parameters": None, "num_hidden_layers": None,
    "layers_block_type": ["linear_attention", "moe", "mlp", "full_attention", "moe"],
}  # fmt: skip
BAMBA = {
    "mamba_n_heads": 8, "mamba_d_state": 14, "mamba_d_conv": 3, "mamba_chunk_size": 128,
    "num_hidden_layers": 3, "rms_norm_eps": 0.05,  # as below
}  # fmt: skip
MAMBA2 = {
    **dict.fromkeys(
        ("intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
         "rope_parameters")
    ),
    "num_heads": 8, "head_dim": 12, "state_size": 14, "conv_kernel": 3, "chunk_size": 128,
    "num_hidden_layers": 3, "layer_norm_epsilon": 0.05,  # as below
}  # fmt: skip
FALCON = {
    "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_ssm": 96, "mamba_n_groups": 2,
    "mamba_d_state": 14, "mamba_d_conv": 3, "mamba_rms_norm": True,
    "mamba_norm_before_gate": False, "embedding_multiplier": 3.7, "lm_head_multiplier": 0.43,
    "key_multiplier": 0.61, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8, "mlp_multipliers": [0.9, 0.55],
    "ssm_multipliers": [0.7, 0.6, 0.8, 1.1, 0.4], "mamba_chunk_size": 128, "num_hidden_layers": 3,
    "rms_norm_eps": 0.05,  # less makes rounding large where gates are small
}  # fmt: skip
MAMBA, ATTENTION = "linear_attention", "full_attention"
GRANITES = {
    "granite": Row(
        "GraniteForCausalLM",
        {
            "rope_parameters": rope("yarn", factor=6.0, **OLD),
            "embedding_multiplier": 3.7,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.43,
            "logits_scaling": 2.3,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
        generates=True,
    ),
    "granite-swa": Row(
        "GraniteSWAForCausalLM",
        {
            "sliding_window": 7,
            "layer_rope_theta": [0, 301.0, 301.0, 301.0, 0],
            "rope_parameters": rope("yarn", factor=6.0, **OLD),
            "embedding_multiplier": 3.7,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.43,
            "logits_scaling": 2.3,
            "attention_bias": True,
            "mlp_bias": True,
        },
        generates=True,
    ),
    "granite-swa-thetas": Row(
        "GraniteSWAForCausalLM",
        {
            "sliding_window": 7,
            "layer_types": [LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL],
            "layer_rope_theta": [301.0, 5003.0, 301.0, 5003.0, 301.0],
            "tie_word_embeddings": False,
        },
        gradients=False,
    ),
    "granite-swa-usual": Row("GraniteSWAForCausalLM", {"sliding_window": 5}, gradients=False),
    "granite4": Row(
        "GraniteMoeHybridForCausalLM",
        GRANITE4
        | {
            "layer_types": ["mamba", "mamba", "attention", "mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 12,
            "mamba_n_groups": 2,
            "embedding_multiplier": 3.7,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.43,
            "logits_scaling": 2.3,
            "tie_word_embeddings": True,
        },
        generates=True,
    ),
    "granite4-rope": Row(  # without Mamba-2, and heads that config.json does not say
        "GraniteMoeHybridForCausalLM",
        GRANITE4
        | {
            "layer_types": ["full_attention"] * 5,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_n_heads": 3,
        },
        gradients=False,
    ),
    "granite-silent": Row(  # every multiplier is 1
        "GraniteForCausalLM",
        {"rope_parameters": None, "num_key_value_heads": None, "mlp_bias": True},
        gradients=False,
    ),
    "nemotron-h": Row(
        "NemotronHForCausalLM",
        {
            "rope_parameters": None,
            "rms_norm_eps": None,
            "num_hidden_layers": None,
            "layer_norm_epsilon": 3e-4,
            "layers_block_type": [MAMBA, "mlp", MAMBA, ATTENTION, "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "ssm_state_size": 14,
            "conv_kernel": 3,
            "time_step_min": 1e-9,
        },
        generates=True,
    ),
    "bamba": Row(
        "BambaForCausalLM",
        BAMBA
        | {
            "attn_layer_indices": [1],
            "mamba_d_head": 12,
            "mamba_n_groups": 2,
            "rope_parameters": rope("yarn", factor=6.0, partial_rotary_factor=0.6, **OLD),
            "attention_bias": True,
            "mlp_bias": True,
        },
        generates=True,
    ),
    "bamba-silent": Row(  # half of each head rotated, and widths that follow
        "BambaForCausalLM",
        BAMBA
        | {
            "head_dim": None,
            "tie_word_embeddings": True,
            "attn_layer_indices": [2],
        },
    ),
    "bamba-attention": Row(  # and a share that transformers does not read where it stands
        "BambaForCausalLM",
        BAMBA
        | {
            "attn_layer_indices": [0, 1, 2],
            "head_dim": 12,
            "partial_rotary_factor": 0.25,
            "mamba_n_heads": 3,
        },
        gradients=False,
    ),
    "mamba2": Row("Mamba2ForCausalLM", MAMBA2 | {"n_groups": 2}, generates=True),
    "mamba2-tied": Row("Mamba2ForCausalLM", MAMBA2 | {"n_groups": 1, "tie_word_embeddings": True}),
    "falcon-h1": Row(
        "FalconH1ForCausalLM",
        FALCON | {"rope_parameters": rope("yarn", factor=6.0, **OLD)},
        generates=True,
    ),
    "falcon-h1-before": Row(  # the gate behind the norm, and biases
        "FalconH1ForCausalLM",
        FALCON
        | {
            "mamba_norm_before_gate": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1-silent": Row(  # no norm of memories, multipliers of 1, widths that follow
        "FalconH1ForCausalLM",
        {
            "mamba_n_heads": 8,
            "mamba_d_ssm": 96,
            "mamba_d_state": 14,
            "head_dim": None,
            "rms_norm_eps": None,
        },
        gradients=False,
    ),
}
