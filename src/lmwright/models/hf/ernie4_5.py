"""ERNIE 4.5's dense models in Hugging Face."""

from typing import ClassVar

from lmwright.models.hf.pairs import ACT, HEAD, Words
from lmwright.models.hf.rope import ROPE, usual_theta
from lmwright.models.hf.table import Table

THETA = 500_000.0  # where config.json says none


class Ernie45Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "ERNIE 4.5"
    model_types: ClassVar = {"Ernie4_5ForCausalLM": "ernie4_5"}
    pairs = (
        ACT,
        HEAD,
        Words("bias", "use_bias", {"all": True, "none": False}),
        ROPE,
        usual_theta(THETA),
    )
    defaults: ClassVar = {
        "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072, "tie_word_embeddings": True,
    }  # fmt: skip
