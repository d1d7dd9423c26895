"""DeBERTa-v3 in Hugging Face, whose classes are those of DeBERTa-v2.

The head over the vocabulary has the names that Microsoft gave it (`legacy` false); those of
transformers' own first form (`legacy` true) are read, too.
"""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.table import KEYS, ClassifierForm, Derived, Json, Table, Words

ARCHITECTURE = "DebertaV2ForMaskedLM"
ACT = Words("mlp", "hidden_act", {"gelu_erf": "gelu", "relu": "relu", "relu2": "relu2"}, "gelu")
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
REQUIRED: Json = {
    "relative_attention": True, "position_biased_input": False, "share_att_key": True,
    "type_vocab_size": 0, "conv_kernel_size": 0,
}  # fmt: skip
"""What DeBERTa-v3 has, and v2 may have otherwise."""
USUAL: Json = {
    "relative_attention": False, "position_biased_input": True, "share_att_key": False,
    "type_vocab_size": 0, "conv_kernel_size": 0, "position_buckets": -1,
    "max_relative_positions": -1, "layer_norm_eps": 1e-7, "vocab_size": 128_100,
    "hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24,
    "intermediate_size": 6144, "max_position_embeddings": 512,
}  # fmt: skip
MEANS = {
    "relative_attention": "without distances", "share_att_key": "projections of its own for them",
    "position_biased_input": "positions added to the embedding",
    "type_vocab_size": "types of tokens", "conv_kernel_size": "a convolution",
}  # fmt: skip


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


def _write_distance(model: Any, _: str) -> Json:
    return {"max_relative_positions": model.max_distance}


class DebertaHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "DeBERTa"
    model_types: ClassVar = {ARCHITECTURE: "deberta-v2"}
    weights = _weights()
    classifier: ClassVar = ClassifierForm(
        "DebertaV2ForSequenceClassification",
        "cls",
        {
            "classifier.dense": "pooler.dense.weight",
            "classifier.dense_bias": "pooler.dense.bias",
            "classifier.out": "classifier.weight",
            "classifier.out_bias": "classifier.bias",
        },
    )
    keys = {ours: theirs for ours, theirs in KEYS.items()
            if ours not in ("head_dim", "num_kv_heads")} | {
        "norm_eps": "layer_norm_eps", "position_buckets": "position_buckets"
    }  # fmt: skip
    words = (ACT, TIED)
    derived = (Derived(_read_distance, _write_distance),)

    def usual(self, config: Json, architecture: str) -> Json:
        """Values that transformers fills in where config.json is silent."""
        return USUAL

    def rope_keys(self, model: Any) -> Json:
        """None: positions are distances."""
        return {}

    def rope(self, config: Json, architecture: str, where: str) -> Json:
        """None: positions are distances."""
        return {}

    def own_config(self, model: Any, config: Json) -> Json:
        """Settings of v3 that the class has otherwise. Raises UserError for heads that it cannot
        have."""
        if model.head_dim * model.num_heads != model.embed_dim:
            raise UserError(
                f"model.head_dim: {model.head_dim} times {model.num_heads} heads is not "
                f"model.embed_dim = {model.embed_dim}, as in Hugging Face's DeBERTa; change it"
            )
        return REQUIRED | {
            "pos_att_type": list(TERMS),
            "norm_rel_ebd": "layer_norm",
            "legacy": False,
            "pooler_hidden_act": "gelu",
            "pooler_hidden_size": model.embed_dim,
            "pooler_dropout": 0,
        }

    def own_fields(self, config: Json, fields: Json, where: str) -> Json:
        """Heads. Raises UserError for what v2 has and v3 does not."""
        for name, value in REQUIRED.items():
            if config.get(name) != value:
                raise UserError(
                    f"{where}: {name} = {config.get(name)!r}, {MEANS[name]}, is not computed, "
                    f"only {value!r} as in DeBERTa-v3"
                )
        terms, heads = config.get("pos_att_type") or (), fields["num_heads"]
        terms = terms.lower().split("|") if isinstance(terms, str) else terms
        others = {
            "pos_att_type": sorted(term.strip() for term in terms) == sorted(TERMS),
            "norm_rel_ebd": config.get("norm_rel_ebd") == "layer_norm",
            "pooler_hidden_act": config.get("pooler_hidden_act", "gelu") == "gelu",
            "position_buckets": fields["position_buckets"] > 0,
            "embedding_size": config.get("embedding_size") in (None, fields["embed_dim"]),
            "attention_head_size": config.get("attention_head_size")
            in (None, fields["embed_dim"] // heads),
        }
        for name, computed in others.items():
            if not computed:
                raise UserError(
                    f"{where}: {name} = {config.get(name)!r} is not computed, only what "
                    "DeBERTa-v3 has there"
                )
        return {"num_kv_heads": heads, "head_dim": fields["embed_dim"] // heads}
