"""The rows of GLM-4 and of ERNIE 4.5, which rotate neighboring dims, in the table of families."""

from tests.parity.row import OLD, Row, rope

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
}
