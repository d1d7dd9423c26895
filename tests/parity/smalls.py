"""Rows of nanochat, ModernBERT's decoders and OLMo Hybrid in the table of families."""

from tests.parity.row import GLOBAL, LOCAL, OLD, Row, rope

MODERN = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": None, "norm_eps": 3e-4,
    "local_attention": 14,
}  # fmt: skip
BIASES = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias", "decoder_bias")

DELTA_RULE = {
    "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 9,
    "linear_value_head_dim": 14, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", GLOBAL],
    "rms_norm_eps": 0.05,  # less makes rounding large where a query and a key are at right angles
}  # fmt: skip

SMALLS = {
    "nanochat": Row(
        "NanoChatForCausalLM",
        {
            "rope_parameters": rope("yarn", factor=6.0, **OLD),
            "attention_bias": True,
            "final_logit_softcapping": 2.3,
        },
        generates=True,
    ),
    "nanochat-silent": Row(  # the defaults of its class
        "NanoChatForCausalLM",
        {
            "rope_parameters": None,
            "head_dim": None,
            "num_key_value_heads": None,
            "rms_norm_eps": None,
            "max_position_embeddings": None,
        },
        gradients=False,
    ),
    "nanochat-tied": Row(
        "NanoChatForCausalLM",
        {"final_logit_softcapping": None, "tie_word_embeddings": True, "hidden_act": "gelu"},
        gradients=False,
    ),
    "modernbert-decoder": Row(
        "ModernBertDecoderForCausalLM",
        MODERN
        | {
            "num_hidden_layers": 8,
            "layer_types": [GLOBAL, LOCAL, LOCAL, LOCAL] * 2,
            "rope_parameters": {
                GLOBAL: rope("linear", factor=3.5),
                LOCAL: {"rope_type": "default", "rope_theta": 301.0},
            },
            **dict.fromkeys(BIASES, True),
            "hidden_activation": "silu",
        },
        generates=True,
    ),
    "modernbert-decoder-released": Row(  # the form of the released config.json
        "ModernBertDecoderForCausalLM",
        MODERN
        | {
            "rope_parameters": None,
            "global_rope_theta": 5003.0,
            "local_rope_theta": 5003.0,
            "global_attn_every_n_layers": 2,
        },
        generates=True,
    ),
    "modernbert-decoder-untied": Row(
        "ModernBertDecoderForCausalLM",
        MODERN
        | {
            "layer_types": [LOCAL, LOCAL, GLOBAL, LOCAL, LOCAL],
            "rope_parameters": None,
            "decoder_bias": False,
            "tie_word_embeddings": False,
            "sliding_window": 9,
        },
    ),
    "olmo-hybrid": Row(
        "OlmoHybridForCausalLM",
        DELTA_RULE | {"rope_parameters": {"rope_theta": None}, "attention_bias": True},
        gradients=False,  # tests/parity/test_olmo_hybrid.py
        generates=True,
    ),
    "olmo-hybrid-rope": Row(
        "OlmoHybridForCausalLM",
        DELTA_RULE
        | {
            "rope_parameters": rope("yarn", factor=6.0, **OLD),
            "layer_types": [GLOBAL, "linear_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "linear_num_value_heads": 3,
            "linear_allow_neg_eigval": False,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
        },
        gradients=False,
    ),
    "olmo-hybrid-silent": Row(  # the defaults of its class
        "OlmoHybridForCausalLM",
        {
            "rope_parameters": None,
            "num_key_value_heads": None,
            "head_dim": None,
            "rms_norm_eps": 0.05,
            "num_attention_heads": 3,
            "num_hidden_layers": 3,
        },
        gradients=False,
    ),
}
