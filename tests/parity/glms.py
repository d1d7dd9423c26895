"""The rows of GLM-4 and of ERNIE 4.5, which rotate neighboring dims, and of other llamas with one
change, in the table of families."""

from tests.parity.row import GLOBAL, LOCAL, OLD, Row, rope

GLMS = {
    "glm4": Row(
        "Glm4ForCausalLM",
        {"rope_parameters": rope(partial_rotary_factor=0.61), "attention_bias": True},
        generates=True,
    ),
    "glm4-plain": Row(
        "GlmForCausalLM",
        {
            "rope_parameters": rope("linear", factor=2.5, partial_rotary_factor=1.0),
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
        generates=True,
    ),
    "ernie4-5": Row(
        "Ernie4_5ForCausalLM",
        {"use_bias": True, "rope_parameters": rope("yarn", factor=4.0, **OLD)},
        generates=True,
    ),
    "ernie4-5-untied": Row("Ernie4_5ForCausalLM", {"tie_word_embeddings": False}, gradients=False),
    "helium": Row(
        "HeliumForCausalLM",
        {
            "head_dim": 8,
            "rope_parameters": rope("yarn", factor=4.0, **OLD),
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        generates=True,
    ),
    "helium-silent": Row(
        "HeliumForCausalLM",
        {"head_dim": 8, "rope_parameters": None, "rms_norm_eps": None, "mlp_bias": True},
        gradients=False,
    ),
    "exaone4": Row(
        "Exaone4ForCausalLM",
        {
            "sliding_window": 7,
            "layer_types": [LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL],
            "rope_parameters": rope(
                "llama3", factor=6.0, low_freq_factor=1.0, high_freq_factor=4.0, **OLD
            ),
        },
        generates=True,
    ),
    "exaone4-silent": Row("Exaone4ForCausalLM", {"sliding_window": 9}, gradients=False),
    "exaone4-global": Row(
        "Exaone4ForCausalLM", {"sliding_window": None, "tie_word_embeddings": True}, gradients=False
    ),
    "hunyuan": Row(
        "HunYuanDenseV1ForCausalLM",
        {
            "rope_parameters": rope("dynamic", alpha=50.0, factor=1.0),
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        generates=True,
    ),
    "hunyuan-untied": Row("HunYuanDenseV1ForCausalLM", gradients=False),
    "apertus": Row(
        "ApertusForCausalLM",
        {
            "hidden_act": "xielu",
            "attention_bias": True,
            "rope_parameters": rope(
                "llama3", factor=7.0, low_freq_factor=1.5, high_freq_factor=5.0, **OLD
            ),
        },
        generates=True,
    ),
    "apertus-silent": Row(
        "ApertusForCausalLM",
        {"hidden_act": None, "head_dim": None, "rope_parameters": None, "rms_norm_eps": None},
        gradients=False,
    ),
    "seed-oss": Row(
        "SeedOssForCausalLM",
        {"rope_parameters": rope("yarn", factor=4.0, **OLD), "attention_out_bias": True},
        generates=True,
    ),
    "cwm": Row(
        "CwmForCausalLM",
        {
            "sliding_window": 7,
            "layer_types": [LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL],
            "rope_parameters": rope("yarn", factor=4.0, **OLD),
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        generates=True,
    ),
    "cwm-silent": Row(  # the defaults of its class
        "CwmForCausalLM",
        {"sliding_window": 5, "head_dim": None, "rope_parameters": None, "rms_norm_eps": None},
        gradients=False,
    ),
    "seed-oss-silent": Row("SeedOssForCausalLM", {"head_dim": None}, gradients=False),
}
