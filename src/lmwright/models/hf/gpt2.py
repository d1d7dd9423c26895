"""GPT-2 in Hugging Face, whose matrices are [in, out] (`formats.inputs_first`)."""

from dataclasses import replace
from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.pairs import EVEN_HEADS, PLAIN_ACT, Derived, Fixed, Json, Pair, Words
from lmwright.models.hf.table import EVEN_KEYS, Table, with_biases

BODY = "transformer."
LAYER = {
    "attention_norm": "ln_1", "mlp_norm": "ln_2", "qkv": "attn.c_attn", "o": "attn.c_proj",
    "up": "mlp.c_fc", "down": "mlp.c_proj",
}  # fmt: skip
SHORT = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions", "intermediate_size": "n_inner",
}  # fmt: skip
"""Keys of its config.json by the usual names, which transformers knows, too."""
OTHER = "{key} = {said} is not computed, only {value} as in released models"
WEIGHTS = {
    "embed": f"{BODY}wte.weight",
    "positions": f"{BODY}wpe.weight",
    "head": "lm_head.weight",
    **with_biases({
        "norm": f"{BODY}ln_f",
        **{f"layers.{ours}": f"{BODY}h.{{i}}.{name}" for ours, name in LAYER.items()},
    }),
}  # fmt: skip


class Gpt2Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "GPT-2"
    model_types: ClassVar = {"GPT2LMHeadModel": "gpt2"}
    weights = WEIGHTS
    body_prefix = BODY
    inputs_first: ClassVar = tuple(f".{name}.weight" for name in LAYER.values() if "c_" in name)
    keys = EVEN_KEYS | {"norm_eps": "layer_norm_epsilon"}
    pairs: ClassVar[tuple[Pair, ...]] = (
        replace(PLAIN_ACT, theirs="activation_function", usual="gelu_new"),
        Words("head", "tie_word_embeddings", {"tied": True, "untied": False}, True, True),
        Fixed("scale_attn_weights", True, OTHER),
        Fixed("scale_attn_by_inverse_layer_idx", False, OTHER),
        Fixed("add_cross_attention", False, OTHER, written=False),
        EVEN_HEADS,
        Derived(write=lambda model, *_: write_short(model)),
    )
    defaults: ClassVar[Json] = {
        "vocab_size": 50_257, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "max_position_embeddings": 1024, "layer_norm_epsilon": 1e-5,
    }  # fmt: skip

    def fields(self, config: Json, where: str) -> Json:
        """Fields of the model for a config.json at `where`. Raises UserError for anything that
        this family does not compute."""
        usual = {name: config[own] for name, own in SHORT.items() if config.get(own) is not None}
        config = config | usual
        if config.get("intermediate_size") is None:
            width = config.get("hidden_size", self.defaults["hidden_size"])
            if not isinstance(width, int):
                raise UserError(f"{where}: n_embd = {width!r} is not a whole number; correct it")
            config["intermediate_size"] = 4 * width
        return super().fields(config, where)


def write_short(model: Any, *_: str) -> Json:
    """The keys of sizes."""
    ours = {theirs: name for name, theirs in Gpt2Hf.keys.items()}
    return {own: getattr(model, ours[name]) for name, own in SHORT.items()}
