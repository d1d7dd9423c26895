"""ModernBERT and its decoders in Hugging Face, in the form of transformers 5 and the one before."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.decoder import LayerReach, reaches
from lmwright.models.hf.pairs import (
    EVEN_HEADS,
    GATED_ACT,
    Derived,
    Fixed,
    Json,
    Pair,
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
LINEARS = {"o": "attn.Wo", "gate_up": "mlp.Wi", "down": "mlp.Wo"}


def _weights(linears: dict[str, str], head: str) -> dict[str, str]:
    """Names over there of ours, whose biases end in `_bias`."""
    layer = "model.layers.{i}."
    outer = {
        "embed_norm": "model.embeddings.norm", "norm": "model.final_norm",
        "dense": f"{head}.dense", "head_norm": f"{head}.norm", "decoder": "decoder",
    }  # fmt: skip
    own = NORMS | LINEARS | linears
    both = outer | {f"layers.{n}": layer + theirs for n, theirs in own.items()}
    return {
        "embed": "model.embeddings.tok_embeddings.weight",
        "head": "decoder.weight",
        **{ours: f"{theirs}.weight" for ours, theirs in both.items() if ours != "decoder"},
        **{f"{ours}_bias": f"{theirs}.bias" for ours, theirs in both.items()},
    }


def _read_pattern(config: Json, fields: Json, where: str) -> list[LayerReach]:
    num_layers = fields["num_layers"]
    types = config.get("layer_types")
    if types is None:
        return pattern_of(_every(config.get("global_attn_every_n_layers") or 3, num_layers))
    return pattern_of(reach_of(types, num_layers, where))


def _read_reach(config: Json, fields: Json, where: str) -> Json:
    side = config.get("sliding_window") or config["local_attention"] // 2  # half of it, too
    return {"window": side + 1, "layer_pattern": _read_pattern(config, fields, where)}


def _read_back(config: Json, fields: Json, where: str) -> Json:
    """The window of a decoder, which is half of `local_attention`."""
    pattern, whole = _read_pattern(config, fields, where), config["local_attention"]
    window = config.get("sliding_window", whole // 2 if whole else None)
    if window is None or window < 1:
        if "local" in pattern:
            raise UserError(
                f"{where}: its layers of sliding_attention have no window; set local_attention to "
                "twice the tokens that they look at, 128 in released models"
            )
        return {"layer_pattern": pattern}
    return {"window": window, "layer_pattern": pattern}


def _write_reach(model: Any, *_: str) -> Json:
    return _write_pattern(model) | {"local_attention": 2 * model.window - 2}


def _write_back(model: Any, *_: str) -> Json:
    own = {"local_attention": 2 * model.window, "sliding_window": model.window}
    return _write_pattern(model) | own


def _last_ids(model: Any, *_: str) -> Json:
    """The last id for each that the decoder's class takes no null for."""
    return dict.fromkeys(IDS, model.vocab_size - 1) | {"eos_token_id": None}


def _write_pattern(model: Any) -> Json:
    reach = reaches(model.layer_pattern, model.num_layers)
    every = len(pattern_of(reach))
    own: Json = {"layer_types": [TYPES[each] for each in reach]}
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


PAIRS: tuple[Pair, ...] = (
    ACT,
    TIED,
    Derived(_read_rope, _write_rope),
    Fixed("classifier_activation", "gelu", "{key} {said} is not supported, only {value}"),
    EVEN_HEADS,
    Derived(_read_biases, lambda m, *_: {key: n in m.biases for n, key in BIASES.items()}),
)
USUAL: Json = {
    "norm_eps": 1e-5, "local_attention": 128, "vocab_size": 50_368, "hidden_size": 768,
    "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12,
    "max_position_embeddings": 8192,
}  # fmt: skip


class ModernBertHf(Table):
    """Both directions of the encoder's Hugging Face form."""

    name = "ModernBERT"
    model_types: ClassVar = {"ModernBertForMaskedLM": "modernbert"}
    weights = _weights({"qkv": "attn.Wqkv"}, "head")
    classifier: ClassVar = ClassifierForm("ModernBertForSequenceClassification", "cls")
    answers = "classifier"
    body = "ModernBertModel"
    keys = EVEN_KEYS | {"norm_eps": "norm_eps"}
    pairs = (Derived(_read_reach, _write_reach), *PAIRS, only_written(**dict.fromkeys(IDS)))
    defaults: ClassVar[Json] = USUAL


class ModernBertDecoderHf(Table):
    """Both directions of the decoder's Hugging Face form."""

    name = "ModernBERT decoder"
    model_types: ClassVar = {"ModernBertDecoderForCausalLM": "modernbert-decoder"}
    weights = _weights({n: f"attn.{n}_proj" for n in "qkv"}, "lm_head")
    keys = EVEN_KEYS | {"norm_eps": "norm_eps"}
    pairs = (Derived(_read_back, _write_back), *PAIRS, Derived(write=_last_ids))
    needs_ids = True
    defaults: ClassVar[Json] = USUAL
