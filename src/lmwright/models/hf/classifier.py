"""Classifiers in Hugging Face: the table of their encoder, with the head of its family over
documents (`Table.classifier`) in place of the one over its vocabulary."""

from typing import Any

from lmwright.errors import UserError
from lmwright.models.hf.over import Over, read_labels, refuse_few, write_labels
from lmwright.models.hf.pairs import Derived, Json

PROBLEMS = {"one": "single_label_classification", "any": "multi_label_classification"}
"""transformers' words for how many of the classes a text has."""
IDENTITY = "torch.nn.modules.linear.Identity"


def _read_head(config: Json, fields: Json, where: str) -> Json:
    """`labels`, `pooling` and `per_text`. Raises UserError where they are not said, or it does
    something else than choosing classes or giving a number."""
    encoder, problem = fields["encoder"], config.get("problem_type")
    if problem not in (None, *PROBLEMS.values(), "regression"):
        raise UserError(
            f"{where}: problem_type {problem!r} is not supported, only classes or one number each"
        )
    pooling, known = config.get("classifier_pooling"), encoder.document_head.poolings
    pooling = encoder.hf.classifier.pooling if pooling is None else pooling
    if pooling not in known:
        raise UserError(f"{where}: classifier_pooling {pooling!r} is not one of {', '.join(known)}")
    labels = read_labels(config, "classes", where)
    if problem == PROBLEMS["any"]:
        if len(set(labels)) < len(labels):
            raise UserError(f"{where}: id2label has a class twice; correct it")
        return {"labels": labels, "pooling": pooling, "per_text": "any"}
    if len(labels) == 1 and problem != "single_label_classification":  # as transformers takes it
        return {"labels": (), "pooling": pooling}
    if problem == "regression":
        raise UserError(f"{where}: gives {len(labels)} numbers, and only one is supported")
    refuse_few(labels, "classes", where)
    return {"labels": labels, "pooling": pooling}


def _write_head(model: Any, *_: str) -> Json:
    config = {"classifier_pooling": model.pooling, "problem_type": PROBLEMS[model.per_text]}
    if model.labels:
        return config | write_labels(model.labels)
    # a cross encoder gives the number as it is, not its sigmoid
    number = {"problem_type": "regression", "sentence_transformers": {"activation_fn": IDENTITY}}
    return config | number | write_labels(("LABEL_0",))


CLASSIFIER = Over(
    lambda table: table.classifier and table.classifier.architecture,
    lambda table: {**table.weights, **table.classifier.weights},
    (Derived(_read_head, _write_head),),
)
