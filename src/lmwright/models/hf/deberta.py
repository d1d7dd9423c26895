"""DeBERTa-v3 in Hugging Face, whose classes are those of DeBERTa-v2.

The head over the vocabulary has the names that Microsoft gave it (`legacy` false); those of
transformers' own first form (`legacy` true) are read, too.
"""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.pairs import (
    EVEN_HEADS,
    PLAIN_ACT,
    Derived,
    Fixed,
    Json,
    Words,
    only_written,
)
from lmwright.models.hf.table import EVEN_KEYS, ClassifierForm, Table

ARCHITECTURE = "DebertaV2ForMaskedLM"
TIED = Words("head", "tie_word_embeddings", {"tied": True}, True, True)
TERMS = ("c2p", "p2c")
LAYER = {
    "q": "attention.self.query_proj", "k": "attention.self.key_proj",
    "v": "attention.self.value_proj", "o": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm", "up": "intermediate.dense",
    "down": "output.dense", "mlp_norm": "output.LayerNorm",
}  # fmt: skip
OUTER = {
    "embed_norm": "deberta.embeddings.LayerNorm", "relative_norm": "deberta.encoder.LayerNorm",
    "dense": "lm_predictions.lm_head.dense", "head_norm": "lm_predictions.lm_head.LayerNorm",
}  # fmt: skip
MEANS: dict[str, tuple[Any, str]] = {
    "relative_attention": (True, "without distances"),
    "position_biased_input": (False, "positions added to the embedding"),
    "share_att_key": (True, "projections of its own for them"),
    "type_vocab_size": (0, "types of tokens"),
    "conv_kernel_size": (0, "a convolution"),
}
"""Value that DeBERTa-v3 has, and what a model of v2 has that says otherwise."""
V3 = "{{key}} = {{said}}, {}, is not computed, only {{value}} as in DeBERTa-v3"
OTHER = "is not computed, only what DeBERTa-v3 has there"


def _weights() -> dict[str, str]:
    """Names over there of ours, whose biases end in `_bias`."""
    both = OUTER | {f"layers.{ours}": f"deberta.encoder.layer.{{i}}.{theirs}"
                    for ours, theirs in LAYER.items()}  # fmt: skip
    return {
        "embed": "deberta.embeddings.word_embeddings.weight",
        "relative": "deberta.encoder.rel_embeddings.weight",
        "decoder_bias": "lm_predictions.lm_head.bias",
        **{ours: f"{theirs}.weight" for ours, theirs in both.items()},
        **{f"{ours}_bias": f"{theirs}.bias" for ours, theirs in both.items()},
    }


def _read_distance(config: Json, fields: Json, where: str) -> Json:
    far = config["max_relative_positions"]
    return {"max_distance": far if far > 0 else config["max_position_embeddings"]}


def _read_terms(config: Json, fields: Json, where: str) -> Json:
    terms = config.get("pos_att_type") or ()
    terms = terms.lower().split("|") if isinstance(terms, str) else terms
    if sorted(term.strip() for term in terms) != sorted(TERMS):
        raise UserError(f"{where}: pos_att_type = {config.get('pos_att_type')!r} {OTHER}")
    return {}


def _refuse_sizes(config: Json, fields: Json, where: str) -> Json:
    sizes = {"embedding_size": fields["embed_dim"], "attention_head_size": fields["head_dim"]}
    other = [] if fields["position_buckets"] > 0 else ["position_buckets"]
    other += [name for name, size in sizes.items() if config.get(name) not in (None, size)]
    if other:
        raise UserError(f"{where}: {other[0]} = {config.get(other[0])!r} {OTHER}")
    return {}


class DebertaHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "DeBERTa"
    model_types: ClassVar = {ARCHITECTURE: "deberta-v2"}
    weights = _weights()
    classifier: ClassVar = ClassifierForm(
        "DebertaV2ForSequenceClassification", "cls", "pooler.dense"
    )
    answers = "qa_outputs"
    body = detector = "DebertaV2Model"
    keys = EVEN_KEYS | {"norm_eps": "layer_norm_eps", "position_buckets": "position_buckets"}
    pairs = (
        PLAIN_ACT,
        TIED,
        Derived(_read_distance, lambda m, *_: {"max_relative_positions": m.max_distance}),
        *(Fixed(name, value, V3.format(means)) for name, (value, means) in MEANS.items()),
        Derived(_read_terms, lambda *_: {"pos_att_type": list(TERMS)}),
        Fixed("norm_rel_ebd", "layer_norm", f"{{key}} = {{said}} {OTHER}"),
        Fixed("pooler_hidden_act", "gelu", f"{{key}} = {{said}} {OTHER}"),
        EVEN_HEADS,
        Derived(_refuse_sizes, lambda model, *_: {"pooler_hidden_size": model.embed_dim}),
        only_written(legacy=False, pooler_dropout=0),
    )
    defaults: ClassVar[Json] = {
        "relative_attention": False, "position_biased_input": True, "share_att_key": False,
        "position_buckets": -1, "max_relative_positions": -1, "layer_norm_eps": 1e-7,
        "vocab_size": 128_100, "hidden_size": 1536, "num_hidden_layers": 24,
        "num_attention_heads": 24, "intermediate_size": 6144, "max_position_embeddings": 512,
        "norm_rel_ebd": None,
    }  # fmt: skip
