"""Gemma in Hugging Face."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.rope import ORIGINAL, rope_fields
from lmwright.models.hf.table import GATED_ACT, KEYS, WEIGHTS, Json, Table, Words
from lmwright.models.hf.window import TYPES, reach_of, window_fields

NEWER = "Gemma3ForCausalLM"
GELU = "gelu_pytorch_tanh"
ACT = Words("mlp", "hidden_activation", GATED_ACT, GELU, GELU)
HEAD = Words("head", "tie_word_embeddings", {"tied": True, "untied": False}, True)
DEFAULTS: dict[str, Json] = {
    "Gemma2ForCausalLM": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Gemma3ForCausalLM": {
        "vocab_size": 262_208, "max_position_embeddings": 131_072,
        "num_attention_heads": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip
NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


class GemmaHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Gemma"
    model_types: ClassVar = {"Gemma2ForCausalLM": "gemma2", NEWER: "gemma3_text"}
    weights = WEIGHTS | {
        f"layers.{ours}": f"model.layers.{{i}}.{theirs}.weight" for ours, theirs in NORMS.items()
    }
    words = (ACT, HEAD)
    keys = KEYS | {"window": "sliding_window", "query_dim": "query_pre_attn_scalar"}
    optional: ClassVar = {
        "attention_soft_cap": "attn_logit_softcapping",
        "logits_soft_cap": "final_logit_softcapping",
    }
    defaults: ClassVar = {
        "head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
    }  # fmt: skip

    def architecture(self, model: Any) -> str:
        """The architecture that expresses `model`. Raises UserError where none does."""
        newer = model.qk_norm == "head"
        if model.local_rope_theta is not None and not newer:
            raise UserError(
                'model.local_rope_theta: Gemma 2 has one theta; unset it, or set qk_norm = "head" '
                "for a Gemma 3"
            )
        if model.attention_soft_cap is not None and newer:
            raise UserError("model.attention_soft_cap: transformers' Gemma 3 has none; unset it")
        return NEWER if newer else "Gemma2ForCausalLM"

    def own_config(self, model: Any, config: Json) -> Json:
        """The kinds of layers, the scale of scores, and rotations by the reach of a layer."""
        if config["architectures"] == [NEWER]:
            _put_by_reach(config, model)
        return {
            "query_pre_attn_scalar": model.query_dim or model.head_dim,
            "layer_types": [TYPES[kind] for kind in model.kinds],
            "attention_bias": False,
        }

    def usual(self, config: Json, architecture: str) -> Json:
        """Values that transformers fills in where config.json is silent."""
        return self.defaults | DEFAULTS[architecture]

    def rope(self, config: Json, architecture: str, where: str) -> Json:
        """Fields of the rotations, by the reach of a layer in Gemma 3."""
        return (_rope_by_reach if architecture == NEWER else rope_fields)(config, where)

    def own_fields(self, config: Json, fields: Json, where: str) -> Json:
        """The reach of layers, the scale of scores. Raises UserError for what is not computed."""
        newer = config["architectures"][0] == NEWER
        for name in ("attention_bias", "use_bidirectional_attention"):
            if config.get(name):
                raise UserError(f"{where}: {name} is not supported")
        if newer and config.get("attn_logit_softcapping"):
            raise UserError(
                f"{where}: attn_logit_softcapping is set, which transformers silently ignores in "
                "Gemma 3; set it to null"
            )
        reach = _reach(config, fields["num_layers"], 6 if newer else 2, where)
        local = window_fields(fields["window"], reach)
        if local["window"] is None:  # no layer is local, which a pattern says here
            local = {"window": fields["window"], "layer_pattern": ["global"]}
        scale = fields["query_dim"]
        return {
            **local,
            "query_dim": None if scale == fields["head_dim"] else scale,
            "qk_norm": "head" if newer else "none",
        }


def _reach(config: Json, num_layers: int, every: int, where: str) -> list[Any]:
    """Gemma 2 has every second layer global, Gemma 3 every `sliding_window_pattern`-th."""
    if config.get("layer_types") is not None:
        return reach_of(config["layer_types"], num_layers, where)
    every = config.get("sliding_window_pattern", every) if every > 2 else every
    return ["local" if (i + 1) % every else "global" for i in range(num_layers)]


def _put_by_reach(config: Json, model: Any) -> None:
    """Gives config.json Gemma 3's rope parameters, by the type of layer and as they were before."""
    whole = config["rope_parameters"]
    theta = model.local_rope_theta
    local = whole if theta is None else {"rope_type": "default", "rope_theta": theta}
    config["rope_parameters"] = {TYPES["global"]: whole, TYPES["local"]: local}
    if theta is not None:
        config["rope_local_base_freq"] = theta
    else:  # the form before can say no other
        del config["rope_theta"]
        config.pop("rope_scaling", None)
    config.pop(ORIGINAL, None)


def _rope_by_reach(config: Json, where: str) -> Json:
    rope = config.get("rope_parameters") or {}
    context = {"max_position_embeddings": config.get("max_position_embeddings") or 131_072}
    whole = dict(rope.get(TYPES["global"]) or {})
    whole.setdefault("rope_theta", config.get("rope_theta", 1_000_000.0))
    if config.get("rope_scaling"):
        whole |= config["rope_scaling"]
    local = dict(rope.get(TYPES["local"]) or {})
    local.setdefault("rope_theta", config.get("rope_local_base_freq", 10_000.0))
    for rotation, name in ((whole, "rope_theta"), (local, "rope_local_base_freq")):
        if rotation["rope_theta"] is None:  # transformers computes nothing with it
            raise UserError(f"{where}: {name} is null; set it, or remove it for Gemma 3's own")
    fields = rope_fields({**context, "rope_parameters": whole}, where)
    of_local = rope_fields({**context, "rope_parameters": local}, where)
    if of_local == fields:
        return {**fields, "local_rope_theta": None}
    if of_local["rope_scaling"] is not None:
        raise UserError(f"{where}: rope scaling of sliding_attention layers is not supported")
    return {**fields, "local_rope_theta": of_local["rope_theta"]}
