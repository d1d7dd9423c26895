"""Answerers in Hugging Face: the table of their encoder, with the layer of scores of its family's
ForQuestionAnswering in place of the head over its vocabulary.

How windows are cut and answers chosen is in config.json where pipelines keep such settings, under
`task_specific_params`.
"""

from collections.abc import Mapping
from typing import Any

from lmwright.errors import UserError
from lmwright.models import TABLES
from lmwright.models.hf.table import Json

DOCUMENTS, ANSWERS = "ForSequenceClassification", "ForQuestionAnswering"
OUT = {
    "ModernBertForQuestionAnswering": "classifier",
    "DebertaV2ForQuestionAnswering": "qa_outputs",
}
"""Names of the layer of scores, by architecture."""
TASK = "question-answering"
USUAL = {"max_seq_len": 384, "doc_stride": 128, "max_answer_len": 30}
"""Where config.json is silent, as in transformers' example for SQuAD."""


def architecture_of(table: Any) -> str:
    """The architecture of the answerer over an encoder with this table; it may not exist."""
    return table.classifier.architecture.replace(DOCUMENTS, ANSWERS)


def answering_encoder(architecture: str) -> str | None:
    """The architecture of an answerer's encoder with its head over the vocabulary; None for one
    that is no answerer's."""
    if architecture not in OUT:
        return None
    tables = (table for table in TABLES.values() if table.classifier)
    return next(t().architectures[0] for t in tables if architecture_of(t) == architecture)


class AnswererHf:
    """The Hugging Face form of an answerer."""

    def __init__(self, model: Any):
        table = model.encoder.hf
        self.name, self.architecture = table.name, architecture_of(table)
        out = OUT[self.architecture]
        own = {"classifier.out": f"{out}.weight", "classifier.out_bias": f"{out}.bias"}
        self.weights: Mapping[str, str] = {**table.weights, **own}

    def config(self, model: Any) -> Json:
        """config.json of an answerer, tokenizer ids left out. Raises UserError for what it cannot
        say."""
        settings = {
            "max_seq_len": model.window_tokens,
            "doc_stride": model.window_overlap,
            "max_answer_len": model.max_answer_tokens,
            "handle_impossible_answer": model.no_answer == "allowed",
        }
        return model.encoder.hf.config(model.encoder) | {
            "architectures": [self.architecture],
            "task_specific_params": {TASK: settings},
        }


def answer_fields(config: Json, encoder: Any, where: str) -> Json:
    """Settings of the config.json of an answerer with this encoder. Raises UserError for ones that
    are no numbers, or leave windows no room."""
    said = (config.get("task_specific_params") or {}).get(TASK) or {}
    numbers = {name: said.get(name, usual) for name, usual in USUAL.items()}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (name != "doc_stride"):
            raise UserError(f"{where}: {TASK} has {name} = {value!r}; correct it")
    window = min(numbers["max_seq_len"], encoder.seq_len)
    return {
        "window_tokens": window,
        "window_overlap": min(numbers["doc_stride"], max(0, (window - 4) // 2)),
        "max_answer_tokens": numbers["max_answer_len"],
        "no_answer": "allowed" if said.get("handle_impossible_answer", True) else "never",
    }
