"""ModernBERT in Hugging Face, in the form of transformers 5 and the one before."""

from typing import Any, ClassVar

from lmwright.models.decoder import LayerReach, reaches
from lmwright.models.hf.pairs import (
    EVEN_HEADS,
    GATED_ACT,
    Derived,
    Fixed,
    Json,
    Words,
    only_written,
)
from lmwright.models.hf.rope import SIDES, first_given, sides_config, sides_fields
from lmwright.models.hf.table import EVEN_KEYS, ClassifierForm, Table
from lmwright.models.hf.window import TYPES, pattern_of, reach_of

ACTS = GATED_ACT | {"geglu_erf": "gelu"}
ACT = Words("mlp", "hidden_activation", ACTS, "gelu", "gelu")
TIED = Words("head", "tie_word_embeddings", {"tied": True, "untied": False}, True, True)
THETAS = {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0}
"""Keys for the thetas of global and of local layers in the form before, and the usual ones."""
BIASES = {
    "attention": "attention_bias", "mlp": "mlp_bias", "norm": "norm_bias",
    "dense": "classifier_bias", "decoder": "decoder_bias",
}  # fmt: skip
IDS = [f"{name}_token_id" for name in ("bos", "eos", "pad", "cls", "sep")]
"""Ids that its class would fill in with those of the released models."""
NORMS = {"attention_norm": "attn_norm", "mlp_norm": "mlp_norm"}
LINEARS = {"qkv": "attn.Wqkv", "o": "attn.Wo", "gate_up": "mlp.Wi", "down": "mlp.Wo"}


def _weights() -> dict[str, str]:
    """Names over there of ours, whose biases end in `_bias`."""
    layer = "model.layers.{i}."
    outer = {
        "embed_norm": "model.embeddings.norm", "norm": "model.final_norm",
        "dense": "head.dense", "head_norm": "head.norm", "decoder": "decoder",
    }  # fmt: skip
    both = outer | {f"layers.{n}": layer + theirs for n, theirs in (NORMS | LINEARS).items()}
    return {
        "embed": "model.embeddings.tok_embeddings.weight",
        "head": "decoder.weight",
        **{ours: f"{theirs}.weight" for ours, theirs in both.items() if ours != "decoder"},
        **{f"{ours}_bias": f"{theirs}.bias" for ours, theirs in both.items()},
    }


def _read_reach(config: Json, fields: Json, where: str) -> Json:
    num_layers = fields["num_layers"]
    types = config.get("layer_types")
    if types is None:
        every = config.get("global_attn_every_n_layers") or 3
        reach = _every(every, num_layers)
    else:
        reach = reach_of(types, num_layers, where)
    side = config.get("sliding_window") or config["local_attention"] // 2  # half of it, too
    return {"window": side + 1, "layer_pattern": pattern_of(reach)}


def _write_reach(model: Any, *_: str) -> Json:
    reach = reaches(model.layer_pattern, model.num_layers)
    every = len(pattern_of(reach))
    own = {"layer_types": [TYPES[each] for each in reach], "local_attention": 2 * model.window - 2}
    if list(reach) == _every(every, model.num_layers):
        own["global_attn_every_n_layers"] = every  # what transformers 4 and llama.cpp read
    return own


def _every(count: int, num_layers: int) -> list[LayerReach]:
    """The reach of layers of which the first of each `count` is global."""
    return ["local" if i % count else "global" for i in range(num_layers)]


def _read_rope(config: Json, _: Json, where: str) -> Json:
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    whole, local = (
        {"rope_theta": first_given(config.get(name), usual)} | dict(rope.get(side) or {}) | scaling
        for side, (name, usual) in zip(SIDES, THETAS.items(), strict=True)
    )
    return sides_fields(config, whole, local, where)


def _write_rope(model: Any, *_: str) -> Json:
    # the form before can say no scaling
    return sides_config(model, THETAS, before=model.rope_scaling is None)


def _read_biases(config: Json, *_: Any) -> Json:
    usual = {"decoder_bias": True}
    said = (ours for ours, theirs in BIASES.items() if config.get(theirs, usual.get(theirs)))
    return {"biases": list(said)}


class ModernBertHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "ModernBERT"
    model_types: ClassVar = {"ModernBertForMaskedLM": "modernbert"}
    weights = _weights()
    classifier: ClassVar = ClassifierForm("ModernBertForSequenceClassification", "cls")
    answers = "classifier"
    body = "ModernBertModel"
    keys = EVEN_KEYS | {"norm_eps": "norm_eps"}
    pairs = (
        ACT,
        TIED,
        Derived(_read_reach, _write_reach),
        Derived(_read_rope, _write_rope),
        Fixed("classifier_activation", "gelu", "{key} {said} is not supported, only {value}"),
        EVEN_HEADS,
        Derived(_read_biases, lambda m, *_: {key: n in m.biases for n, key in BIASES.items()}),
        only_written(**dict.fromkeys(IDS)),
    )
    defaults: ClassVar[Json] = {
        "norm_eps": 1e-5, "local_attention": 128, "vocab_size": 50_368, "hidden_size": 768,
        "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12,
        "max_position_embeddings": 8192,
    }  # fmt: skip
