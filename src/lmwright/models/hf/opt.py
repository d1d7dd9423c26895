"""OPT in Hugging Face."""

from dataclasses import replace
from typing import ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.pairs import (
    EVEN_HEADS,
    NO_IDS,
    PLAIN_ACT,
    Derived,
    Fixed,
    Json,
    Words,
)
from lmwright.models.hf.table import EVEN_KEYS, Table, with_biases

BODY = "model."
DECODER = f"{BODY}decoder"
LAYER = {
    "attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.out_proj", "up": "fc1", "down": "fc2",
}  # fmt: skip
WIDTH = "word_embed_proj_dim"
BEHIND = "{key} = {said} is not computed; norms of opt-350m, behind its branches, are not supported"
OTHER = "{key} = {said} is not computed, only {value} as in released models"
WEIGHTS = {
    "embed": f"{DECODER}.embed_tokens.weight",
    "positions": f"{DECODER}.embed_positions.weight",
    "head": "lm_head.weight",
    **with_biases({
        "norm": f"{DECODER}.final_layer_norm",
        **{f"layers.{ours}": f"{DECODER}.layers.{{i}}.{name}" for ours, name in LAYER.items()},
    }),
}  # fmt: skip


def _read_width(config: Json, fields: Json, where: str) -> Json:
    """No field. Raises UserError for embeddings of another width than the stream."""
    if (width := config.get(WIDTH)) not in (None, fields["embed_dim"]):
        raise UserError(
            f"{where}: {WIDTH} = {width} is not hidden_size = {fields['embed_dim']}, which is not "
            "computed (opt-350m); use another size"
        )
    return {}


class OptHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "OPT"
    model_types: ClassVar = {"OPTForCausalLM": "opt"}
    weights = WEIGHTS
    body_prefix = BODY
    keys: ClassVar = {n: key for n, key in EVEN_KEYS.items() if n != "norm_eps"} | {
        "mlp_dim": "ffn_dim"
    }
    pairs = (
        replace(PLAIN_ACT, theirs="activation_function", usual="relu"),
        Words("head", "tie_word_embeddings", {"tied": True, "untied": False}, True, True),
        Words("bias", "enable_bias", {"all": True, "none": False}, True),
        Fixed("do_layer_norm_before", True, BEHIND),
        Fixed("_remove_final_layer_norm", False, OTHER),
        Fixed("layer_norm_elementwise_affine", True, OTHER),
        Derived(_read_width, lambda model, *_: {WIDTH: model.embed_dim}),
        *(EVEN_HEADS, NO_IDS),
    )
    defaults: ClassVar[Json] = {
        "vocab_size": 50_272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
        "num_attention_heads": 12, "max_position_embeddings": 2048,
    }  # fmt: skip
