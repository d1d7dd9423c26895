"""Held-out questions in packed rows: scores that say the right tokens give the right answers."""

import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.data.tokens.around import ids_around
from lmwright.data.tokens.tokenizer_formats import import_tokenizer
from lmwright.evals.answered import AnswerRowTally, _batches, some_of
from lmwright.objectives.answer_spans import Answer, Spans

WORDS = [f"{'abcdefghij'[i % 10]}{i}" for i in range(70)]


def question(text, answer):
    """One about WORDS, with the words `answer` as its answer; None without one."""
    context = " ".join(WORDS)
    if answer is None:
        return {"question": text, "context": context, "answers": [], "starts": []}
    said = " ".join(WORDS[answer[0] : answer[1]])
    return {"question": text, "context": context, "answers": [said],
            "starts": [context.index(said)]}  # fmt: skip


QUESTIONS = [
    question("which?", (40, 42)),
    question("what of all these words is the one that is asked for?", (3, 4)),
    question("is there any other?", None),
    question("and at the end?", (67, 70)),
]


@pytest.fixture
def tally(shared_data):
    """A tally of QUESTIONS, and its batches of two rows of 64 tokens."""
    tokenizer = import_tokenizer(str(shared_data / "tokenizers" / "bert_uncased"))
    tally = AnswerRowTally(Answer(window_tokens=48, window_overlap=12, max_answer_tokens=12))
    tally.questions = QUESTIONS
    documents, marks = tally._documents(tokenizer, ids_around(tokenizer))
    assert len(documents) > 3 * len(QUESTIONS) and len({*tally.heads}) == 3
    return tally, list(_batches(documents, marks, 2, 64))


def told(batch):
    """Logits that are high where the marks of training say that an answer starts and ends."""
    bits = batch["loss_weight"].astype(int)
    chosen = np.stack([bits & 1, bits >> 1 & 1], axis=-1)
    return Spans(jnp.asarray(20.0 * chosen), *map(jnp.asarray, (6.0, 2.0, 1.0, 0.0)), {})


def test_the_right_tokens_give_the_right_answers(tally):
    """Of all windows of a question: one has the answer, others, which say that they have none, are
    as sure."""
    tally, batches = tally
    assert len(batches) > 2
    for batch in batches:
        tally.add(batch, told(batch))
    loss = tally.loss("x")
    assert loss.scores == {"exact_match": 1.0, "answer_f1": 1.0}
    assert (loss.loss, loss.tokens) == (3.0, len(QUESTIONS))  # of windows, of questions


def test_wrong_answers_are_counted_by_squads_rules(tally):
    """Two of the three words of the last one, and an answer where there is none."""
    tally, batches = tally
    for batch in batches:
        tally.add(batch, told(batch))
    shorter = QUESTIONS[3] | {"answers": [" ".join(WORDS[66:70])]}
    tally.questions = [*QUESTIONS[:2], QUESTIONS[2] | {"answers": ["dog"]}, shorter]
    f1 = 2 * 3 / (3 + 4)
    wanted = {"exact_match": 2 / 4, "answer_f1": (2 + f1) / 4}
    assert tally.loss("x").scores == pytest.approx(wanted)


def test_a_share_of_the_questions_is_never_none():
    numbers = list(range(10))
    assert some_of(numbers, 40, None) == some_of(numbers, 40, 40) == numbers
    assert len(some_of(numbers, 40, 1)) == 1 and len(some_of(numbers, 40, 5)) == 2
    assert len(some_of(numbers, 40, 20)) == 5 and some_of(numbers, 2, 9) == numbers
