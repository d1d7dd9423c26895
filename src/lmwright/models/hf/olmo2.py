"""OLMo 2 in Hugging Face: config.json and weight names."""

from typing import Any

from lmwright.errors import UserError
from lmwright.models.hf.llama import (
    FIELDS,
    GATED_ACT,
    WEIGHTS,
    activation,
    head_dim,
    required,
    said_or_usual,
)
from lmwright.models.hf.rope import rope_config, rope_fields

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}


class Olmo2Hf:
    """Both directions of the family's Hugging Face form."""

    architectures = ("Olmo2ForCausalLM",)
    weights = WEIGHTS | {
        "layers.attention_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "layers.mlp_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
    }

    def config(self, model: Any) -> dict[str, Any]:
        """config.json of a model, tokenizer ids left out. Raises UserError where there is none."""
        if model.mlp not in GATED_ACT:
            raise UserError(
                f"model.mlp: {model.mlp!r} does not exist in Hugging Face's OLMo 2; change it"
            )
        config = {theirs: getattr(model, ours) for ours, theirs in FIELDS.items()}
        config |= rope_config(model.rope_theta, model.rope_scaling, model.seq_len)
        config |= {
            "architectures": list(self.architectures),
            "model_type": "olmo2",
            "hidden_act": GATED_ACT[model.mlp],
            "tie_word_embeddings": model.head == "tied",
            "attention_bias": model.bias == "attention",
            "initializer_range": model.embed_std,
        }
        return config

    def fields(self, config: dict[str, Any], where: str) -> dict[str, Any]:
        """Fields of the model for a config.json at `where`. Raises UserError for anything
        that this family does not compute."""
        heads = {"num_key_value_heads": config.get("num_attention_heads")}
        return {
            **required(config, DEFAULTS | heads | head_dim(config), FIELDS, where),
            **rope_fields(said_or_usual(config, DEFAULTS), where),
            "mlp": activation(config.get("hidden_act"), GATED_ACT, where),
            "head": "tied" if config.get("tie_word_embeddings", False) else "untied",
            "bias": "attention" if config.get("attention_bias", False) else "none",
        }
