"""Rows of the Gemma family in the table of families."""

from tests.parity.row import GLOBAL, LOCAL, Row, rope

GEMMAS = {
    "gemma1": Row("GemmaForCausalLM", {}, generates=True),
    "gemma1-silu": Row(
        "GemmaForCausalLM",
        {
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rope_parameters": rope("linear", factor=3.5),
        },
        gradients=False,
    ),
    "gemma2": Row(
        "Gemma2ForCausalLM",
        {
            "sliding_window": 7,
            "query_pre_attn_scalar": 23,
            "attn_logit_softcapping": 1.7,
            "final_logit_softcapping": 2.3,
        },
        generates=True,
    ),
    "gemma2-no-caps": Row(
        "Gemma2ForCausalLM",
        {
            "sliding_window": 7,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": [GLOBAL] * 5,
            "rope_parameters": rope("linear", factor=3.5),
            "hidden_activation": "silu",
            "tie_word_embeddings": False,
        },
        gradients=False,
    ),
    "vaultgemma": Row(
        "VaultGemmaForCausalLM",
        {
            "sliding_window": 7,
            "query_pre_attn_scalar": 23,
            "attn_logit_softcapping": 1.7,
            "final_logit_softcapping": 2.3,
        },
        generates=True,
    ),
    "vaultgemma-global": Row(  # as released, but for the head
        "VaultGemmaForCausalLM",
        {
            "layer_types": [GLOBAL] * 5,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
        gradients=False,
    ),
    "gemma3": Row(
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 7,
            "sliding_window": 7,
            "query_pre_attn_scalar": 23,
            "layer_types": [LOCAL, LOCAL, GLOBAL] * 2 + [LOCAL],
            "rope_parameters": {
                GLOBAL: rope("linear", factor=3.5),
                LOCAL: {"rope_type": "default", "rope_theta": 301.0},
            },
        },
        generates=True,
    ),
    "gemma3-cap": Row(
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 7,
            "sliding_window": 7,
            "final_logit_softcapping": 2.3,
            "rope_parameters": None,
        },
        gradients=False,
    ),
    "gemma4": Row(
        "Gemma4ForCausalLM",
        {
            "num_hidden_layers": 7,
            "sliding_window": 7,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "layer_types": [LOCAL, LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL, GLOBAL],
            "global_head_dim": 14,
            "hidden_size_per_layer_input": 12,
            "rms_norm_eps": 0.01,
            "vocab_size_per_layer_input": 97,
            "final_logit_softcapping": 2.3,
            "rope_parameters": {
                GLOBAL: rope("proportional", partial_rotary_factor=0.6, factor=1.5),
                LOCAL: {"rope_type": "default", "rope_theta": 301.0},
            },
        },
        generates=True,
    ),
    "gemma4-keys": Row(
        "Gemma4ForCausalLM",
        {
            "num_hidden_layers": 6,
            "sliding_window": 7,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 3,
            "global_head_dim": 14,
            "hidden_size_per_layer_input": 0,
            "layer_types": [LOCAL, LOCAL, GLOBAL] * 2,
            "rope_parameters": None,
            "initializer_range": 0.2,
            "tie_word_embeddings": False,
        },
        gradients=False,  # test_moe_parity
        generates=True,
    ),
}
