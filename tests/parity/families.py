"""The table of families: one row for each architecture and set of features, as its config.json.

All dimensions of a row are different, thetas, scales and eps are off their defaults, windows are
shorter than the rows of the tests. A new family adds its rows here, and is then compared with
transformers in all of `test_families.py`.
"""

from tests.parity.gemmas import GEMMAS
from tests.parity.glms import GLMS
from tests.parity.granites import GRANITES
from tests.parity.layernorms import GPT2, LAYERNORMS
from tests.parity.row import GLOBAL, LOCAL, OLD, Row, rope
from tests.parity.smalls import SMALLS

MODERN = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": None, "norm_eps": 3e-4,
    "local_attention": 12,
}  # fmt: skip
DEBERTA = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": None, "rope_parameters": None,
    "layer_norm_eps": 3e-4, "relative_attention": True, "position_biased_input": False,
    "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm",
    "position_buckets": 6, "max_relative_positions": 20, "legacy": False,
}  # fmt: skip
NEOX = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": None, "layer_norm_eps": 3e-4,
}  # fmt: skip
BERT = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": None, "rope_parameters": None,
    "layer_norm_eps": 3e-4,
}  # fmt: skip
XLSTM = {
    **dict.fromkeys(
        ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
         "rms_norm_eps", "initializer_range", "rope_parameters")
    ),
    "hidden_size": 128, "num_heads": 4, "norm_eps": 3e-4, "use_cache": False, "chunk_size": 16,
}  # fmt: skip
LFM2 = {"rms_norm_eps": None, "norm_eps": 3e-4, "tie_word_embeddings": True}
DELTA_RULE = {
    "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 9,
    "linear_value_head_dim": 9, "num_hidden_layers": 2, "full_attention_interval": 2,
    "rms_norm_eps": 0.05,  # less makes rounding large where a query and a key are at right angles
}  # fmt: skip

