"""Needle in a haystack: prompts, counts, and generation with a model that copies."""

import json
import re
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.data.tokens.tokenizer_formats import import_tokenizer
from lmwright.errors import UserError
from lmwright.evals import decoding
from lmwright.evals.needle import (
    Hay,
    answer_greedily,
    default_lengths,
    find_needles,
    is_found,
    make_prompt,
)
from lmwright.formats.load import load_model

SAID = re.compile(r"The secret number is (\d+)")


@pytest.fixture(scope="module")
def hay(shared_data):
    tokenizer = import_tokenizer(str(shared_data / "tokenizers" / "gpt2"))
    text = " ".join(f"The cat {i} sat on a mat. It slept, and then it ate." for i in range(200))
    return Hay(tokenizer, np.asarray(tokenizer.encode(text)), (50256,))


@pytest.mark.parametrize("depth", [0, 37.5, 100])
@pytest.mark.parametrize("length", [64, 300, 6000])
def test_prompts(hay, length, depth):
    """The needle stands once, at its depth, at the end of a sentence where one is near."""
    prompt = make_prompt(hay, length, depth, np.random.default_rng(0))
    assert len(prompt.ids) + prompt.answer_tokens == length and prompt.ids[0] == 50256
    text = hay.tokenizer.decode(prompt.ids[1:])
    assert text.endswith("\nThe secret number is")
    [match] = SAID.finditer(text)
    assert match[1] == prompt.number and len(prompt.number) == 7
    before = len(hay.tokenizer.encode(text[: match.start()]))
    straw = length - 40
    assert before / straw == pytest.approx(depth / 100, abs=0.06 + 20 / straw)
    if length == 6000 and depth:
        assert text[match.start() - 2] == "."
    again = make_prompt(hay, length, depth, np.random.default_rng(0))
    assert again == prompt != make_prompt(hay, length, depth, np.random.default_rng(1))


def test_a_length_without_room(hay):
    with pytest.raises(UserError, match="--lengths: 20 tokens are less than needle"):
        make_prompt(hay, 20, 50, np.random.default_rng(0))


def test_lengths_by_default_have_room(hay):
    assert default_lengths(4096, hay.tokenizer) == (512, 1024, 2048, 4096)
    few = default_lengths(128, hay.tokenizer)
    assert few[-1] == 128 and len(few) < 4
    for length in few:
        make_prompt(hay, length, 50, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("text", "good"),
    [(" 123", True), ("123. And", True), (" 1234", False), (" 12", False), ("is 123", False)],
)
def test_exact_match(text, good):
    assert is_found("123", text) is good


def test_counts_by_length_and_depth(hay):
    """A reader that finds all, one that finds none, and one that sees the last 200 tokens."""

    def reader(sees):
        def answer(prompts, _new):
            texts = [hay.tokenizer.decode(list(ids[-sees:])) for ids in prompts]
            found = [SAID.search(text) for text in texts]
            return [f" {match[1]}." if match else " 42" for match in found]

        return answer

    ask = lambda sees, seed: find_needles(  # noqa: E731
        reader(sees), hay, (128, 1024), (0, 50, 100), source="cats", tries=3, seed=seed
    )
    assert ask(10**6, 0).found == ((3, 3, 3), (3, 3, 3)) and ask(10**6, 0).share == 1
    assert ask(5, 0).share == 0
    assert ask(200, 0).found == ((3, 3, 3), (0, 0, 3)) == ask(200, 1).found


def test_prompts_of_a_cell_do_not_depend_on_the_others(hay):
    asked = []

    def answer(prompts, _new):
        asked.append([tuple(ids) for ids in prompts])
        return ["" for _ in prompts]

    for lengths, depths, tries in (((128, 256), (0, 50), 2), ((256,), (50,), 1)):
        find_needles(answer, hay, lengths, depths, source="", tries=tries, seed=7)
    assert asked[2] == [asked[1][2]] and len({*asked[0], *asked[1]}) == 8


