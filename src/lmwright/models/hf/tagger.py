"""Taggers in Hugging Face: the table of their encoder, with the layer of scores of its family's
ForTokenClassification in place of the head over its vocabulary."""

from lmwright.models.hf.over import Over, read_labels, refuse_few, write_labels
from lmwright.models.hf.pairs import Derived, Json

DOCUMENTS, TOKENS = "ForSequenceClassification", "ForTokenClassification"
WEIGHTS = {"classifier.out": "classifier.weight", "classifier.out_bias": "classifier.bias"}


def _read_tags(config: Json, _: Json, where: str) -> Json:
    labels = read_labels(config, "tags", where)
    refuse_few(labels, "tags", where)
    return {"labels": labels}


TAGGER = Over(
    lambda table: table.classifier and table.classifier.architecture.replace(DOCUMENTS, TOKENS),
    lambda table: {**table.weights, **WEIGHTS},
    (Derived(_read_tags, lambda model, *_: write_labels(model.labels)),),
)
