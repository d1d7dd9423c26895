"""Masked diffusion models in Hugging Face, in classes that open without remote code and a key that
tells them from others: EuroBERT, whose blocks are the same, and Qwen 2 where queries, keys and
values have biases, told to look both ways.
"""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.eurobert import EuroBertHf
from lmwright.models.hf.table import ACT, HEAD, Derived, Json, Words

KEY = "masked_diffusion"
PREDICTS = ("own", "next")
QWEN = "Qwen2ForCausalLM"
FIRST_RIGHT = "5.2.0"  # transformers before it reads `is_causal` of Qwen 2 nowhere


def _read_bias(config: Json, *_: Any) -> Json:
    if config["architectures"][0] == QWEN:
        return {"bias": "qkv"}
    return {"bias": "attention" if config.get("attention_bias") else "none"}


def _write_bias(model: Any, architecture: str) -> Json:
    if architecture == QWEN:
        return {"is_causal": False, "transformers_version": FIRST_RIGHT}
    return {"attention_bias": model.bias == "attention"}


class LladaHf(EuroBertHf):
    """Both directions of the family's Hugging Face form."""

    name = "masked diffusion"
    mark = KEY
    words: ClassVar[tuple[Words, ...]] = (ACT, HEAD)
    derived: ClassVar[tuple[Derived, ...]] = (Derived(_read_bias, _write_bias),)
    model_types: ClassVar = EuroBertHf.model_types | {QWEN: "qwen2"}

    def architecture(self, model: Any) -> str:
        """Qwen 2 for its biases alone, EuroBERT for all others."""
        return QWEN if model.bias == "qkv" else super().architecture(model)

    def own_config(self, model: Any, config: Json) -> Json:
        """Beside EuroBERT's, which token the output at a place predicts."""
        return super().own_config(model, config) | {KEY: {"predicts": model.predicts}}

    def own_fields(self, config: Json, fields: Json, where: str) -> Json:
        """Which token the output at a place predicts. Raises UserError for windows."""
        predicts = config[KEY].get("predicts", "own")
        if predicts not in PREDICTS:
            raise UserError(
                f"{where}: {KEY}.predicts = {predicts!r} is neither {' nor '.join(PREDICTS)}"
            )
        if config.get("use_sliding_window"):
            raise UserError(
                f"{where}: use_sliding_window is set, and masked diffusion has no windows; take a "
                "model without"
            )
        return super().own_fields(config, fields, where) | {"predicts": predicts}
