"""The llama family in Hugging Face: config.json and weight names.

One table serves both directions; the layout of each weight follows from its arrow.
A field that no listed architecture can express is refused, never dropped.
"""

from typing import Any

from lmwright.errors import UserError
from lmwright.models.hf.rope import rope_config, rope_fields
from lmwright.models.hf.window import TYPES, reach_of, window_fields

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
    "MinistralForCausalLM": "ministral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "ArceeForCausalLM": "arcee",
}
LAYER_TYPES = ("MinistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class LlamaHf:
    """Both directions of the family's Hugging Face form."""

    architectures = tuple(MODEL_TYPES)
    weights = WEIGHTS

    def architecture(self, model: Any) -> str:
        """The architecture that expresses `model`. Raises UserError where none does."""
        plain, normed = model.mlp in PLAIN_ACT, model.qk_norm == "head"
        if plain and not normed and model.bias != "qkv" and model.window is None:
            return "ArceeForCausalLM"
        if not plain and normed and model.bias in ("none", "attention"):
            return "Qwen3ForCausalLM"
        if not plain and not normed and model.bias == "qkv":
            return "Qwen2ForCausalLM"
        if not plain and not normed and model.window is None:
            return "LlamaForCausalLM"
        if not plain and not normed and model.bias == "none":
            mixed = "global" in model.kinds
            return "MinistralForCausalLM" if mixed else "MistralForCausalLM"
        raise UserError(
            f"model: no Hugging Face architecture has mlp = {model.mlp!r}, qk_norm = "
            f"{model.qk_norm!r}, bias = {model.bias!r} and window = {model.window} together; "
            f"change one to export"
        )

    def config(self, model: Any) -> dict[str, Any]:
        """config.json of a model, tokenizer ids left out."""
        architecture = self.architecture(model)
        config = {theirs: getattr(model, ours) for ours, theirs in FIELDS.items()}
        config |= rope_config(model.rope_theta, model.rope_scaling, model.seq_len)
        config |= {
            "architectures": [architecture],
            "model_type": MODEL_TYPES[architecture],
            "hidden_act": (GATED_ACT | PLAIN_ACT if model.mlp in GATED_ACT else PLAIN_ACT)[
                model.mlp
            ],
            "tie_word_embeddings": model.head == "tied",
            "attention_bias": model.bias in ("attention", "all"),
            "mlp_bias": model.bias in ("mlp", "all"),
            "initializer_range": model.embed_std,
        }
        if architecture in ("MistralForCausalLM", *LAYER_TYPES):
            config["sliding_window"] = model.window
        if architecture in LAYER_TYPES:
            config["use_sliding_window"] = model.window is not None
            config["layer_types"] = [TYPES[kind] for kind in model.kinds]
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
        values = required(config, _defaults(config, architecture), FIELDS, where)
        acts = PLAIN_ACT if architecture == "ArceeForCausalLM" else GATED_ACT
        return {
            **values,
            **rope_fields(config, where),
            **_window(config, architecture, values["num_layers"], where),
            "mlp": activation(config.get("hidden_act"), acts, where),
            "head": "tied" if config.get("tie_word_embeddings", False) else "untied",
            "qk_norm": "head" if architecture == "Qwen3ForCausalLM" else "none",
            "bias": _bias(config, architecture),
        }


def required(
    config: dict[str, Any], defaults: dict[str, Any], names: dict[str, str], where: str
) -> dict[str, Any]:
    """Fields by our names, from config.json or what transformers fills in where it is silent.
    Raises UserError for those that neither has."""
    values = said_or_usual(config, defaults)
    missing = [theirs for theirs in names.values() if values.get(theirs) is None]
    if missing:
        raise UserError(f"{where}: lacks {', '.join(missing)}; add them with the model's values")
    return {ours: values[theirs] for ours, theirs in names.items()}


def said_or_usual(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """What config.json says, and what transformers fills in where it is silent."""
    return defaults | {k: v for k, v in config.items() if v is not None}


def activation(said: str | None, acts: dict[str, str], where: str) -> str:
    """Our name of an activation, the first of `acts` if none is said."""
    kinds = {theirs: ours for ours, theirs in acts.items()}
    said = next(iter(kinds)) if said is None else said
    if said not in kinds:
        raise UserError(
            f"{where}: hidden_act {said!r} is not supported; these are: {', '.join(kinds)}"
        )
    return kinds[said]


def _defaults(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """What transformers itself fills in where config.json is silent."""
    if architecture in ("MistralForCausalLM", "MinistralForCausalLM", "Qwen2ForCausalLM"):
        return head_dim(config)
    if architecture == "Qwen3ForCausalLM":
        return {"head_dim": 128}
    return {"num_key_value_heads": config.get("num_attention_heads")} | head_dim(config)


def head_dim(config: dict[str, Any]) -> dict[str, Any]:
    """The width of a head where config.json does not say it."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    known = isinstance(heads, int) and isinstance(width, int) and heads > 0
    return {"head_dim": width // heads} if known else {}


def _window(
    config: dict[str, Any], architecture: str, num_layers: int, where: str
) -> dict[str, Any]:
    window = config.get("sliding_window", 4096)
    if architecture == "MistralForCausalLM":
        return window_fields(window, ["local"] * num_layers)
    if architecture not in LAYER_TYPES:
        return {"window": None}
    if architecture != "MinistralForCausalLM" and not config.get("use_sliding_window", False):
        return {"window": None}
    types = config.get("layer_types")
    if types is not None:
        return window_fields(window, reach_of(types, num_layers, where))
    first = 0 if architecture == "MinistralForCausalLM" else config.get("max_window_layers", 28)
    return window_fields(window, ["local" if i >= first else "global" for i in range(num_layers)])


def _bias(config: dict[str, Any], architecture: str) -> str:
    if architecture == "Qwen2ForCausalLM":
        return "qkv"
    attention, mlp = config.get("attention_bias", False), config.get("mlp_bias", False)
    if architecture in ("MistralForCausalLM", "MinistralForCausalLM"):
        return "none"  # they have none, whatever a config.json says
    if attention:
        return "all" if mlp else "attention"
    return "mlp" if mlp else "none"
