"""The llama family in Hugging Face: six architectures, by the features that each has."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.pairs import ACT, HEAD, Derived, Json, Words
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import Table
from lmwright.models.hf.window import TYPES, reach_of, window_fields, window_said

PLAIN_ACT = {"relu2": "relu2", "relu": "relu"}
PLAIN = Words("mlp", "hidden_act", PLAIN_ACT, "relu2", "relu2")
BIASES = {"none": (False, False), "attention": (True, False), "mlp": (False, True),
          "all": (True, True)}  # fmt: skip
LAYER_TYPES = ("MinistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def _act(architecture: str) -> Words:
    return PLAIN if architecture == "ArceeForCausalLM" else ACT


def _read_act(config: Json, fields: Json, where: str) -> Json:
    return _act(config["architectures"][0]).read(config, fields, where)


def _write_act(model: Any, architecture: str, family: str) -> Json:
    return _act(architecture).write(model, architecture, family)


def _read_window(config: Json, fields: Json, where: str) -> Json:
    architecture, num_layers = config["architectures"][0], fields["num_layers"]
    window = config.get("sliding_window", 4096)
    if architecture == "MistralForCausalLM" and "layer_types" in config:
        architecture = "MinistralForCausalLM"  # as transformers' AutoConfig takes it
    if architecture == "MistralForCausalLM":
        return window_fields(window, ["local"] * num_layers)
    if architecture not in LAYER_TYPES:
        return {"window": None}
    if architecture != "MinistralForCausalLM" and not config.get("use_sliding_window", False):
        return {"window": None}
    types = config.get("layer_types")
    if types is not None:
        reach = reach_of(types, num_layers, where)
        return window_fields(window_said(config, 4096, reach, where), reach)
    first = 0 if architecture == "MinistralForCausalLM" else config.get("max_window_layers", 28)
    return window_fields(window, ["local" if i >= first else "global" for i in range(num_layers)])


def _write_window(model: Any, architecture: str, _: str) -> Json:
    own: Json = {}
    if architecture in ("MistralForCausalLM", *LAYER_TYPES):
        own["sliding_window"] = model.window
    if architecture in LAYER_TYPES:
        own["use_sliding_window"] = model.window is not None
        own["layer_types"] = [TYPES[kind] for kind in model.kinds]
    return own


def _read_bias(config: Json, *_: Any) -> Json:
    architecture = config["architectures"][0]
    if architecture == "Qwen2ForCausalLM":
        return {"bias": "qkv"}
    if architecture in ("MistralForCausalLM", "MinistralForCausalLM"):
        return {"bias": "none"}  # they have none, whatever a config.json says
    biases = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return {"bias": next(ours for ours, theirs in BIASES.items() if theirs == biases)}


def _write_bias(model: Any, *_: str) -> Json:
    attention, mlp = BIASES.get(model.bias, (False, False))
    return {"attention_bias": attention, "mlp_bias": mlp}


BIAS = Derived(_read_bias, _write_bias)


def _read_qk_norm(config: Json, *_: Any) -> Json:
    return {"qk_norm": "head" if config["architectures"][0] == "Qwen3ForCausalLM" else "none"}


class LlamaHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "llama"
    pairs = (
        HEAD,
        Derived(_read_window, _write_window),
        Derived(_read_act, _write_act),
        BIAS,
        ROPE,
        Derived(_read_qk_norm),  # which the architecture says
    )
    model_types: ClassVar = {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "MinistralForCausalLM": "ministral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "ArceeForCausalLM": "arcee",
    }
    gguf_types = ("llama", "mistral", "qwen2", "qwen3")
    own_defaults: ClassVar = {
        **{name: {"num_key_value_heads": None} for name in (*LAYER_TYPES, "MistralForCausalLM")},
        "Qwen3ForCausalLM": {"num_key_value_heads": None, "head_dim": 128},
    }

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
