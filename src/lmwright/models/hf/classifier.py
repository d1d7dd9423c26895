"""Classifiers in Hugging Face: the table of their encoder, with another head.

EuroBertForSequenceClassification   EuroBertForMaskedLM without lm_head, dense and classifier
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from lmwright.errors import UserError
from lmwright.models.hf.table import Json

ENCODERS = {"EuroBertForSequenceClassification": "EuroBertForMaskedLM"}
"""Architecture of a classifier, and that of its encoder with the head over the vocabulary."""
HEAD_WEIGHTS = {
    "classifier.dense": "dense.weight",
    "classifier.dense_bias": "dense.bias",
    "classifier.out": "classifier.weight",
    "classifier.out_bias": "classifier.bias",
}
Pooling = Literal["bos", "mean", "late"]


class ClassifierHf:
    """The Hugging Face form of a classifier."""

    architectures = tuple(ENCODERS)

    def __init__(self, model: Any):
        self.name = model.encoder.hf.name
        self.weights: Mapping[str, str] = {**model.encoder.hf.weights, **HEAD_WEIGHTS}

    def config(self, model: Any) -> Json:
        """config.json of a classifier, tokenizer ids left out. Raises UserError for what it cannot
        say."""
        config = model.encoder.hf.config(model.encoder)
        whole = {encoder: classifier for classifier, encoder in ENCODERS.items()}
        return config | {
            "architectures": [whole[config["architectures"][0]]],
            "classifier_pooling": model.pooling,
            "id2label": {str(i): label for i, label in enumerate(model.labels)},
            "label2id": {label: i for i, label in enumerate(model.labels)},
            "problem_type": "single_label_classification",
        }


def head_fields(config: Json, where: str) -> Json:
    """`labels` and `pooling` of a classifier's config.json. Raises UserError where they are not
    said, or it does something else than choosing one class."""
    problem = config.get("problem_type")
    if problem not in (None, "single_label_classification"):
        raise UserError(f"{where}: problem_type {problem!r} is not supported, only one class each")
    pooling = config.get("classifier_pooling", "late")
    if pooling not in get_args(Pooling):
        raise UserError(
            f"{where}: classifier_pooling {pooling!r} is not one of {', '.join(get_args(Pooling))}"
        )
    names = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    if not isinstance(names, Mapping) or sorted(map(str, names)) != sorted(
        str(i) for i in range(len(names))
    ):
        raise UserError(f"{where}: id2label does not number the classes from 0; correct it")
    names = {str(number): str(label) for number, label in names.items()}
    labels = tuple(names[str(i)] for i in range(len(names)))
    if len(set(labels)) < max(2, len(labels)):
        raise UserError(f"{where}: id2label has fewer than two classes, or one twice; correct it")
    return {"labels": labels, "pooling": pooling}
