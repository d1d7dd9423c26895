"""EuroBERT in Hugging Face (transformers 5.3 and later)."""

from typing import Any, ClassVar

from lmwright.models.hf.table import ACT, BIAS, HEAD, ClassifierForm, Json, Table, Words


class EuroBertHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "EuroBERT"
    words: ClassVar[tuple[Words, ...]] = (ACT, HEAD, BIAS)
    model_types: ClassVar = {"EuroBertForMaskedLM": "eurobert"}
    classifier: ClassVar = ClassifierForm(
        "EuroBertForSequenceClassification",
        "late",
        {
            "classifier.dense": "dense.weight",
            "classifier.dense_bias": "dense.bias",
            "classifier.out": "classifier.weight",
            "classifier.out_bias": "classifier.bias",
        },
    )
    defaults: ClassVar[Json] = {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}

    def own_config(self, model: Any, config: Json) -> Json:
        """Ids that its class would fill in with those of the released models."""
        return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
