"""A model that answers questions, from a run to transformers."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
import tokenizers

from lmwright.cli.main import main
from lmwright.config.run import Tokenize
from lmwright.data.prepare import prepare
from lmwright.data.tokens.answers import Windows, document_of, in_windows
from lmwright.evals.held_out import eval_command, open_held_out
from lmwright.evals.squad import scores_of
from lmwright.formats.convert import export_command
from lmwright.formats.load import load_model
from lmwright.formats.open import open_origin
from lmwright.formats.weights import fresh_weights
from lmwright.models.answerer import Answerer
from lmwright.models.deberta import Deberta
from lmwright.models.heads import HEAD
from lmwright.models.modernbert import ModernBert
from lmwright.objectives.regress import Regress
from lmwright.program.plan import resolve
from tests.answered_run import ANSWER, ROWS, answered_run
from tests.labeled_run import SEQ_LEN, SIZES
from tests.saved_run import save_run

HELD = ROWS[-10:]
DENSE = SIZES | {"mlp_dim": 24, "num_kv_heads": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with random weights, in which a token stands before a question and not its context."""
    run = answered_run(tmp_path_factory.mktemp("answers"), ModernBert(**DENSE))
    run = replace(run, data=replace(run.data, tokenize=Tokenize(prepend="bos")))
    prepare(run.data, SEQ_LEN, windows=ANSWER.windows)
    save_run(run, steps=(1,), std=0.3)  # larger ones saturate attention, and rounding grows
    return run


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "model"
    return out, export_command(run.dir, out)


@pytest.fixture(scope="module")
def by_transformers(exported):
    """(answer, its score, that of none) of each held-out question by the export: its tokenizer
    cuts windows, and each of them is alone; spans are tried one by one."""
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    out, _ = exported
    theirs = transformers.AutoModelForQuestionAnswering.from_pretrained(out).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    made = []
    for row in HELD:
        windows = tokenizer(
            row["question"], row["context"], truncation="only_second", max_length=32, stride=6,
            return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        best, none = (0.0, ""), 1.0
        for number, ids in enumerate(windows["input_ids"]):
            with torch.no_grad():
                scores = theirs(input_ids=torch.tensor([ids]))
            sides = windows.sequence_ids(number)
            kept = [0, *(place for place, side in enumerate(sides) if side == 1)]
            start, end = (
                logits[0, kept].softmax(-1).tolist()
                for logits in (scores.start_logits, scores.end_logits)
            )
            none = min(none, start[0] * end[0])
            places = [windows["offset_mapping"][number][place] for place in kept]
            for a in range(1, len(kept)):
                for b in range(a, min(len(kept), a + ANSWER.max_answer_tokens)):
                    text = row["context"][places[a][0] : places[b][1]].strip()
                    best = max(best, (start[a] * end[b], text))
        made.append((best[1], best[0], none))
    return made


@pytest.mark.parametrize("kind", ["modernbert", pytest.param("deberta", marks=pytest.mark.slow)])
def test_the_export_opens_in_transformers(kind, exported, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    out, proof = exported
    if kind == "deberta":
        other = answered_run(tmp_path, Deberta(**DENSE, position_buckets=8, max_distance=24))
        save_run(other, steps=(1,), std=0.3)
        out = tmp_path / "out"
        proof = export_command(other.dir, out)
    there = proof.folder_to_transformers
    assert there.max_abs_diff <= 1e-5 * there.max_abs_logit
    assert proof.source_to_folder.max_abs_diff == 0
    theirs = transformers.AutoModelForQuestionAnswering.from_pretrained(out)
    assert theirs.config.architectures == [type(theirs).__name__]
    card = (out / "README.md").read_text()
    assert "pipeline_tag: question-answering" in card
    assert "AutoModelForQuestionAnswering.from_pretrained" in card
    loaded = load_model(str(out))
    assert isinstance(loaded.model, Answerer)
    assert (loaded.model.window_tokens, loaded.model.window_overlap) == ANSWER.windows


def test_a_run_goes_on_with_the_layer_of_scores_of_its_start(run, exported):
    """Of a run, and of a folder; a head for another purpose starts fresh."""
    plan, folder = resolve(run, jax.devices()[:1]), str(exported[0])
    assert [fresh_weights(plan, open_origin(place, run.model)) for place in (run.dir, folder)] == [
        (), (),
    ]  # fmt: skip
    numbers = resolve(replace(run, objective=Regress()), jax.devices()[:1])
    for place in (run.dir, folder):
        assert fresh_weights(numbers, open_origin(place, run.model)) == (HEAD,)


def test_the_exported_tokenizer_joins_a_question_and_its_context_as_in_training(exported):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(exported[0])
    ours = load_model(str(exported[0])).tokenizer
    around = (ours.bos_id,), (ours.eos_id,)
    for row in HELD:
        pair = row["question"], row["context"]
        made = in_windows(ours, *([text] for text in pair), Windows(*ANSWER.windows), around)[0]
        found = theirs(*pair, truncation="only_second", max_length=32, stride=6,
                       return_overflowing_tokens=True)["input_ids"]  # fmt: skip
        assert [document_of(made, begin, around)[0] for begin in made.starts] == found


def test_windows_are_joined_as_the_tokenizers_own_file_joins_pairs(exported):
    """Of RoBERTa's form, with two ends between a question and its context; a run that begins texts
    otherwise has one."""
    transformers = pytest.importorskip("transformers")
    ours = load_model(str(exported[0])).tokenizer
    backend = tokenizers.Tokenizer.from_str(ours.backend.to_str())
    ends = [(token, backend.token_to_id(token)) for token in (ours.eos, ours.bos)]
    backend.post_processor = tokenizers.processors.RobertaProcessing(*ends, add_prefix_space=False)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=ours.eos)
    ours, windows = replace(ours, backend=backend), Windows(*ANSWER.windows)
    around = (ours.bos_id,), (ours.eos_id,)
    for row in HELD:
        pair = row["question"], row["context"]
        made = in_windows(ours, *([text] for text in pair), windows, around)[0]
        found = theirs(*pair, truncation="only_second", max_length=32, stride=6,
                       return_overflowing_tokens=True)["input_ids"]  # fmt: skip
        assert made.between == (ours.eos_id,) * 2
        assert [document_of(made, begin, around)[0] for begin in made.starts] == found
    (other,) = in_windows(ours, ["Who?"], ["Ada."], windows, ((), around[1]))
    assert other.between == around[1]


def test_eval_scores_the_held_out_questions(run, by_transformers, capsys):
    opened = open_held_out(run.dir, precision="fp32")
    (loss,) = opened.held_out.losses(opened.weights)
    assert loss.tokens == len(HELD) and np.isfinite(loss.loss)
    scores = np.mean(
        [
            scores_of("" if none > score else text, row["answers"]["text"])
            for (text, score, none), row in zip(by_transformers, HELD, strict=True)
        ],
        axis=0,
    )
    assert [loss.scores["exact_match"], loss.scores["answer_f1"]] == pytest.approx(scores.tolist())
    assert eval_command(run.dir, precision="fp32") == 0
    assert "exact match" in capsys.readouterr().out


def test_predict_answers_as_transformers_does(run, exported, by_transformers, tmp_path, capsys):
    """From the run and from its export, with the scores of known answers."""
    questions, out = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in HELD))
    for model in (run.dir, str(exported[0])):
        words = [model, str(questions), "--out", str(out), "--overwrite", "--precision", "fp32"]
        assert main(["predict", *words, "--id-column", "id", "--label-column", "answers"]) == 0
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert [line["id"] for line in lines] == [row["id"] for row in HELD]
        sums = np.zeros(2)
        for line, row, (text, score, none) in zip(lines, HELD, by_transformers, strict=True):
            assert line["no_answer"] == pytest.approx(none, rel=1e-4)
            wanted = ("", none) if none > score else (text, score)
            assert (line["answer"], line["score"]) == (
                wanted[0],
                pytest.approx(wanted[1], rel=1e-4),
            )
            if line["answer"]:
                assert row["context"][line["start"] : line["end"]] == line["answer"]
            else:
                assert line["start"] is line["end"] is None and line["others"][0]["answer"] == text
            assert line["expected"] == row["answers"]["text"]
            sums += scores_of(line["answer"], row["answers"]["text"])
        printed = capsys.readouterr().out
        exact, f1 = (100 * sums / len(HELD)).tolist()
        assert f"{exact:.2f}" in printed and f"{f1:.2f}" in printed and "farthest: q5" in printed


