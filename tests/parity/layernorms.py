"""Rows of decoders with layer norms, in the table of families."""

from tests.parity.row import GLOBAL, LOCAL, OLD, Row, rope

COHERE = {"rms_norm_eps": None, "layer_norm_eps": 3e-4, "logit_scale": 0.43}
STAR = {"rms_norm_eps": None, "norm_epsilon": 3e-4}
NEMOTRON = {
    "rms_norm_eps": None,
    "norm_eps": 0.05,  # less makes rounding large, since fresh scales are 2 there
}
JAIS = {"rms_norm_eps": None, "layer_norm_eps": 3e-4}
STABLE = {"rms_norm_eps": None, "head_dim": None, "layer_norm_eps": 3e-4}
OLMO = {"rms_norm_eps": None}
OPT = {
    **dict.fromkeys(("intermediate_size", "num_key_value_heads", "head_dim", "rms_norm_eps",
                     "rope_parameters", "initializer_range")),
    "ffn_dim": 80, "init_std": 0.3,
}  # fmt: skip
GPT2 = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "rope_parameters",
                     "num_attention_heads", "max_position_embeddings", "num_key_value_heads",
                     "head_dim", "rms_norm_eps")),
    "n_embd": 48, "n_inner": 80, "n_layer": 5, "n_head": 6, "n_positions": 192,
    "layer_norm_epsilon": 3e-4,
}  # fmt: skip
LAYERNORMS = {
    "cohere": Row(
        "CohereForCausalLM",
        COHERE
        | {
            "rope_parameters": rope("yarn", factor=4.0, **OLD),
            "use_qk_norm": True,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        generates=True,
    ),
    "cohere-silent": Row(
        "CohereForCausalLM",
        {"rms_norm_eps": None, "head_dim": None, "num_key_value_heads": None}
        | {"rope_parameters": None},
        gradients=False,
    ),
    "cohere2": Row(
        "Cohere2ForCausalLM",
        COHERE
        | {
            "rope_parameters": rope("linear", factor=2.5),
            "sliding_window": 7,
            "layer_types": [LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL],
        },
        generates=True,
    ),
    "cohere2-silent": Row(
        "Cohere2ForCausalLM",
        {"rms_norm_eps": None, "sliding_window": 9, "tie_word_embeddings": False},
        gradients=False,
    ),
    "cohere2-nope": Row(  # no layer rotates, so that biases of keys have no gradient
        "Cohere2ForCausalLM",
        COHERE | {"sliding_window": 7, "layer_types": [GLOBAL] * 5, "attention_bias": True},
        gradients=False,
    ),
    "starcoder2": Row(
        "Starcoder2ForCausalLM",
        STAR
        | {
            "rope_parameters": rope("yarn", factor=4.0, **OLD),
            "sliding_window": 7,
            "hidden_act": "gelu",
            "tie_word_embeddings": False,
        },
        generates=True,
    ),
    "opt": Row("OPTForCausalLM", OPT | {"activation_function": "gelu"}, generates=True),
    "opt-unbiased": Row(
        "OPTForCausalLM",
        OPT | {"enable_bias": False, "tie_word_embeddings": False, "word_embed_proj_dim": 48},
        gradients=False,
    ),
    "gpt-bigcode": Row("GPTBigCodeForCausalLM", GPT2, generates=True),
    "gpt-bigcode-untied": Row(
        "GPTBigCodeForCausalLM",
        GPT2 | {"n_inner": None, "tie_word_embeddings": False, "activation_function": "relu"},
        gradients=False,
    ),
    "nemotron": Row(
        "NemotronForCausalLM",
        NEMOTRON
        | {
            "rope_parameters": rope("linear", factor=2.5, partial_rotary_factor=0.61),
            "num_hidden_layers": 3,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
        },
        generates=True,
    ),
    "nemotron-silent": Row(
        "NemotronForCausalLM",
        {"rms_norm_eps": None, "head_dim": None, "num_key_value_heads": 2, "mlp_bias": True}
        | {"rope_parameters": None},
        gradients=False,
    ),
    "jais2": Row(
        "Jais2ForCausalLM",
        JAIS
        | {
            "rope_parameters": rope("yarn", factor=4.0, **OLD),
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
        },
        generates=True,
    ),
    "jais2-unbiased": Row(
        "Jais2ForCausalLM",
        {"rms_norm_eps": None, "head_dim": None, "attention_bias": False}
        | {"rope_parameters": None},
        gradients=False,
    ),
    "starcoder2-unbiased": Row(
        "Starcoder2ForCausalLM", STAR | {"use_bias": False, "sliding_window": 5}
    ),
    "starcoder2-silent": Row(
        "Starcoder2ForCausalLM",
        {"rms_norm_eps": None, "head_dim": None, "rope_parameters": None},
        gradients=False,
    ),
    "stablelm": Row(
        "StableLmForCausalLM",
        STABLE
        | {
            "rope_parameters": rope("linear", factor=2.5, partial_rotary_factor=0.5),
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "use_qkv_bias": True,
            "tie_word_embeddings": True,
        },
        generates=True,
    ),
    "stablelm-sequential": Row(
        "StableLmForCausalLM",
        STABLE
        | {
            "rope_parameters": rope("yarn", factor=4.0, partial_rotary_factor=1.0, **OLD),
            "use_qkv_bias": True,
        },
        generates=True,
    ),
    "stablelm-silent": Row(
        "StableLmForCausalLM",
        {"rms_norm_eps": None, "head_dim": None, "rope_parameters": None},
        gradients=False,
    ),
    "phi": Row(
        "PhiForCausalLM",
        STABLE
        | {
            "rope_parameters": rope("linear", factor=2.5, partial_rotary_factor=0.75),
            "qk_layernorm": True,
            "hidden_act": "gelu",
        },
        generates=True,
    ),
    "phi-tied": Row("PhiForCausalLM", STABLE | {"tie_word_embeddings": True}),
    "phi-silent": Row(
        "PhiForCausalLM",
        {"rms_norm_eps": None, "head_dim": None, "rope_parameters": None}
        | {"num_key_value_heads": None},
        gradients=False,
    ),
    "olmo": Row(
        "OlmoForCausalLM",
        OLMO
        | {
            "rope_parameters": rope("yarn", factor=4.0, **OLD),
            "clip_qkv": 0.7,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        generates=True,
    ),
    "olmo-silent": Row(
        "OlmoForCausalLM",
        OLMO | {"head_dim": None, "rope_parameters": None, "num_key_value_heads": None},
        gradients=False,
    ),
}
