"""Answerers in Hugging Face: the table of their encoder, with the layer of scores of its family's
ForQuestionAnswering in place of the head over its vocabulary.

How windows are cut and answers chosen is in config.json where pipelines keep such settings, under
`task_specific_params`.
"""

from typing import Any

from lmwright.errors import UserError
from lmwright.models.hf.over import Over
from lmwright.models.hf.pairs import Derived, Json

DOCUMENTS, ANSWERS = "ForSequenceClassification", "ForQuestionAnswering"
TASK = "question-answering"
USUAL = {"max_seq_len": 384, "doc_stride": 128, "max_answer_len": 30}
"""Settings where config.json has none, as in transformers' example for SQuAD."""


def _read_settings(config: Json, fields: Json, where: str) -> Json:
    """Settings. Raises UserError for ones that are no numbers, or leave windows no room."""
    said = (config.get("task_specific_params") or {}).get(TASK) or {}
    numbers = {name: said.get(name, usual) for name, usual in USUAL.items()}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (name != "doc_stride"):
            raise UserError(f"{where}: {TASK} has {name} = {value!r}; correct it")
    window = min(numbers["max_seq_len"], fields["encoder"].seq_len)
    return {
        "window_tokens": window,
        "window_overlap": min(numbers["doc_stride"], max(0, (window - 4) // 2)),
        "max_answer_tokens": numbers["max_answer_len"],
        "no_answer": "allowed" if said.get("handle_impossible_answer", True) else "never",
    }


def _write_settings(model: Any, *_: str) -> Json:
    settings = {
        "max_seq_len": model.window_tokens,
        "doc_stride": model.window_overlap,
        "max_answer_len": model.max_answer_tokens,
        "handle_impossible_answer": model.no_answer == "allowed",
    }
    return {"task_specific_params": {TASK: settings}}


ANSWERER = Over(
    lambda table: table.answers and table.classifier.architecture.replace(DOCUMENTS, ANSWERS),
    lambda table: {
        **table.weights,
        "classifier.out": f"{table.answers}.weight",
        "classifier.out_bias": f"{table.answers}.bias",
    },
    (Derived(_read_settings, _write_settings),),
)
