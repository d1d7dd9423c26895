"""StarCoder 1 and SantaCoder in Hugging Face: GPT-2's names, matrices as [out, in]."""

from typing import ClassVar

from lmwright.models.hf.gpt2 import OTHER, Gpt2Hf, write_short
from lmwright.models.hf.pairs import EVEN_WIDTH, NO_IDS, Derived, Fixed, Words
from lmwright.models.hf.starcoder2 import ACTS, SAME

HEADS = "multi_query = {said} is not computed, only {value} as in StarCoder and SantaCoder"


class GptBigcodeHf(Gpt2Hf):
    """Both directions of the family's Hugging Face form."""

    name = "GPT-BigCode"
    model_types: ClassVar = {"GPTBigCodeForCausalLM": "gpt_bigcode"}
    inputs_first: ClassVar = ()
    pairs = (
        Words("mlp", "activation_function", ACTS, "gelu_pytorch_tanh", same=SAME),
        Words("head", "tie_word_embeddings", {"tied": True, "untied": False}, True, True),
        Fixed("scale_attn_weights", True, OTHER),
        Fixed("add_cross_attention", False, OTHER, written=False),
        Fixed("multi_query", True, HEADS),
        EVEN_WIDTH,
        Derived(lambda *_: {"num_kv_heads": 1}, lambda *_: {"num_key_value_heads": 1}),
        Derived(write=write_short),
        NO_IDS,
    )
