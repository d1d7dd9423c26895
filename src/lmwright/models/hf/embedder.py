"""Embedding models in Hugging Face: the table of their encoder without its head, and how tokens
become a vector, which sentence-transformers keeps in files beside it (`formats.sentence`).

EuroBertModel, ModernBertModel   the names of the whole model without `model.`, and no head
DebertaV2Model                   without `deberta.`; of a detector, with it (`models.hf.detector`)
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from lmwright.models.hf.table import Json

BODIES = {"EuroBertModel": "EuroBertForMaskedLM", "ModernBertModel": "ModernBertForMaskedLM",
          "DebertaV2Model": "DebertaV2ForMaskedLM"}  # fmt: skip
"""Architecture of an encoder without its head, and with the one over the vocabulary."""
BODY = re.compile(r"^(model|deberta)\.")  # before the names of what is not the head

TokenPooling = Literal["mean", "first"]
Length = Literal["one", "any"]


class EmbedderHf:
    """The Hugging Face form of an embedding model."""

    architectures = tuple(BODIES)

    def __init__(self, model: Any):
        self.name = model.encoder.hf.name
        self.weights: Mapping[str, str] = {
            ours: BODY.sub("", theirs) for ours, theirs in model.encoder.hf.weights.items()
        }

    def config(self, model: Any) -> Json:
        """config.json of an embedding model, tokenizer ids left out. Raises UserError for what it
        cannot say."""
        config = model.encoder.hf.config(model.encoder)
        (body,) = (body for body, whole in BODIES.items() if whole in config["architectures"])
        return config | {"architectures": [body]}
