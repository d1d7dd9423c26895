"""EuroBERT in Hugging Face (transformers 5.3 and later)."""

from typing import ClassVar

from lmwright.models.hf.pairs import ACT, BIAS, HEAD, NO_IDS, Fixed, Json, Pair
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import ClassifierForm, Table


class EuroBertHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "EuroBERT"
    pairs: ClassVar[tuple[Pair, ...]] = (
        *(ACT, HEAD, BIAS, ROPE, NO_IDS),
        Fixed("mlp_bias", False, same=(None,)),
    )
    model_types: ClassVar = {"EuroBertForMaskedLM": "eurobert"}
    body: ClassVar[str | None] = "EuroBertModel"
    classifier: ClassVar = ClassifierForm("EuroBertForSequenceClassification", "late", "dense")
    defaults: ClassVar[Json] = {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}
