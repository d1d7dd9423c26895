"""The llama family in Hugging Face: six architectures, by the features that each has."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.table import ACT, HEAD, Json, Table, Words
from lmwright.models.hf.window import TYPES, reach_of, window_fields

PLAIN_ACT = {"relu2": "relu2", "relu": "relu"}
PLAIN = Words("mlp", "hidden_act", PLAIN_ACT, "relu2", "relu2")
BIASES = {"none": (False, False), "attention": (True, False), "mlp": (False, True),
          "all": (True, True)}  # fmt: skip
LAYER_TYPES = ("MinistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class LlamaHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "llama"
    words = (HEAD,)
    model_types: ClassVar = {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "MinistralForCausalLM": "ministral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "ArceeForCausalLM": "arcee",
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

    def own_config(self, model: Any, config: Json) -> Json:
        """Activation, biases and windows."""
        attention, mlp = BIASES.get(model.bias, (False, False))
        architecture = config["architectures"][0]
        act = _act(architecture)
        own: Json = {act.theirs: act.write(model, self.name)}
        own |= {"attention_bias": attention, "mlp_bias": mlp}
        if architecture in ("MistralForCausalLM", *LAYER_TYPES):
            own["sliding_window"] = model.window
        if architecture in LAYER_TYPES:
            own["use_sliding_window"] = model.window is not None
            own["layer_types"] = [TYPES[kind] for kind in model.kinds]
        return own

    def usual(self, config: Json, architecture: str) -> Json:
        """Values that transformers fills in where config.json is silent."""
        usual = super().usual(config, architecture)
        if architecture not in ("LlamaForCausalLM", "ArceeForCausalLM"):
            del usual["num_key_value_heads"]
        return usual | ({"head_dim": 128} if architecture == "Qwen3ForCausalLM" else {})

    def own_fields(self, config: Json, fields: Json, where: str) -> Json:
        """Activation, biases, norms of queries and keys, and windows."""
        architecture = config["architectures"][0]
        return {
            **_window(config, architecture, fields["num_layers"], where),
            "mlp": _act(architecture).read(config, where),
            "qk_norm": "head" if architecture == "Qwen3ForCausalLM" else "none",
            "bias": _bias(config, architecture),
        }


def _act(architecture: str) -> Words:
    return PLAIN if architecture == "ArceeForCausalLM" else ACT


def _window(config: Json, architecture: str, num_layers: int, where: str) -> Json:
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


def _bias(config: Json, architecture: str) -> str:
    if architecture == "Qwen2ForCausalLM":
        return "qkv"
    if architecture in ("MistralForCausalLM", "MinistralForCausalLM"):
        return "none"  # they have none, whatever a config.json says
    biases = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return next(ours for ours, theirs in BIASES.items() if theirs == biases)
