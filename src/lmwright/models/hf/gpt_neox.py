"""GPT-NeoX and Pythia in Hugging Face."""

from typing import Any, ClassVar

from lmwright.models.hf.pairs import EVEN_HEADS, HEAD, PLAIN_ACT, Derived, Json, Words
from lmwright.models.hf.rope import first_given, rope_fields, write_partial_rope
from lmwright.models.hf.table import EVEN_KEYS, Table, with_biases

BODY = "gpt_neox"
LAYER = {
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "qkv": "attention.query_key_value", "o": "attention.dense",
    "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
}  # fmt: skip
OWN = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
"""Names of keys of rotations; transformers ignores the usual ones beside them."""
USUAL = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
WEIGHTS = {
    "embed": f"{BODY}.embed_in.weight",
    "head": "embed_out.weight",
    **with_biases({
        "norm": f"{BODY}.final_layer_norm",
        **{f"layers.{ours}": f"{BODY}.layers.{{i}}.{name}" for ours, name in LAYER.items()},
    }),
}  # fmt: skip


def _read_rope(config: Json, _: Json, where: str) -> Json:
    said = {ours: first_given(config.get(own), USUAL[ours]) for ours, own in OWN.items()}
    return rope_fields(config | said, where, partial=True)


def _write_rope(model: Any, *_: str) -> Json:
    config = write_partial_rope(model)
    return config | {own: config.pop(ours) for ours, own in OWN.items()}


class GptNeoxHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "GPT-NeoX"
    model_types: ClassVar = {"GPTNeoXForCausalLM": "gpt_neox"}
    weights = WEIGHTS
    modules: ClassVar = {"embed_out": "lm_head"}
    keys = EVEN_KEYS | {"norm_eps": "layer_norm_eps"}
    pairs = (
        PLAIN_ACT,
        HEAD,
        Words("bias", "attention_bias", {"all": True, "mlp": False}),
        Words("residual", "use_parallel_residual", {"parallel": True, "sequential": False}),
        EVEN_HEADS,
        Derived(_read_rope, _write_rope),
    )
    defaults: ClassVar[Json] = {
        "vocab_size": 50_432, "hidden_size": 6144, "num_hidden_layers": 44,
        "num_attention_heads": 64, "intermediate_size": 24_576, "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": True,
        "use_parallel_residual": True,
    }  # fmt: skip
