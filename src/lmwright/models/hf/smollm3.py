"""SmolLM3 in Hugging Face."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.gemma import HEAD
from lmwright.models.hf.llama import BIAS
from lmwright.models.hf.pairs import ACT, NO_IDS, Derived, Fixed, Json
from lmwright.models.hf.rope import ROPE, usual_theta
from lmwright.models.hf.table import Table
from lmwright.models.hf.window import pattern_of


def _read_rotations(config: Json, fields: Json, where: str) -> Json:
    num_layers, said = fields["num_layers"], config.get("no_rope_layers")
    if said is None:
        every = config.get("no_rope_layer_interval", 4)
        said = [int((i + 1) % every != 0) for i in range(num_layers)]
    if not isinstance(said, list) or len(said) < num_layers or set(said) - {0, 1}:
        raise UserError(f"{where}: no_rope_layers is not a 0 or 1 for each of {num_layers} layers")
    return {"rope_pattern": pattern_of(["rope" if each else "nope" for each in said[:num_layers]])}


def _write_rotations(model: Any, *_: str) -> Json:
    return {"no_rope_layers": [int(kind == "rope") for kind in model.kinds]}


class SmolLm3Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "SmolLM3"
    model_types: ClassVar = {"SmolLM3ForCausalLM": "smollm3"}
    pairs = (
        ACT,
        HEAD,
        BIAS,
        ROPE,
        usual_theta(2_000_000.0),
        Derived(_read_rotations, _write_rotations),
        Fixed("use_sliding_window", False, "{key} is not supported", same=(None,)),
        NO_IDS,
    )
    defaults: ClassVar = {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
    }
