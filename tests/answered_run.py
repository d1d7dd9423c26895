"""A run over questions with their contexts, some longer than a window, whose data is prepared."""

from pathlib import Path

from lmwright.config.run import Run
from lmwright.objectives.answer_spans import Answer
from tests.labeled_run import prepared_run

ANSWER = Answer(window_tokens=32, window_overlap=6, max_answer_tokens=5)
PETS = ("cat", "d\u00f6g", "big chow-chow", "\U0001f408")


def question(i: int) -> dict:
    """A row in the columns of Hugging Face's copies of SQuAD; every fifth has no answer, and others
    may have two."""
    pet, filler = PETS[i % 4], " It sat on mats, by itself." * (i % 7)
    context = f"Number {i} was quiet.{filler} Then the {pet} slept in house {i * 37 % 100}."
    texts = [pet, f"the {pet}"][: 1 + i % 2] if i % 5 else []
    starts = [context.index(f" {text} slept") + 1 for text in texts]
    return {
        "id": f"q{i}",
        "question": "Who slept?" if i % 3 else f"Which one slept in house {i * 37 % 100}?",
        "context": context,
        "answers": {"text": texts, "answer_start": starts},
    }


ROWS = [question(i) for i in range(60)]


def answered_run(root: Path, model, rows=ROWS, objective=ANSWER, **source) -> Run:
    """A run over `ROWS` in `root`; nothing is trained, and the last ten are held out."""
    source = {"id_column": "id", **source}
    return prepared_run(root, model, objective, rows, rows="answered", **source)
