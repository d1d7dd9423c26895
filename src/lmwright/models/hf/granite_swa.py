"""Granite with windows in Hugging Face."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.decoder import LayerReach
from lmwright.models.hf.granite import SCALES, USUAL
from lmwright.models.hf.llama import BIAS
from lmwright.models.hf.pairs import ACT, HEAD, NO_IDS, Derived, Json, refuse_number
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import WEIGHTS, Table
from lmwright.models.hf.window import TYPES, first_global

KEY = "layer_rope_theta"


def _read_thetas(config: Json, fields: Json, where: str) -> Json:
    """The thetas of global and of local layers; 0 stands for no rotation."""
    said, num_layers = config.get(KEY), fields["num_layers"]
    if said is None:
        return {}
    if not isinstance(said, list) or len(said) < num_layers:
        raise UserError(f"{where}: {KEY} does not name the theta of {num_layers} layers")
    pattern = fields["layer_pattern"]
    thetas: dict[LayerReach, Any] = {}
    for i, theta in enumerate(said[:num_layers]):
        kind = pattern[i % len(pattern)]
        if theta != 0:
            refuse_number(f"{KEY}[{i}]", theta, where)
        if thetas.setdefault(kind, theta) != theta:
            raise UserError(
                f"{where}: {KEY} differs among layers of type {TYPES[kind]}, which is not "
                "computed; give them one theta"
            )
    turning = {kind: float(theta) for kind, theta in thetas.items() if theta}
    rotating = "all" if len(turning) == len(thetas) else next(iter(turning), "none")
    theta = turning.get("global", turning.get("local", fields["rope_theta"]))
    local = turning.get("local", theta)
    own = {"local_rope_theta": None if local == theta else local}
    return {"rotating_layers": rotating, "rope_theta": theta} | own


def _write_thetas(model: Any, *_: str) -> Json:
    return {KEY: [model.theta_of(kind) or 0 for kind in model.kinds]}


THETAS = Derived(_read_thetas, _write_thetas)
"""Pair of rotations by the reach of a layer, behind that of reaches."""
WINDOWS = first_global(128)
SINKS = {"layers.sinks": "model.layers.{i}.self_attn.sinks"}


class GraniteSwaHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Granite with windows"
    model_types: ClassVar = {"GraniteSWAForCausalLM": "granite_swa"}
    weights = WEIGHTS | SINKS
    pairs = (
        *(ACT, HEAD, BIAS, ROPE, NO_IDS, SCALES),
        WINDOWS,
        THETAS,
    )
    defaults: ClassVar = USUAL | {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    }  # fmt: skip
