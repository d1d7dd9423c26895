"""Phi-3 in Hugging Face: config.json and weight names."""

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
from lmwright.models.hf.rope import ORIGINAL, rope_config, rope_fields

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
PAD_ID = 32_000  # of padding, where config.json names none
LONG = ("su", "yarn")  # names that its first config.json files have for longrope


class Phi3Hf:
    """Both directions of the family's Hugging Face form."""

    architectures = ("Phi3ForCausalLM",)
    weights = WEIGHTS | {
        "layers.qkv": "model.layers.{i}.self_attn.qkv_proj.weight",
        "layers.gate_up": "model.layers.{i}.mlp.gate_up_proj.weight",
    }

    def config(self, model: Any) -> dict[str, Any]:
        """config.json of a model, tokenizer ids left out. Raises UserError where there is none."""
        kind = model.rope_scaling.kind if model.rope_scaling else "longrope"
        if kind != "longrope":
            raise UserError(
                f"model.rope_scaling: {kind!r} does not exist in Hugging Face's Phi-3, only "
                "longrope; change it to export"
            )
        config = {theirs: getattr(model, ours) for ours, theirs in FIELDS.items()}
        rope = rope_config(
            model.rope_theta, model.rope_scaling, model.seq_len, model.rotary_fraction
        )
        config |= rope
        config |= {
            "architectures": list(self.architectures),
            "model_type": "phi3",
            "hidden_act": GATED_ACT[model.mlp],
            "sliding_window": model.window,
            "tie_word_embeddings": model.head == "tied",
            "initializer_range": model.embed_std,
        }
        if model.vocab_size <= PAD_ID:
            config["pad_token_id"] = None
        return config

    def fields(self, config: dict[str, Any], where: str) -> dict[str, Any]:
        """Fields of the model for a config.json at `where`. Raises UserError for anything
        that this family does not compute."""
        heads = {"num_key_value_heads": config.get("num_attention_heads")}
        said = config.get("rope_scaling") or config.get("rope_parameters") or {}
        said = dict(said) if isinstance(said, dict) else {"rope_type": said}
        if (said.get("rope_type") or said.get("type")) in LONG:
            said["rope_type"] = "longrope"
        kind = said.get("rope_type") or said.get("type") or "default"
        if kind == "longrope":
            # config.json's own, else the usual one: transformers never takes what `said` has
            said[ORIGINAL] = config.get(ORIGINAL) or 4096
        rope = said_or_usual(config, DEFAULTS) | {"rope_scaling": None, "rope_parameters": said}
        return {
            **required(config, DEFAULTS | heads | head_dim(config), FIELDS, where),
            **rope_fields(rope, where, partial=True),
            "window": config.get("sliding_window"),
            "mlp": activation(config.get("hidden_act"), GATED_ACT, where),
            "head": "tied" if config.get("tie_word_embeddings", False) else "untied",
        }
