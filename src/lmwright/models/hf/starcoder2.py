"""StarCoder 2 in Hugging Face."""

from typing import ClassVar

from lmwright.models.hf.pairs import HEAD, NO_IDS, Json, Words
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import KEYS, STREAM_BIASES, WEIGHTS, Table, with_biases

ACTS = {"gelu_tanh": "gelu_pytorch_tanh", "gelu_erf": "gelu", "relu": "relu", "relu2": "relu2"}
SAME = dict.fromkeys(("gelu_new", "gelu_fast"), "gelu_pytorch_tanh")


class Starcoder2Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "StarCoder 2"
    model_types: ClassVar = {"Starcoder2ForCausalLM": "starcoder2"}
    weights = WEIGHTS | STREAM_BIASES | with_biases({
        f"layers.{ours}": f"model.layers.{{i}}.mlp.{theirs}"
        for ours, theirs in {"up": "c_fc", "down": "c_proj"}.items()
    })  # fmt: skip
    keys = KEYS | {"norm_eps": "norm_epsilon"}
    optional: ClassVar = {"window": "sliding_window"}
    pairs = (
        Words("mlp", "hidden_act", ACTS, "gelu_pytorch_tanh", same=SAME),
        Words("bias", "use_bias", {"all": True, "none": False}, True),
        *(HEAD, ROPE, NO_IDS),
    )
    defaults: ClassVar[Json] = {
        "num_key_value_heads": 2, "norm_epsilon": 1e-5, "max_position_embeddings": 4096,
        "tie_word_embeddings": True, "hidden_size": 3072, "intermediate_size": 12_288,
        "num_hidden_layers": 30, "num_attention_heads": 24, "vocab_size": 49_152,
    }  # fmt: skip
