"""Masked diffusion models in Hugging Face, in classes that open without remote code and a key that
tells them from others: EuroBERT, whose blocks are the same, and Qwen 2 where queries, keys and
values have biases, told to look both ways.
"""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.eurobert import EuroBertHf
from lmwright.models.hf.pairs import ACT, HEAD, NO_IDS, Derived, Fixed, Json, Pair
from lmwright.models.hf.rope import ROPE

KEY = "masked_diffusion"
PREDICTS = ("own", "next")
QWEN = "Qwen2ForCausalLM"
FIRST_RIGHT = "5.2.0"  # transformers before it reads `is_causal` of Qwen 2 nowhere


def _read_bias(config: Json, *_: Any) -> Json:
    if config["architectures"][0] == QWEN:
        return {"bias": "qkv"}
    return {"bias": "attention" if config.get("attention_bias") else "none"}


def _write_bias(model: Any, architecture: str, _: str) -> Json:
    if architecture == QWEN:
        return {"is_causal": False, "transformers_version": FIRST_RIGHT}
    return {"attention_bias": model.bias == "attention"}


def _read_predicts(config: Json, _: Json, where: str) -> Json:
    predicts = config[KEY].get("predicts", "own")
    if predicts not in PREDICTS:
        raise UserError(
            f"{where}: {KEY}.predicts = {predicts!r} is neither {' nor '.join(PREDICTS)}"
        )
    return {"predicts": predicts}


NO_WINDOW = "{key} is set, and masked diffusion has no windows; use a model without"


class LladaHf(EuroBertHf):
    """Both directions of the family's Hugging Face form."""

    name = "masked diffusion"
    mark = KEY
    body = None
    pairs: ClassVar[tuple[Pair, ...]] = (
        ACT,
        HEAD,
        Derived(_read_bias, _write_bias),
        ROPE,
        Derived(_read_predicts, lambda model, *_: {KEY: {"predicts": model.predicts}}),
        Fixed("use_sliding_window", False, NO_WINDOW, same=(None,), written=False),
        NO_IDS,
    )
    model_types: ClassVar = EuroBertHf.model_types | {QWEN: "qwen2"}
    own_defaults: ClassVar = {QWEN: {"rms_norm_eps": 1e-6, "num_key_value_heads": None}}

    def architecture(self, model: Any) -> str:
        """Qwen 2 for its biases alone, EuroBERT for all others."""
        return QWEN if model.bias == "qkv" else super().architecture(model)
