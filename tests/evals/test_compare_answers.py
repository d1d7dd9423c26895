"""Two models' answers to the same questions."""

import json
import math

import numpy as np
import pytest

from lmwright.api import compare_tasks
from lmwright.cli.main import main
from lmwright.evals.answers import right_bits
from lmwright.evals.compare_answers import compare_answers, difference_of


def test_students_sleep():
    """Gosset's data (Biometrika 1908); R's t.test(paired = TRUE) gives these figures."""
    first = np.array([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0])
    second = np.array([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])
    found = difference_of("sleep", "hours", second, first)
    assert found.difference == pytest.approx(-1.58)
    assert found.p == pytest.approx(0.002833, abs=1e-6)
    assert (found.low, found.high) == pytest.approx((-2.4598858, -0.7001142), abs=1e-7)


@pytest.mark.parametrize(("better", "worse"), [(9, 2), (3, 3), (0, 6), (1, 0), (0, 0)])
def test_right_and_wrong_answers_by_mcnemar(better, worse):
    before = np.array([0.0] * better + [1.0] * worse + [1.0] * 5 + [0.0] * 7)
    after = np.array([1.0] * better + [0.0] * worse + [1.0] * 5 + [0.0] * 7)
    changed = better + worse
    tail = sum(math.comb(changed, k) for k in range(min(better, worse) + 1)) / 2**changed
    assert difference_of("t", "acc", before, after).p == pytest.approx(min(1.0, 2 * tail))


def test_the_interval_holds_the_difference_as_often_as_it_says():
    rng, inside = np.random.default_rng(0), 0
    for _ in range(2000):
        hard = rng.random(150)  # questions that both find hard
        before, after = (rng.random(150) < share - 0.5 * hard for share in (0.8, 0.9))
        found = difference_of("t", "acc", before.astype(float), after.astype(float))
        inside += found.low <= 0.1 <= found.high
    assert 0.93 < inside / 2000 < 0.97


def answers(values, prompt="p", **more):
    """What the harness writes of questions, of which some are right."""
    samples = [
        {"doc_hash": str(i), "prompt_hash": f"{prompt}{i}", "filter": "none", "metrics": ["acc"],
         "acc": value, "target": 1, "arguments": [["q", " no"], ["q", " yes"]],
         "resps": [[[-3.0, False]], [[-2.0 - value, True]]]}
        for i, value in enumerate(values)
    ]  # fmt: skip
    mean = sum(values) / len(values)
    return {"samples": {"t": samples}, "results": {"t": {"acc,none": mean, "alias": "t"}}, **more}


def test_questions_are_matched_by_their_content():
    one, other = answers([1, 0, 0, 1, 0]), answers([0, 1, 1, 1], prompt="chat")
    other["samples"]["t"].reverse()
    found = compare_answers(one, other)
    acc = next(each for each in found.differences if each.metric == "acc")
    assert (acc.before, acc.value, acc.questions) == (0.5, 0.75, 4)
    assert found.notes == (
        "t: 4 questions are in both, of 4 and 5",
        "t: prompts differ, by shots or a chat template",
    )
    bits = next(each for each in found.differences if each.metric == "bits_per_byte")
    assert bits.before == pytest.approx(2.5 / math.log(2) / len(" yes"))


def test_a_figure_that_is_no_mean_is_left_out():
    one, other = answers([1, 0]), answers([1, 1])
    other["results"]["t"]["acc,none"] = math.exp(1.0)  # of a perplexity, say
    for pair in ((one, other), (other, one)):
        metrics = {each.metric for each in compare_answers(*pair).differences}
        assert metrics == {"bits_per_byte"}


@pytest.mark.parametrize(
    ("sample", "bits"),
    [
        ({"target": "yes"}, 2 / math.log(2) / 4),
        ({"target": "maybe"}, None),
        ({"target": 2}, None),
        ({"arguments": [["q", {"until": []}]], "resps": [["an answer"]]}, None),
    ],
)
def test_bits_of_the_right_answer(sample, bits):
    asked = answers([0])["samples"]["t"][0] | sample
    assert right_bits(asked) == (None if bits is None else pytest.approx(bits))


def test_the_command_on_two_files(tmp_path, capsys):
    one, other, third = (tmp_path / f"{name}.json" for name in ("one", "other", "third"))
    one.write_text(json.dumps(answers([1] * 8 + [0] * 8)))
    other.write_text(json.dumps(answers([0] * 8 + [0] * 8)))
    third.write_text('{"samples": {"u": []}}')
    assert main(["eval", str(one), "--against", str(other)]) == 0
    assert "+0.5000" in capsys.readouterr().out
    assert compare_tasks(other, one).differences[0].difference == 0.5
    for words, says in (
        ([str(one), "--against", str(third)], "the models have no question in common"),
        ([str(one), "--against", "nowhere.json"], "nowhere.json: is not there"),
        (["runs/x", "--against", str(one)], "give --tasks as well, or a file"),
        ([str(one), "--against", str(other), "--shots", "1"], "--shots needs --tasks"),
        ([str(one), "--against", str(other), "--max-rows", "1"], "no effect on --against"),
        ([str(one), "--against", str(other), "--adapter", "a"], "no effect on --against"),
        ([str(one), "--against", __file__], "no answers to benchmarks"),
    ):
        assert main(["eval", *words]) == 2
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1
