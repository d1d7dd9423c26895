"""Classifiers in Hugging Face: the table of their encoder, with the head of its family over
documents (`Table.classifier`) in place of the one over its vocabulary."""

from collections.abc import Mapping
from typing import Any

from lmwright.errors import UserError
from lmwright.models import TABLES
from lmwright.models.hf.table import Json

PROBLEMS = {"one": "single_label_classification", "any": "multi_label_classification"}
"""What transformers calls how many of the classes a text has."""
IDENTITY = "torch.nn.modules.linear.Identity"


def encoder_of(architecture: str) -> str | None:
    """The architecture of a classifier's encoder with its head over the vocabulary; None for one
    that is no classifier's."""
    forms = ((table.classifier, table().architectures[0]) for table in TABLES.values())
    return next((name for form, name in forms if form and form.architecture == architecture), None)


class ClassifierHf:
    """The Hugging Face form of a classifier."""

    def __init__(self, model: Any):
        table = model.encoder.hf
        self.name, self.form = table.name, table.classifier
        self.weights: Mapping[str, str] = {**table.weights, **self.form.weights}

    def config(self, model: Any) -> Json:
        """config.json of a classifier, tokenizer ids left out. Raises UserError for what it cannot
        say."""
        config = model.encoder.hf.config(model.encoder) | {
            "architectures": [self.form.architecture],
            "classifier_pooling": model.pooling,
            "problem_type": PROBLEMS[model.per_text],
        }
        names = model.labels
        if not names:  # a cross encoder gives the number as it is, not its sigmoid
            names = ("LABEL_0",)
            config["problem_type"] = "regression"
            config["sentence_transformers"] = {"activation_fn": IDENTITY}
        return config | {
            "id2label": {str(i): label for i, label in enumerate(names)},
            "label2id": {label: i for i, label in enumerate(names)},
        }


def head_fields(config: Json, encoder: Any, where: str) -> Json:
    """`labels`, `pooling` and `per_text` of the config.json of a classifier with this encoder.
    Raises UserError where they are not said, or it does something else than choosing classes or
    giving a number."""
    problem = config.get("problem_type")
    if problem not in (None, *PROBLEMS.values(), "regression"):
        raise UserError(
            f"{where}: problem_type {problem!r} is not supported, only classes or one number each"
        )
    pooling, known = config.get("classifier_pooling"), encoder.document_head.poolings
    pooling = encoder.hf.classifier.pooling if pooling is None else pooling
    if pooling not in known:
        raise UserError(f"{where}: classifier_pooling {pooling!r} is not one of {', '.join(known)}")
    names = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    if not isinstance(names, Mapping) or sorted(map(str, names)) != sorted(
        str(i) for i in range(len(names))
    ):
        raise UserError(f"{where}: id2label does not number the classes from 0; correct it")
    names = {str(number): str(label) for number, label in names.items()}
    labels = tuple(names[str(i)] for i in range(len(names)))
    if problem == PROBLEMS["any"]:
        if len(set(labels)) < len(labels):
            raise UserError(f"{where}: id2label has a class twice; correct it")
        return {"labels": labels, "pooling": pooling, "per_text": "any"}
    if len(labels) == 1 and problem != "single_label_classification":  # as transformers takes it
        return {"labels": (), "pooling": pooling}
    if problem == "regression":
        raise UserError(f"{where}: gives {len(labels)} numbers, and only one is supported")
    if len(set(labels)) < max(2, len(labels)):
        raise UserError(f"{where}: id2label has fewer than two classes, or one twice; correct it")
    return {"labels": labels, "pooling": pooling}
