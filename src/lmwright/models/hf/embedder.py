"""Embedding models in Hugging Face: the table of their encoder without its head, and how tokens
become a vector, which sentence-transformers keeps in files beside it (`formats.sentence`).

EuroBertModel, ModernBertModel   the names of the whole model without `model.`, and no head
BertModel and others             without `bert.` or `roberta.`, and without a pooler
DebertaV2Model                   without `deberta.`; of a detector, with it (`models.hf.detector`)
"""

import re
from typing import Any, Literal

from lmwright.models.hf.over import Over
from lmwright.models.hf.pairs import Derived, Json

VECTORS = "lmwright_vectors"  # in a config: what is beside it about vectors
BODY = re.compile(r"^(model|deberta|bert|roberta)\.")  # before the names of what is not the head

TokenPooling = Literal["mean", "first"]
Length = Literal["one", "any"]


def _read_vectors(config: Json, fields: Json, *_: Any) -> Json:
    said = {"length": "any", **config.get(VECTORS, {})}
    most = said.pop("max_tokens", None)
    cuts = most is not None and most < fields["encoder"].seq_len
    return said | ({"max_tokens": most} if cuts else {})


EMBEDDER = Over(
    lambda table: table.body,
    lambda table: {ours: BODY.sub("", theirs) for ours, theirs in table.weights.items()},
    (Derived(_read_vectors),),
)
