"""Taggers in Hugging Face: the table of their encoder, with the layer of scores of its family's
ForTokenClassification in place of the head over its vocabulary."""

from collections.abc import Mapping
from typing import Any

from lmwright.errors import UserError
from lmwright.models import TABLES
from lmwright.models.hf.table import Json

DOCUMENTS, TOKENS = "ForSequenceClassification", "ForTokenClassification"
WEIGHTS = {"classifier.out": "classifier.weight", "classifier.out_bias": "classifier.bias"}


def tagged_encoder(architecture: str) -> str | None:
    """The architecture of a tagger's encoder with its head over the vocabulary; None for one that
    is no tagger's."""
    alone = architecture.replace(TOKENS, DOCUMENTS) if architecture.endswith(TOKENS) else ""
    forms = ((table.classifier, table().architectures[0]) for table in TABLES.values())
    return next((name for form, name in forms if form and form.architecture == alone), None)


class TaggerHf:
    """The Hugging Face form of a tagger."""

    def __init__(self, model: Any):
        table = model.encoder.hf
        self.name = table.name
        self.architecture = table.classifier.architecture.replace(DOCUMENTS, TOKENS)
        self.weights: Mapping[str, str] = {**table.weights, **WEIGHTS}

    def config(self, model: Any) -> Json:
        """config.json of a tagger, tokenizer ids left out. Raises UserError for what it cannot
        say."""
        return model.encoder.hf.config(model.encoder) | {
            "architectures": [self.architecture],
            "id2label": {str(i): label for i, label in enumerate(model.labels)},
            "label2id": {label: i for i, label in enumerate(model.labels)},
        }


def tags_of(config: Json, where: str) -> tuple[str, ...]:
    """The tags of the config.json of a tagger. Raises UserError where they are not numbered from 0,
    or are fewer than two."""
    names = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    numbers = [str(i) for i in range(len(names))]
    if not isinstance(names, Mapping) or sorted(map(str, names)) != sorted(numbers):
        raise UserError(f"{where}: id2label does not number the tags from 0; correct it")
    by_number = {str(number): str(label) for number, label in names.items()}
    labels = tuple(by_number[number] for number in numbers)
    if len(set(labels)) < max(2, len(labels)):
        raise UserError(f"{where}: id2label has fewer than two tags, or one twice; correct it")
    return labels
