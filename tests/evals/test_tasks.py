"""`eval --tasks` against lm-evaluation-harness's own model class, which uses transformers."""

import errno
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.evals import likelihood, shared_contexts, tasks_command
from lmwright.evals.tasks import UNASKED, Score, task_scores
from lmwright.formats.load import load_model
from tests.evals.conftest import sentence

KEPT = {"acc": 0.5, "perplexity": float("inf"), "f1": float("nan")}

evaluator = pytest.importorskip("lm_eval.evaluator")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Choices of one token and of many, and texts that follow."""
    folder, rng = tmp_path_factory.mktemp("tasks"), np.random.default_rng(1)
    choices = [
        {"query": sentence(rng, 15), "gold": int(rng.integers(2)),
         "choices": ["rain", "tap"] if i % 2 else [sentence(rng, 9), sentence(rng, 4)]}
        for i in range(8)
    ]  # fmt: skip
    follows = [{"context": sentence(rng, 20), "continuation": sentence(rng, 3)} for _ in range(4)]
    for name, rows in (("choices", choices), ("follows", follows)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(folder / "choices.jsonl"), str(folder / "follows.jsonl")]


@pytest.fixture(scope="module")
def ours(harness_folder):
    from lmwright.evals.compute import row_compute
    from lmwright.evals.harness_model import HarnessModel

    loaded = load_model(harness_folder)
    return HarnessModel(loaded, loaded.weights, row_compute("fp32"))


@pytest.mark.parametrize("shots", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_questions_are_answered_as_by_transformers(
    harness_folder, files, theirs, shots, monkeypatch
):
    from pathlib import Path

    from lm_eval.tasks import TaskManager

    from lmwright.evals.questions_file import read_questions

    monkeypatch.setattr(shared_contexts, "SHORTEST", 8)
    found_groups, shared = likelihood.shared_of, []

    def shared_of(*args):
        shared.extend(found_groups(*args))
        return found_groups(*args)

    monkeypatch.setattr(likelihood, "shared_of", shared_of)
    for name, nothing in UNASKED.items():  # it looks at the machine for seconds
        monkeypatch.setattr(evaluator, name, nothing)
    # on three devices, each with questions of its own, or on one
    loaded = load_model(harness_folder, num_devices=1 if shots else 3, copies=True)
    found = task_scores(loaded, files, shots=shots, precision="fp32")
    want = evaluator.simple_evaluate(
        model=theirs, tasks=[read_questions(Path(file)) for file in files], num_fewshot=shots,
        bootstrap_iters=0, task_manager=TaskManager(include_defaults=False),
    )  # fmt: skip
    for task, samples in want["samples"].items():
        assert len(samples) == len(found.details["samples"][task]) > 0
        for one, other in zip(samples, found.details["samples"][task], strict=True):
            assert one["prompt_hash"] == other["prompt_hash"]
            for (a,), (b,) in zip(one["resps"], other["resps"], strict=True):
                assert abs(a[0] - b[0]) < 1e-3 and a[1] == b[1]
    for sample in found.details["samples"]["follows"]:
        assert sample["arguments"][0][1] == f" {sample['doc']['continuation']}"
    values = {(s.task, s.metric): s.value for s in found.scores}
    for task, metric in (("choices", "acc"), ("choices", "acc_norm"), ("follows", "acc")):
        assert values[task, metric] == want["results"][task][f"{metric},none"]
    assert {s.shots for s in found.scores} == {shots}
    assert shared  # some contexts were read once


def requests(*args):
    return [SimpleNamespace(args=each) for each in args]


def test_a_whole_text_in_windows_and_an_empty_context(ours, theirs):
    rng = np.random.default_rng(2)
    texts = [(sentence(rng, 8),), (" ".join(sentence(rng, 20) for _ in range(40)),)]
    assert len(ours.tok_encode(texts[1][0])) > 320  # more than the context
    found, want = (m.loglikelihood_rolling(requests(*texts)) for m in (ours, theirs))
    np.testing.assert_allclose(found, want, rtol=1e-5)
    pairs = [("", "rain fell"), (" ".join(sentence(rng, 20) for _ in range(40)), " rain fell")]
    for (a, same), (b, like) in zip(
        ours.loglikelihood(requests(*pairs)), theirs.loglikelihood(requests(*pairs)), strict=True
    ):
        assert abs(a - b) < 1e-3 and same == like


def test_what_is_written_after_a_context(ours, theirs):
    greedy = {"until": ["water", "\n\n"], "max_gen_toks": 12, "do_sample": False}
    asked = requests(
        ("the man", greedy), ("the woman turned on a tap", greedy),
        ("rain", {"until": [], "max_gen_toks": 5}),
    )  # fmt: skip
    assert ours.generate_until(asked) == theirs.generate_until(asked)


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"until": ["Q:", "\n\n"], "do_sample": False, "temperature": 0.0},
        {"until": [], "do_sample": False, "temperature": 1, "max_gen_toks": 128},  # LongBench
        {"until": "\n", "do_sample": True, "temperature": 0.2, "top_p": 0.95, "max_gen_toks": 9},
        {"temperature": 0.7},
        {"max_new_tokens": 7, "do_sample": False},
        {"max_tokens": 6, "max_gen_toks": 5},
        {"max_completion_tokens": 3, "max_new_tokens": 4},
    ],
)
def test_settings_of_a_task_are_those_of_the_harness(wanted):
    """A task that does not sample is greedy, whatever temperature it names."""
    from lm_eval.models.utils import normalize_gen_kwargs

    from lmwright.evals.harness_model import _sampling

    ours, theirs = _sampling(wanted), normalize_gen_kwargs(dict(wanted))
    assert ours.temperature == theirs.get("temperature", 0.0)
    assert (ours.method == "greedy") is (not theirs["do_sample"])
    assert ours.max_new_tokens == theirs["max_gen_toks"] and list(ours.stop) == theirs["until"]
    assert ours.top_p == (wanted.get("top_p") if theirs["do_sample"] else None)


class Letters:
    """A tokenizer whose ids are those of letters."""

    eos_id, bos_id = 0, None

    def encode(self, text, parse_special=False):
        return [ord(letter) - 64 for letter in text]


@pytest.fixture
def bare(monkeypatch):
    """The harness's model of a context of 16 tokens, without weights: it writes its prompt, and
    says of a continuation how many tokens it has."""
    from lmwright.evals import harness_model

    model = object.__new__(harness_model.HarnessModel)
    model._own, model.w, model.compute = Letters(), None, SimpleNamespace(precision="fp32")
    model.loaded = SimpleNamespace(
        model=SimpleNamespace(seq_len=16), prompt_prefix=(0,), end_ids=()
    )  # fmt: skip
    model._tell = lambda **_: None

    def written(_model, _w, _own, prompts, settings, *_, **__):
        said = ["".join(chr(i + 64) for i in prompt) for prompt in prompts]
        return [SimpleNamespace(text=f"{settings.max_new_tokens}:{text}") for text in said]

    monkeypatch.setattr(harness_model, "generate", written)
    monkeypatch.setattr(harness_model, "text_compute", lambda *_: None)
    monkeypatch.setattr(
        harness_model, "log_likelihoods", lambda _m, _w, pairs, *_: [
            (float(len(said)), len(context) + len(said) <= 17) for context, said in pairs],
    )  # fmt: skip
    return model


def test_every_context_gets_its_own_answer(bare):
    """Though they are asked for by their settings and lengths; long ones lose their beginning."""
    long = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    asked = [("AB", 4), (long, 4), ("ABC", 9), ("A", 4), (long, 9), ("", 9)]
    requests = [SimpleNamespace(args=(text, {"max_gen_toks": most})) for text, most in asked]
    wanted = ["4:@AB", f"4:{long[-12:]}", "9:@ABC", "4:@A", f"9:{long[-7:]}", "9:@"]
    assert bare.generate_until(requests) == wanted


def test_every_token_of_a_whole_text_is_scored_once(bare):
    texts = ["A" * size for size in (1, 15, 16, 17, 40, 0)]
    requests = [SimpleNamespace(args=(text,)) for text in texts]
    counts = [len(bare.tok_encode(text)) for text in texts]
    assert bare.loglikelihood_rolling(requests) == counts == [2, 16, 17, 18, 41, 1]


def test_the_command(harness_folder, files, tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["--tasks", files[0], "--limit", "5", "--out", str(out), "--precision", "fp32"]
    assert main(["eval", str(harness_folder), *words]) == 0
    shown = capsys.readouterr().out
    assert "acc_norm" in shown and "choices" in shown and "fp32" in shown
    samples = json.loads(out.read_text())["samples"]["choices"]
    assert len(samples) == 5 and samples[0]["doc"]["choices"]
    assert main(["eval", str(harness_folder), *words]) == 2
    assert "exists; give --out another name" in capsys.readouterr().err
    words[words.index(str(out))] = str(tmp_path / "none" / "out.json")
    assert main(["eval", str(harness_folder), *words]) == 2  # before any question
    assert "none is not a folder; make it, or choose another" in capsys.readouterr().err


def test_a_full_disk_leaves_no_half_of_a_file(harness_folder, files, tmp_path, monkeypatch, capsys):
    """Which the same command, given again, would refuse to replace."""

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "out.json"
    words = ["--tasks", files[1], "--limit", "1", "--out", str(out)]
    monkeypatch.setattr(os, "fsync", full)
    assert main(["eval", str(harness_folder), *words]) == 2
    assert f"{out}: the disk is full; free some space" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_figure_that_nothing_can_draw_is_not_kept():
    scores = [Score("t", name, value, None, 0, 3) for name, value in KEPT.items()]
    [line] = tasks_command._lines(scores, chat=False)
    assert line["scores"] == {"acc": 0.5}


BAD = {
    '{"query": "a", "choices": ["b"], "gold": 0}': ":1: choices: give at least two texts",
    '{"query": "a", "choices": ["b", "c"], "gold": 2}': ":1: gold: 2 is not the number of a choice",
    '{"query": "a", "choices": ["b", ""], "gold": 1}': ":1: a text is empty or no text",
    '{"context": "a"}': ":1: has no 'continuation'; a question has query, choices, gold or",
    '{"query": "a", "choices": ["b", "c"], "gold": 0}\n\n{"context": "a", "continuation": "b"}': (
        ":3: has context and continuation, and the questions before it have query and"
    ),
    "[1]": ":1: is not an object with fields",
    "{": ":1: is not JSON",
    "": ": holds no question",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_questions(line, harness_folder, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    assert main(["eval", str(harness_folder), "--tasks", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path}{BAD[line]}" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tasks", "nowhere.jsonl"], "--tasks: nowhere.jsonl is not there"),
        (["--tasks", ","], "--tasks: names no task"),
        (["--shots", "2"], "--shots needs --tasks"),
        (["--chat"], "--chat needs --tasks"),
        (["--tasks", "a.jsonl", "--text", "b"], "--text: no effect on --tasks"),
        (["--tasks", "a.jsonl", "--needle"], "--by-position and --needle: no effect on --tasks"),
        pytest.param(["--tasks", "arc_eazy"], "has no task 'arc_eazy'", marks=pytest.mark.slow),
    ],
)
def test_other_mistakes(words, says, harness_folder, capsys):
    assert main(["eval", str(harness_folder), *words]) == 2
    assert says in capsys.readouterr().err


def test_more_shots_than_questions(harness_folder, tmp_path, capsys):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"query": "A", "choices": ["x", "y"], "gold": 0}) + "\n")
    assert main(["eval", str(harness_folder), "--tasks", str(path), "--shots", "5"]) == 2
    assert "--shots: more examples than a task has" in capsys.readouterr().err
