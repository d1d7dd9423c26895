"""Command R in Hugging Face: without windows, and with them."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.pairs import ACT, BIAS, HEAD, NO_IDS, Derived, Json, refuse_number
from lmwright.models.hf.rope import ROPE, usual_theta
from lmwright.models.hf.table import KEYS, Table
from lmwright.models.hf.window import pattern_of, reach_of_every, window_config

PLAIN, WINDOWS = "CohereForCausalLM", "Cohere2ForCausalLM"
THETA = 500_000.0  # of those without windows, where config.json says none
WINDOW = 4096  # the same of windows
SCALE = "logit_scale"


def _read_theta(config: Json, fields: Json, where: str) -> Json:
    if config["architectures"][0] == WINDOWS:
        return {}
    return usual_theta(THETA).read(config, fields, where)


def _read_layers(config: Json, fields: Json, where: str) -> Json:
    if config["architectures"][0] == PLAIN:
        return {"window": None, "qk_norm": "head" if config.get("use_qk_norm") else "none"}
    window = config.get("sliding_window", WINDOW)
    if window is None:
        raise UserError(
            f"{where}: sliding_window is null, with which {WINDOWS} computes nothing; set it, or "
            f"remove it for {WINDOW}"
        )
    reach = reach_of_every(config, fields["num_layers"], where)
    return {"window": window, "layer_pattern": pattern_of(reach)}


def _write_layers(model: Any, architecture: str, _: str) -> Json:
    if architecture == PLAIN:
        return {"use_qk_norm": model.qk_norm == "head"}
    if model.qk_norm != "none":
        raise UserError(
            'model.qk_norm: no Hugging Face architecture has qk_norm = "head" and windows '
            "together; change one to export"
        )
    return window_config(model)


def _read_scale(config: Json, _: Json, where: str) -> Json:
    refuse_number(SCALE, config.get(SCALE, 0.0625), where)
    return {"logits_multiplier": float(config.get(SCALE, 0.0625))}


class CohereHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Command R"
    model_types: ClassVar = {PLAIN: "cohere", WINDOWS: "cohere2"}
    by_head = ("layers.q_norm", "layers.k_norm")
    keys = KEYS | {"norm_eps": "layer_norm_eps"}
    pairs = (
        *(ACT, HEAD, BIAS, ROPE, NO_IDS),
        Derived(_read_theta),
        Derived(_read_layers, _write_layers),
        Derived(_read_scale, lambda model, *_: {SCALE: model.logits_multiplier}),
    )
    defaults: ClassVar = {
        "layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }  # fmt: skip

    def architecture(self, model: Any) -> str:
        """That with windows where the model has some."""
        return PLAIN if model.window is None else WINDOWS
