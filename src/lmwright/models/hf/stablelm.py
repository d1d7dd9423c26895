"""StableLM in Hugging Face."""

from typing import ClassVar

from lmwright.models.hf.pairs import ACT, EVEN_WIDTH, HEAD, Json, Words
from lmwright.models.hf.rope import PARTIAL_ROPE
from lmwright.models.hf.table import KEYS, STREAM_BIASES, WEIGHTS, Table


class StableLmHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "StableLM"
    model_types: ClassVar = {"StableLmForCausalLM": "stablelm"}
    weights = WEIGHTS | STREAM_BIASES | {
        f"layers.{part}_norm": f"model.layers.{{i}}.self_attn.{part}_layernorm.norms.{{}}.weight"
        for part in "qk"
    }  # fmt: skip
    by_head = ("layers.q_norm", "layers.k_norm")
    keys: ClassVar = {n: key for n, key in KEYS.items() if n != "head_dim"} | {
        "norm_eps": "layer_norm_eps"
    }
    pairs = (
        *(ACT, HEAD, EVEN_WIDTH, PARTIAL_ROPE),
        Words("bias", "use_qkv_bias", {"qkv": True, "none": False}),
        Words("qk_norm", "qk_layernorm", {"head": True, "none": False}),
        Words("residual", "use_parallel_residual", {"parallel": True, "sequential": False}),
    )
    defaults: ClassVar[Json] = {
        "num_key_value_heads": 32, "layer_norm_eps": 1e-5, "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.25, "vocab_size": 50_304, "hidden_size": 2560,
        "intermediate_size": 6912, "num_hidden_layers": 32, "num_attention_heads": 32,
    }  # fmt: skip
