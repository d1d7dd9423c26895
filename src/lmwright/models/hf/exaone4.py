"""EXAONE 4 in Hugging Face."""

from typing import Any, ClassVar

from lmwright.models.hf.olmo2 import Olmo2Hf
from lmwright.models.hf.pairs import ACT, HEAD, Derived, Json
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import Table
from lmwright.models.hf.window import pattern_of, reach_of_every, window_config, window_said

USUAL = 4096  # where config.json says no window


def _read_reach(config: Json, fields: Json, where: str) -> Json:
    if config.get("layer_types") is None and config.get("sliding_window", USUAL) is None:
        return {"window": None}
    reach = reach_of_every(config, fields["num_layers"], where)
    # a window turns off the rotation of global layers, even where no layer is in it
    window = window_said(config, USUAL, reach, where)
    if window is None:
        return {"window": None}
    return {"window": window, "layer_pattern": pattern_of(reach)}


class Exaone4Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "EXAONE 4"
    model_types: ClassVar = {"Exaone4ForCausalLM": "exaone4"}
    weights = Olmo2Hf.weights
    pairs = (ACT, HEAD, Derived(_read_reach, lambda model, *_: window_config(model)), ROPE)
    defaults: ClassVar[dict[str, Any]] = {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_key_value_heads": 32,
        "num_attention_heads": 32,
    }  # fmt: skip
