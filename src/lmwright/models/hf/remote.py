"""Folders whose model is code beside the weights, which is not run: their config.json in the words
of classes that compute the same.

    LLaDAModelLM  (https://arxiv.org/abs/2502.09992)  EuroBERT's blocks, weights by other names
    DreamModel    (https://arxiv.org/abs/2508.15487)  Qwen 2's, an output predicts the next token
"""

from typing import Any

from lmwright.errors import UserError

Json = dict[str, Any]

LLADA = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "mlp_hidden_size",
    "max_position_embeddings": "max_sequence_length",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "weight_tying",
    "hidden_act": "activation_type",
}
LLADA_ONLY: Json = {
    "block_type": "llama",
    "layer_norm_type": "rms",
    "rope": True,
    **dict.fromkeys(
        ("alibi", "attention_layer_norm", "bias_for_layer_norm", "include_bias",
         "include_qkv_bias", "input_emb_norm", "multi_query_attention", "scale_logits"),
        False,
    ),
}  # fmt: skip
"""Settings of the released models, and the only ones that are read."""


def without_remote_code(config: Json, where: str) -> Json:
    """config.json as it would be without remote code; others as they are. Raises UserError for
    what the released models do not have."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else ""
    if name == "LLaDAModelLM":
        return _llada(config, where)
    if name in ("DreamModel", "DreamBaseModel"):
        own: Json = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
        own |= {"masked_diffusion": {"predicts": "next"}}
        return {"tie_word_embeddings": False, **config, **own}
    return config


def _llada(config: Json, where: str) -> Json:
    for name, value in LLADA_ONLY.items():
        if config.get(name) not in (value, None):
            raise UserError(
                f"{where}: {name} = {config[name]!r} is not LLaDA's {value!r}, the only value that "
                "is computed; use another model"
            )
    own = {theirs: config.get(ours) for theirs, ours in LLADA.items()}
    if own["num_key_value_heads"] is None:
        own["num_key_value_heads"] = own["num_attention_heads"]
    table = config.get("embedding_size") or own["vocab_size"]
    own |= {"vocab_size": table, "masked_diffusion": {"predicts": "own"}}
    return own | {"architectures": ["EuroBertForMaskedLM"], "model_type": "eurobert"}
