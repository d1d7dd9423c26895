"""`lmwright plan` of a preset or a Hugging Face folder, without a run file."""

import json
import re
from types import SimpleNamespace

import pytest

from lmwright.cli.main import main
from lmwright.planner import compare

SIZES = dict(
    vocab_size=1000, hidden_size=96, intermediate_size=320, num_hidden_layers=3,
    num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=640,
)  # fmt: skip


def answer(capsys, *words):
    """(exit code, plan.json, what was chosen) of a plan by arithmetic."""
    code = main(["plan", *words, "--quick", "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_a_preset_gets_the_most_rows_that_fit(capsys):
    code, found, notes = answer(capsys, "llama-1b", "--on", "v5e-8")
    assert code == 0 and found["fits"] and found["num_params"] == 1_235_814_400
    rows, every = map(int, re.search(r"(\d+) rows a chip, (\d+) in all", notes).groups())
    assert every == 8 * rows and rows.bit_count() == 1
    assert found["tokens_per_step"] == every * 8192 and "rows of 8,192 tokens" in notes
    assert "recipe pretrain" in notes and "by --quick" in notes
    assert f"{found['takes']['steps']:,} steps" in notes
    assert found["takes"]["tokens"] == pytest.approx(20 * found["num_params"], rel=0.01)
    twice = answer(capsys, "llama-1b", "--on", "v5e-8", f"train.global_batch_size={2 * every}")
    assert twice[0] == 1 and not twice[1]["fits"]


def test_a_hugging_face_folder_of_a_config_alone(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    code, found, notes = answer(capsys, str(tmp_path), "--on", "v5e-4")
    assert code == 0 and found["num_params"] == theirs.num_parameters()
    assert "rows of 640 tokens (the model's own length)" in notes


def test_the_command_line_changes_what_was_chosen(capsys):
    words = ["data.pack.seq_len=128", "train.global_batch_size=24", "train.steps=700",
             "model.num_layers=2", "optim.kind=muon", "optim.learning_rate=1e-3"]  # fmt: skip
    code, found, notes = answer(capsys, "llama-5m", "--on", "v5e-8", *words)
    assert code == 0 and found["tokens_per_step"] == 24 * 128 and found["takes"]["steps"] == 700
    assert "rows of 128 tokens (as said)" in notes and " a chip" not in notes
    assert "tokens a parameter" not in notes


def test_rows_divide_into_the_microbatches_that_are_asked_for(capsys):
    code, found, notes = answer(capsys, "llama-5m", "--on", "v5e-8", "train.num_microbatches=6")
    assert code == 0 and found["fits"] and "the largest 3 x 2^n that fits" in notes
    assert int(re.search(r"(\d+) rows a chip", notes).group(1)) % 6 == 0


def test_one_row_a_chip_that_does_not_fit_is_said(capsys):
    code, _, notes = answer(capsys, "llama-70b", "--on", "v5e-8")
    assert code == 1 and "1 row a chip, 8 in all (which do not fit)" in notes


def test_machines_are_compared_at_one_batch(capsys, monkeypatch):
    monkeypatch.setattr("lmwright.planner.compare.COMMON", ("v4-8", "v5e-16"))
    code, found, notes = answer(capsys, "llama-1b", "--on", "any")
    assert code == 0 and [row["fits"] for row in found["machines"]] == [True, True]
    assert {row["takes"]["tokens"] for row in found["machines"]} == {
        found["machines"][0]["takes"]["tokens"]
    }
    assert "the same on every machine" in notes


@pytest.mark.parametrize("name", ["llama-1c", "nowhere", "nowhere/folder"])
def test_what_is_neither_is_refused(name, capsys):
    assert main(["plan", name, "--on", "v5e-8", "--quick"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "neither a run file, a preset nor" in err


def test_overrides_of_a_model_alone(capsys):
    code, found, notes = answer(
        capsys, "llama-1b", "plan.on=v5e-8", "model.vocab_size=50000", "recipe=sft",
        "limits.total_hours=5",
    )  # fmt: skip
    assert code == 0 and found["slice"] == "v5e-8" and "so recipe sft, " in notes
    assert found["num_params"] == 1_235_814_400 - (128_256 - 50_000) * 2048
    assert found["takes"]["total_hours"] == 5
    assert main(["plan", "llama-1b", "--on", "v5e-8", "--quick", "limits.total_hours=5"]) == 0
    told = re.search(r"limits.total_hours = 5: about (\S+) of (\S+) steps", capsys.readouterr().out)
    done, steps = (int(number.replace(",", "")) for number in told.groups())
    assert done < steps
    assert main(["plan", "llama-1b", "--on", "v5e-8", "--quick", "depth=12"]) == 2
    assert "depth and llama-1b both choose the model" in capsys.readouterr().err


def test_machines_come_by_price_then_those_without_one_by_time_then_those_that_are_too_small(
    monkeypatch,
):
    def choice(name, fits=True, usd=None, hours=1.0):
        best = SimpleNamespace(quick=SimpleNamespace(fits=fits))
        return compare.Choice(name, best, SimpleNamespace(usd=usd, hours=hours))

    table = [
        choice("small", fits=False, usd=1.0), choice("slow", hours=9.0), choice("dear", usd=30.0),
        compare.Choice("none", None, None), choice("cheap", usd=2.0, hours=99.0),
        choice("fast", hours=3.0),
    ]  # fmt: skip
    there = {each.name: each for each in table}
    monkeypatch.setattr(compare, "_choice", lambda run, name, hours, price: there[name])
    found = [each.name for each in compare.compare(None, names=list(there))]
    assert found == ["cheap", "dear", "fast", "slow", "small", "none"]