ROWS = {
    "llama": Row(
        "LlamaForCausalLM",
        {
            "rope_parameters": rope(
                "llama3", factor=7.0, low_freq_factor=1.5, high_freq_factor=5.0, **OLD
            ),
            "attention_bias": True,
            "mlp_bias": True,
        },
        generates=True,
    ),
    "llama-linear": Row(
        "LlamaForCausalLM",
        {
            "rope_parameters": rope("linear", factor=3.5),
            "tie_word_embeddings": True,
            "mlp_bias": True,
            "pretraining_tp": 2,
        },
        gradients=False,
    ),
    "llama-dynamic": Row(
        "LlamaForCausalLM",
        {"rope_parameters": rope("dynamic", factor=2.5), "max_position_embeddings": 13},
        gradients=False,
    ),
    "llama-yarn": Row(
        "LlamaForCausalLM", {"rope_parameters": rope("yarn", factor=6.0, **OLD)}, gradients=False
    ),
    "mistral": Row("MistralForCausalLM", {"sliding_window": 7}, generates=True),
    "ministral": Row(
        "MinistralForCausalLM",
        {"sliding_window": 7, "layer_types": [LOCAL, GLOBAL, GLOBAL, LOCAL, GLOBAL]},
        gradients=False,
    ),
    "qwen2": Row(
        "Qwen2ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
        generates=True,
    ),
    "qwen2-no-window": Row(
        "Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 7}, gradients=False
    ),
    "qwen3": Row(
        "Qwen3ForCausalLM",
        {
            "rope_parameters": rope("yarn", factor=6.0, attention_factor=1.3, **OLD),
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": [LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL],
            "attention_bias": True,
        },
        generates=True,
    ),
    "eurobert": Row(
        "EuroBertForMaskedLM",
        {"rope_parameters": rope("linear", factor=3.5), "attention_bias": True},
        gradients=False,  # tests/parity/test_encoders.py
    ),
    "modernbert": Row(
        "ModernBertForMaskedLM",
        MODERN
        | {
            "num_hidden_layers": 8,
            "layer_types": [GLOBAL, LOCAL, LOCAL, LOCAL] * 2,
            "rope_parameters": {
                GLOBAL: rope("linear", factor=3.5),
                LOCAL: {"rope_type": "default", "rope_theta": 301.0},
            },
            **dict.fromkeys(
                ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias", "decoder_bias"), True
            ),
            "hidden_activation": "silu",
        },
        gradients=False,  # tests/parity/test_encoders.py
    ),
    "modernbert-untied": Row(
        "ModernBertForMaskedLM",
        MODERN
        | {
            "layer_types": [LOCAL, LOCAL, GLOBAL, LOCAL, LOCAL],
            "rope_parameters": None,
            "decoder_bias": False,
            "tie_word_embeddings": False,
        },
        gradients=False,
    ),
    "deberta": Row(
        "DebertaV2ForMaskedLM",
        DEBERTA,
        gradients=False,  # tests/parity/test_encoders.py
    ),
    "deberta-context": Row(
        "DebertaV2ForMaskedLM",
        DEBERTA
        | {
            "max_relative_positions": -1,
            "max_position_embeddings": 17,
            "position_buckets": 11,
            "pos_att_type": "p2c|c2p",
            "hidden_act": "relu",
        },
        gradients=False,
    ),
    "qwen3-5": Row(
        "Qwen3_5ForCausalLM",
        DELTA_RULE | {"rope_parameters": rope(partial_rotary_factor=0.4)},
        gradients=False,  # tests/parity/test_qwen3_5.py
        generates=True,
    ),
    "qwen3-5-yarn": Row(
        "Qwen3_5ForCausalLM",
        DELTA_RULE
        | {
            "rope_parameters": rope("yarn", factor=6.0, partial_rotary_factor=0.6, **OLD),
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
        },
        gradients=False,
    ),
    "llada": Row(
        "EuroBertForMaskedLM",
        {"masked_diffusion": {"predicts": "own"}},
        gradients=False,  # those of the same blocks
    ),
    "dream": Row(
        "Qwen2ForCausalLM",
        {"masked_diffusion": {"predicts": "next"}, "is_causal": False, "head_dim": 8},
    ),
    "xlstm": Row(
        "xLSTMForCausalLM",
        XLSTM,
        gradients=False,  # tests/parity/test_xlstm.py
    ),
    "xlstm-twins": Row(
        "xLSTMForCausalLM",
        XLSTM
        | {
            "hidden_size": 64,
            "embedding_dim": 64,
            "num_blocks": 5,
            "ffn_proj_factor": 1.3,
            "ffn_round_up_to_multiple_of": 1,
            "qk_dim_factor": 1.0,
            "output_logit_soft_cap": 4.0,
            "gate_soft_cap": 3.0,
        },
        gradients=False,
    ),
    **GEMMAS,
    **GRANITES,
    **SMALLS,
    **LAYERNORMS,
    "olmo2": Row(
        "Olmo2ForCausalLM",
        {"rope_parameters": rope("yarn", factor=6.0, **OLD), "attention_bias": True},
        generates=True,
    ),
    "olmo2-tied": Row(
        "Olmo2ForCausalLM",
        {"tie_word_embeddings": True, "num_key_value_heads": None, "hidden_act": "relu"},
        gradients=False,
    ),
    "olmo3": Row(
        "Olmo3ForCausalLM",
        {
            "sliding_window": 7,
            "layer_types": [LOCAL, GLOBAL] * 2 + [LOCAL],
            "rope_parameters": {
                GLOBAL: rope("yarn", factor=6.0, **OLD),
                LOCAL: {"rope_type": "default", "rope_theta": 301.0},
            },
            "attention_bias": True,
        },
        generates=True,
    ),
    "olmo3-released": Row(  # the form of the released config.json
        "Olmo3ForCausalLM",
        {
            "sliding_window": 7,
            "rope_parameters": None,
            "rope_theta": 500_000.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 6.0, "beta_fast": 32.0, **OLD},
            "attention_bias": False,
        },
        gradients=False,
    ),
    "smollm3": Row(
        "SmolLM3ForCausalLM",
        {
            "no_rope_layers": [1, 0, 1, 0, 1],
            "rope_parameters": rope("yarn", factor=6.0, **OLD),
            "tie_word_embeddings": False,
            "mlp_bias": True,
        },
        generates=True,
    ),
    "smollm3-biased": Row(  # without rotation, the gradient of the keys' bias is zero
        "SmolLM3ForCausalLM",
        {"rope_parameters": None, "attention_bias": True},
        gradients=False,
    ),
    "ministral3": Row(  # rows longer than the context before, so that queries grow
        "Ministral3ForCausalLM",
        {
            "rope_parameters": rope(
                "yarn",
                factor=6.0,
                mscale=0.7,
                mscale_all_dim=1.3,
                llama_4_scaling_beta=0.37,
                **OLD,
            ),
            "tie_word_embeddings": False,
        },
        generates=True,
    ),
    "lfm2": Row(
        "Lfm2ForCausalLM",
        LFM2
        | {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_hidden_layers": 4,
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 4,
        },
        generates=True,
    ),
    "lfm2-released": Row(  # its keys
        "Lfm2ForCausalLM",
        LFM2
        | {
            "rope_parameters": None,
            "rope_theta": 5003.0,
            "tie_word_embeddings": None,
            "tie_embedding": False,
            "full_attn_idxs": [0, 2],
            "block_ff_dim": 110,
            "block_ffn_dim_multiplier": 1.3,
            "block_multiple_of": 20,
        },
        gradients=False,
    ),
    "lfm3": Row(
        "Lfm3ForCausalLM",
        LFM2
        | {
            "layer_types": ["conv", LOCAL, GLOBAL, "conv", LOCAL],
            "num_hidden_layers": 5,
            "conv_L_cache": 4,
            "sliding_window": 7,
            "rope_parameters": {
                GLOBAL: rope("proportional", partial_rotary_factor=0.4),
                LOCAL: {"rope_type": "default", "rope_theta": 301.0},
            },
        },
        generates=True,
    ),
    "lfm3-silent": Row(  # the defaults of its class
        "Lfm3ForCausalLM",
        LFM2 | {"rope_parameters": None, "num_hidden_layers": 7, "tie_word_embeddings": False},
        gradients=False,
    ),
    "phi3": Row(
        "Phi3ForCausalLM",
        {
            "head_dim": None,
            "rope_parameters": rope(
                "longrope",
                short_factor=[1.0, 1.1, 1.3],
                long_factor=[1.7, 2.9, 4.3],
                partial_rotary_factor=0.75,
                **OLD,
            ),
            "original_max_position_embeddings": 13,
            "sliding_window": 7,
        },
        generates=True,
    ),
    "gpt-neox": Row(
        "GPTNeoXForCausalLM",
        NEOX | {"rope_parameters": rope("yarn", factor=6.0, partial_rotary_factor=0.5, **OLD)},
        generates=True,
    ),
    "gpt-neox-sequential": Row(
        "GPTNeoXForCausalLM",
        NEOX
        | {
            "rope_parameters": None,
            "rotary_pct": 0.75,
            "rotary_emb_base": 301,
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
        },
    ),
    "gpt-neox-short": Row(
        "GPTNeoXForCausalLM",
        NEOX | {"rope_parameters": None, "num_attention_heads": 3},
        gradients=False,
    ),
    "gpt2": Row("GPT2LMHeadModel", GPT2, generates=True),
    "gpt2-untied": Row(
        "GPT2LMHeadModel",
        GPT2 | {"n_inner": None, "tie_word_embeddings": False, "activation_function": "relu"},
        gradients=False,
    ),
    **GLMS,
    "phi3-short": Row(
        "Phi3ForCausalLM",
        {
            "head_dim": None,
            "rope_parameters": rope(
                "longrope",
                short_factor=[1.0, 1.1, 1.3, 1.5],
                long_factor=[1.7, 2.9, 4.3, 5.1],
                factor=1.7,
                attention_factor=1.4,
                original_max_position_embeddings=64,
            ),
            "original_max_position_embeddings": 64,
            "tie_word_embeddings": True,
        },
        gradients=False,
    ),
}
