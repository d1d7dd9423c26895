"""Gemma in Hugging Face: config.json and weight names."""

from typing import Any

from lmwright.errors import UserError
from lmwright.models.hf.llama import FIELDS as SAME
from lmwright.models.hf.llama import GATED_ACT, WEIGHTS, activation, required
from lmwright.models.hf.rope import rope_config, rope_fields
from lmwright.models.hf.window import TYPES, reach_of, window_fields

FIELDS = SAME | {"window": "sliding_window", "query_dim": "query_pre_attn_scalar"}
CAPS = {
    "attention_soft_cap": "attn_logit_softcapping",
    "logits_soft_cap": "final_logit_softcapping",
}
MODEL_TYPES = {"Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3_text"}
DEFAULTS = {
    "Gemma2ForCausalLM": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Gemma3ForCausalLM": {
        "vocab_size": 262_208, "max_position_embeddings": 131_072,
        "num_attention_heads": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip
SHARED_DEFAULTS = {
    "head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip
NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


class GemmaHf:
    """Both directions of the family's Hugging Face form."""

    architectures = tuple(MODEL_TYPES)
    weights = WEIGHTS | {
        f"layers.{ours}": f"model.layers.{{i}}.{theirs}.weight" for ours, theirs in NORMS.items()
    }

    def architecture(self, model: Any) -> str:
        """The architecture that expresses `model`. Raises UserError where none does."""
        newer = model.qk_norm == "head"
        if model.mlp not in GATED_ACT:
            raise UserError(
                f"model.mlp: {model.mlp!r} does not exist in Hugging Face's Gemma; change it"
            )
        if model.local_rope_theta is not None and not newer:
            raise UserError(
                'model.local_rope_theta: Gemma 2 has one theta; unset it, or set qk_norm = "head" '
                "for a Gemma 3"
            )
        if model.attention_soft_cap is not None and newer:
            raise UserError("model.attention_soft_cap: transformers' Gemma 3 has none; unset it")
        return "Gemma3ForCausalLM" if newer else "Gemma2ForCausalLM"

    def config(self, model: Any) -> dict[str, Any]:
        """config.json of a model, tokenizer ids left out."""
        architecture = self.architecture(model)
        rope = rope_config(model.rope_theta, model.rope_scaling, model.seq_len)
        config = {theirs: getattr(model, ours) for ours, theirs in (FIELDS | CAPS).items()}
        if architecture == "Gemma3ForCausalLM":
            rope = _by_reach(rope, model)
        config |= rope
        config |= {
            "architectures": [architecture],
            "model_type": MODEL_TYPES[architecture],
            "query_pre_attn_scalar": model.query_dim or model.head_dim,
            "hidden_activation": GATED_ACT[model.mlp],
            "layer_types": [TYPES[kind] for kind in model.kinds],
            "tie_word_embeddings": model.head == "tied",
            "attention_bias": False,
            "initializer_range": model.embed_std,
        }
        return config

    def fields(self, config: dict[str, Any], where: str) -> dict[str, Any]:
        """Fields of the model for a config.json at `where`. Raises UserError for anything
        that this family does not compute."""
        architecture = config["architectures"][0]
        newer = architecture == "Gemma3ForCausalLM"
        for name in ("attention_bias", "use_bidirectional_attention"):
            if config.get(name):
                raise UserError(f"{where}: {name} is not supported")
        defaults = SHARED_DEFAULTS | DEFAULTS[architecture]
        if newer and config.get("attn_logit_softcapping"):
            raise UserError(
                f"{where}: attn_logit_softcapping is set, which transformers silently ignores in "
                "Gemma 3; set it to null"
            )
        values = required(config, defaults, FIELDS, where)
        caps = {ours: config.get(theirs, defaults.get(theirs)) for ours, theirs in CAPS.items()}
        reach = _reach(config, values["num_layers"], 6 if newer else 2, where)
        found = window_fields(values["window"], reach)
        if found["window"] is None:  # no layer is local, which a pattern says here
            found = {"window": values["window"], "layer_pattern": ["global"]}
        act = config.get("hidden_activation") or "gelu_pytorch_tanh"
        return {
            **values, **caps, **found,
            **(_rope_by_reach(config, where) if newer else rope_fields(config, where)),
            "query_dim": _unless(values["query_dim"], values["head_dim"]),
            "mlp": activation(act, GATED_ACT, where),
            "head": "tied" if config.get("tie_word_embeddings", True) else "untied",
            "qk_norm": "head" if newer else "none",
        }  # fmt: skip


def _unless(value: int, usual: int) -> int | None:
    return None if value == usual else value


def _reach(config: dict[str, Any], num_layers: int, every: int, where: str) -> list[Any]:
    """Gemma 2 has every second layer global, Gemma 3 every `sliding_window_pattern`-th."""
    if config.get("layer_types") is not None:
        return reach_of(config["layer_types"], num_layers, where)
    every = config.get("sliding_window_pattern", every) if every > 2 else every
    return ["local" if (i + 1) % every else "global" for i in range(num_layers)]


def _by_reach(rope: dict[str, Any], model: Any) -> dict[str, Any]:
    """Gemma 3's rope parameters, by the type of layer, and as they were before."""
    whole = rope["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": model.local_rope_theta}
    if model.local_rope_theta is None:
        local = whole
    found = {
        "max_position_embeddings": rope["max_position_embeddings"],
        "rope_parameters": {TYPES["global"]: whole, TYPES["local"]: local},
    }
    if model.local_rope_theta is not None:  # the form before can say no other
        found |= {"rope_theta": model.rope_theta, "rope_local_base_freq": model.local_rope_theta}
        found |= {"rope_scaling": rope["rope_scaling"]} if model.rope_scaling else {}
    return found


def _rope_by_reach(config: dict[str, Any], where: str) -> dict[str, Any]:
    said = config.get("rope_parameters") or {}
    context = {"max_position_embeddings": config.get("max_position_embeddings") or 131_072}
    whole = dict(said.get(TYPES["global"]) or {})
    whole.setdefault("rope_theta", config.get("rope_theta", 1_000_000.0))
    if config.get("rope_scaling"):
        whole |= config["rope_scaling"]
    local = dict(said.get(TYPES["local"]) or {})
    local.setdefault("rope_theta", config.get("rope_local_base_freq", 10_000.0))
    for rotation, name in ((whole, "rope_theta"), (local, "rope_local_base_freq")):
        if rotation["rope_theta"] is None:  # transformers computes nothing with it
            raise UserError(f"{where}: {name} is null; set it, or remove it for Gemma 3's own")
    found = rope_fields({**context, "rope_parameters": whole}, where)
    of_local = rope_fields({**context, "rope_parameters": local}, where)
    if of_local == found:
        return {**found, "local_rope_theta": None}
    if of_local["rope_scaling"] is not None:
        raise UserError(f"{where}: rope scaling of sliding_attention layers is not supported")
    return {**found, "local_rope_theta": of_local["rope_theta"]}
