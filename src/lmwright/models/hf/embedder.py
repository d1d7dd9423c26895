"""Embedding models in Hugging Face: the table of their encoder without its head, and how tokens
become a vector, which sentence-transformers keeps in files beside it (`formats.sentence`).

EuroBertModel, ModernBertModel   the names of the whole model without `model.`, and no head
DebertaV2Model                   without `deberta.`; of a detector, with it (`models.hf.detector`)
"""

import re
from typing import Literal

from lmwright.models.hf.over import Over
from lmwright.models.hf.pairs import Derived

VECTORS = "lmwright_vectors"  # in a config: what is beside it about vectors
BODY = re.compile(r"^(model|deberta)\.")  # before the names of what is not the head

TokenPooling = Literal["mean", "first"]
Length = Literal["one", "any"]


EMBEDDER = Over(
    lambda table: table.body,
    lambda table: {ours: BODY.sub("", theirs) for ours, theirs in table.weights.items()},
    (Derived(lambda config, *_: {"length": "any", **config.get(VECTORS, {})}),),
)