@dataclass(frozen=True)
class Copier:
    """A model without weights: it goes on as the text did where its last three tokens came first,
    among those that the cache holds."""

    vocab_size: int
    seq_len: int
    reach: int
    num_layers: int = 1
    fills_masks: ClassVar[bool] = False

    def spec(self):
        return {}

    def new_cache(self, batch_size, length, compute):
        return {"tokens": jnp.full((batch_size, length), -1), "end": jnp.zeros((), jnp.int32)}

    def extend(self, w, tokens, valid, cache, compute, *, empty_cache=False):
        known = jax.lax.dynamic_update_slice(
            cache["tokens"], jnp.where(valid, tokens, -1), (0, cache["end"])
        )
        end = cache["end"] + tokens.shape[1]
        places = jnp.arange(known.shape[1])
        hit = (places >= end - self.reach) & (places < end - 1) & (places >= 2)
        for back in range(3):
            last = jax.lax.dynamic_slice_in_dim(known, end - 1 - back, 1, axis=1)
            hit &= jnp.roll(known, back, axis=1) == last
        after = jnp.take_along_axis(known, jnp.argmax(hit, axis=1)[:, None] + 1, axis=1)
        hidden = (
            jnp.zeros((*tokens.shape, 1)).at[:, -1, 0].set(jnp.where(hit.any(1), after[:, 0], 0))
        )
        return hidden, {"tokens": known, "end": end}

    def logits(self, w, hidden):
        return jax.nn.one_hot(hidden[..., 0].astype(jnp.int32), self.vocab_size)


@dataclass(frozen=True)
class Loaded:
    model: Copier
    tokenizer: object
    weights: dict
    end_ids: tuple = ()


@pytest.mark.parametrize(
    ("reach", "expected"), [(10**6, (2, 2, 2)), (90, (0, 0, 2)), (0, (0, 0, 0))]
)
def test_generation_with_a_model_that_copies(hay, reach, expected, monkeypatch):
    """The whole way through batches, prefill and greedy decoding."""
    from lmwright.core.compute import Compute

    monkeypatch.setattr(decoding, "cached", Copier)  # whose cache are the tokens themselves
    loaded = Loaded(Copier(50257, 512, reach), hay.tokenizer, {})
    answer = answer_greedily(loaded, Compute())
    scores = find_needles(answer, hay, (200, 400), (0, 50, 100), source="x", tries=2, seed=3)
    assert scores.found[1] == expected


def test_the_command(shared_data, tmp_path, capsys):
    """A real model, too small to find any number; a run keeps its scores for the report."""
    from tests.evals.test_held_out import make_run

    stories = shared_data / "models" / "stories260k"
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, Lily went to the park. She saw a big dog. ")
    words = ["--needle", "--lengths", "128,256", "--depths", "0,100", "--tries", "1"]
    assert main(["eval", str(stories), *words, "--text", str(text)]) == 0
    out = capsys.readouterr().out
    assert "found: 0.0%" in out and "was repeated" in out
    assert load_model(stories).model.seq_len >= 256

    root, _ = make_run(tmp_path, "chunk")
    toml = (root / "run.toml").read_text().replace("seq_len = 32", "seq_len = 160")
    (root / "run.toml").write_text(toml)
    assert main(["prepare", str(root / "run.toml")]) == 0
    assert main(["train", str(root / "run.toml")]) == 0
    run = str(root / "run")
    assert main(["eval", run, "--needle", "--lengths", "120,160", "--seed", "5"]) == 0
    [line] = map(json.loads, (root / "run" / "evals.jsonl").read_text().splitlines())
    assert line["lengths"] == [120, 160] and line["depths"] == [0, 25, 50, 75, 100]
    assert (line["tries"], line["seed"], line["step"]) == (4, 5, 2)
    assert main(["report", run]) == 0
    page = (root / "run" / "report.html").read_text()
    assert "160 tokens, depth 75%: 0 of 4 found" in page and page.count('class="hit"') == 10

    pytest.importorskip("lm_eval")
    asked = tmp_path / "melts.jsonl"
    asked.write_text('{"query": "What melts?", "choices": ["ice", "fire"], "gold": 0}\n' * 3)
    for limit in ("2", "3"):  # the newer one stays
        assert main(["eval", run, "--tasks", str(asked), "--limit", limit]) == 0
    lines = [*map(json.loads, (root / "run" / "evals.jsonl").read_text().splitlines())]
    assert [each["kind"] for each in lines] == ["needle", "task"]
    assert (lines[1]["source"], lines[1]["questions"], lines[1]["step"]) == ("melts", 3, 2)
    assert {*lines[1]["scores"]} == {"acc", "acc_norm", "bits_per_byte"}
    assert main(["report", run]) == 0
    assert "melts, 0 shots" in (root / "run" / "report.html").read_text()
