"""How the llama family is written in Hugging Face's config.json and weight names.

One table serves both directions; the layout of each weight follows from its arrow.
A field that no listed architecture can express is refused, never dropped.
"""

from typing import Any

from podsmith.errors import UserError

WEIGHTS = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "layers.attention_norm": "model.layers.{i}.input_layernorm.weight",
    "layers.mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    **{
        f"layers.{ours}{end}": f"model.layers.{{i}}.{theirs}_proj.{kind}"
        for ours, theirs in {
            "q": "self_attn.q", "k": "self_attn.k", "v": "self_attn.v", "o": "self_attn.o",
            "gate": "mlp.gate", "up": "mlp.up", "down": "mlp.down",
        }.items()
        for end, kind in (("", "weight"), ("_bias", "bias"))
    },
    "layers.q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.k_norm": "model.layers.{i}.self_attn.k_norm.weight",
}  # fmt: skip

FIELDS = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}

GATED_ACT = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "reglu": "relu"}
PLAIN_ACT = {"relu2": "relu2", "relu": "relu"}
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "ArceeForCausalLM": "arcee",
}


class LlamaHf:
    """Both directions of the family's Hugging Face form."""

    architectures = tuple(MODEL_TYPES)
    weights = WEIGHTS

    def architecture(self, model: Any) -> str:
        """The architecture that expresses `model`. Raises UserError where none does."""
        plain, normed = model.mlp in PLAIN_ACT, model.qk_norm == "head"
        if plain and not normed and model.bias != "qkv":
            return "ArceeForCausalLM"
        if not plain and normed and model.bias in ("none", "attention"):
            return "Qwen3ForCausalLM"
        if not plain and not normed:
            return "Qwen2ForCausalLM" if model.bias == "qkv" else "LlamaForCausalLM"
        raise UserError(
            f"model: no Hugging Face architecture has mlp = {model.mlp!r}, qk_norm = "
            f"{model.qk_norm!r} and bias = {model.bias!r} together; change one to export"
        )

    def config(self, model: Any) -> dict[str, Any]:
        """config.json of a model, tokenizer ids left out."""
        architecture = self.architecture(model)
        config = {theirs: getattr(model, ours) for ours, theirs in FIELDS.items()}
        config |= {
            "architectures": [architecture],
            "model_type": MODEL_TYPES[architecture],
            "hidden_act": (GATED_ACT | PLAIN_ACT if model.mlp in GATED_ACT else PLAIN_ACT)[
                model.mlp
            ],
            "rope_theta": model.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
            "tie_word_embeddings": model.head == "tied",
            "attention_bias": model.bias in ("attention", "all"),
            "mlp_bias": model.bias == "all",
            "initializer_range": model.embed_std,
        }
        return config

    def fields(self, config: dict[str, Any], where: str) -> dict[str, Any]:
        """Fields of the model for a config.json at `where`. Raises UserError for anything
        that this family does not compute."""
        architecture = (config.get("architectures") or ["?"])[0]
        if architecture not in MODEL_TYPES:
            raise UserError(
                f"{where}: architecture {architecture!r} is not supported; "
                f"these are: {', '.join(MODEL_TYPES)}"
            )
        said = {k: v for k, v in config.items() if v is not None or k not in FIELDS.values()}
        values = _defaults(said, architecture) | said
        missing = [name for name in FIELDS.values() if values.get(name) is None]
        if missing:
            raise UserError(f"{where}: lacks {', '.join(missing)}; add them as the model has them")
        _refuse_unknown_features(values, where)
        acts = PLAIN_ACT if architecture == "ArceeForCausalLM" else GATED_ACT
        kinds = {act: mlp for mlp, act in acts.items()}
        act = config.get("hidden_act", "relu2" if acts is PLAIN_ACT else "silu")
        if act not in kinds:
            raise UserError(
                f"{where}: hidden_act {act!r} is not supported; these are: {', '.join(kinds)}"
            )
        return {ours: values[theirs] for ours, theirs in FIELDS.items()} | {
            "rope_theta": _rope(config).get("rope_theta", 10_000.0),
            "mlp": kinds[act],
            "head": "tied" if config.get("tie_word_embeddings", False) else "untied",
            "qk_norm": "head" if architecture == "Qwen3ForCausalLM" else "none",
            "bias": _bias(config, architecture, where),
        }


def _defaults(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """What transformers itself fills in where config.json is silent."""
    if architecture == "MistralForCausalLM":
        return {"sliding_window": 4096} | _head_dim(config)
    if architecture == "Qwen2ForCausalLM":
        return {"use_sliding_window": False} | _head_dim(config)
    if architecture == "Qwen3ForCausalLM":
        return {"use_sliding_window": False, "head_dim": 128}
    heads = config.get("num_attention_heads")
    return {"num_key_value_heads": heads} | _head_dim(config)


def _head_dim(config: dict[str, Any]) -> dict[str, Any]:
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    known = isinstance(heads, int) and isinstance(width, int) and heads > 0
    return {"head_dim": width // heads} if known else {}


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = dict(config.get("rope_parameters") or {})
    if "rope_theta" in config:
        rope.setdefault("rope_theta", config["rope_theta"])
    return rope


def _bias(config: dict[str, Any], architecture: str, where: str) -> str:
    if architecture == "Qwen2ForCausalLM":
        return "qkv"
    attention, mlp = config.get("attention_bias", False), config.get("mlp_bias", False)
    if mlp and not attention:
        raise UserError(f"{where}: mlp_bias without attention_bias is not supported")
    return "all" if mlp else "attention" if attention else "none"


def _refuse_unknown_features(config: dict[str, Any], where: str) -> None:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise UserError(f"{where}: rope scaling {kind!r} is not supported yet")
    if _rope(config).get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"{where}: partial_rotary_factor is not supported")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and window < config.get("max_position_embeddings", 0):
        raise UserError(
            f"{where}: sliding_window {window} is shorter than max_position_embeddings, "
            f"which is not supported yet"
        )
    if config.get("pretraining_tp", 1) != 1:
        raise UserError(f"{where}: pretraining_tp other than 1 is not supported")