@pytest.mark.parametrize("question, context", [("", "Ada slept."), ("Who?", ""), ("", "")])
def test_predict_of_hardly_any_words(question, context, exported, tmp_path, capsys):
    row = {"asked": question, "text": context}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    words = [str(exported[0]), str(tmp_path / "rows.jsonl"), "--text-column", "asked"]
    assert main(["predict", *words, "--pair-column", "text"]) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()
               if line.startswith("{")]  # fmt: skip
    assert line["answer"] in context and (line["answer"] == "" or line["score"] > 0)


def test_predict_of_rows_without_what_it_needs(exported, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "Who?", "context": "Ada.", "answers": 3}) + "\n")
    assert main(["predict", str(exported[0]), str(rows), "--label-column", "answers"]) == 2
    error = capsys.readouterr().err
    assert "rows.jsonl:1: 'answers' is not an object" in error and error.count("\n") == 1
    rows.write_text('{"question": "Who?"}\n{"context": "Ada."}\n')
    assert main(["predict", str(exported[0]), str(rows)]) == 0
    shown = capsys.readouterr()
    errors = [json.loads(line)["error"] for line in shown.out.splitlines()]
    assert errors[0].startswith("no text in 'context'") and "no 'question'" in errors[1]
    assert "2 rows without a text" in shown.err
    rows.write_text('{"question": "Who?", "context": 3, "key": "k"}\n')
    assert main(["predict", str(exported[0]), str(rows), "--id-column", "key"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "k"
    unknown = {"question": "Who?", "context": "Ada."}
    known = [unknown, unknown | {"answers": None}, unknown | {"answers": []}]
    rows.write_text("".join(json.dumps(row) + "\n" for row in known))
    assert main(["predict", str(exported[0]), str(rows), "--label-column", "answers"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["expected" in line for line in lines] == [False, False, True]
    (tmp_path / "rows.txt").write_text("Who?\n")
    assert main(["predict", str(exported[0]), str(tmp_path / "rows.txt")]) == 2
    assert "a question stands beside its context; give csv" in capsys.readouterr().err
