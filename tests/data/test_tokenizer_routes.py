"""tiktoken, tokenizers and sentencepiece give the same ids, and where they would not, say so."""

import csv
import errno
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from lmwright.config.run import Tokenizer
from lmwright.data.tokens import encode
from lmwright.data.tokens.encode import CannotConvertError, bpe_ranks, choose_route, make_encoder
from lmwright.data.tokens.probe import PROBE
from lmwright.data.tokens.tokenizer import TextTokenizer, save_tokenizer, train_tokenizer
from lmwright.data.tokens.tokenizer_formats import import_command, import_tokenizer
from lmwright.errors import UserError
from lmwright.formats.tokenizer_files import open_tokenizer

CORPUS = [Path(m.__file__).read_text("utf-8") for m in (csv, textwrap)]
KINDS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "digits": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
}


def bpe(pre_tokenizer, vocab_size=700, **options):
    backend = tokenizers.Tokenizer(models.BPE(**options))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<|endoftext|>"])
    return TextTokenizer(backend, eos="<|endoftext|>")


@pytest.fixture(scope="module")
def small():
    spec = Tokenizer(vocab_size=700)
    return {"own": train_tokenizer(CORPUS, spec)} | {k: bpe(p) for k, p in KINDS.items()}


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(
        st.one_of(
            st.text(st.characters(codec="utf-8"), max_size=20),
            st.text(" \t\n\r\u00a0\u3000", max_size=6),
            st.text("0123456789\u00bd\u0663 ", max_size=6),
            st.sampled_from(["<|endoftext|>", "'s", "'LL", "'\u017f", "def ", "self."]),
        )
    ).map("".join),
    kind=st.sampled_from(["own", *KINDS]),
)
def test_tiktoken_is_tokenizers(small, text, kind):
    tokenizer = small[kind]
    (ids,) = make_encoder(tokenizer, "tiktoken").encode_batch([text])
    (expected,) = make_encoder(tokenizer, "tokenizers").encode_batch([text])
    assert ids.dtype == np.uint32
    assert ids.tolist() == expected.tolist() == tokenizer.encode(text)
    assert tokenizer.eos_id not in ids and tokenizer.decode(ids) == text


def test_every_character_is_cut_alike(small):
    """All of Unicode beside letters, digits, blanks and signs: the two regex engines agree."""
    ideographs = (*range(0x3400, 0xA000, 50), *range(0xAC00, 0xD7A4, 50))
    others = (*range(0x3400), *range(0xA000, 0xAC00), *range(0xF900, 0x20000, 2))
    characters = [chr(c) for c in (*others, *ideographs)]
    texts = [
        " ".join(f"a{c} {c}1{c}." for c in characters[i : i + 2000])
        for i in range(0, len(characters), 2000)
    ]
    for kind, tokenizer in small.items():
        ours = make_encoder(tokenizer, "tiktoken").encode_batch(texts)
        theirs = make_encoder(tokenizer, "tokenizers").encode_batch(texts)
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)), kind


def test_auto_takes_tiktoken_where_it_is_proven(small):
    assert {k: choose_route(t) for k, t in small.items()} == dict.fromkeys(small, "tiktoken")


def test_a_long_run_of_blanks(small):
    text = " " * 1_200_000 + "x"
    (ids,) = make_encoder(small["own"], "tiktoken").encode_batch([text])
    assert small["own"].decode(ids) == text
    assert ids.tolist() == small["own"].encode(text)


def changed(tokenizer, change):
    spec = json.loads(tokenizer.backend.to_str())
    change(spec)
    return TextTokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)), eos=tokenizer.eos)


def swap_merges(spec):
    merges = spec["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def other_pair(spec):
    # " th" made from " " and "th" becomes a token made from " t" and "h"
    merges = [tuple(m) for m in spec["model"]["merges"]]
    at = next(i for i, (a, b) in enumerate(merges) if len(a) > 1 and len(b) == 1)
    left, right = merges[at]
    spec["model"]["merges"][at] = [left[0], left[1:] + right]


def drop_merge(spec):
    spec["model"]["merges"] = spec["model"]["merges"][:-1]


def unknown_split(spec):
    spec["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Punctuation", "behavior": "Isolated"}, spec["pre_tokenizer"]],
    }


@pytest.mark.parametrize(
    "change, reason",
    [
        (swap_merges, "another order"),
        (other_pair, "another order|never reached"),
        (drop_merge, "another order|never reached"),
        (unknown_split, "its pre-tokenizer"),
        (lambda s: s["pre_tokenizer"].update(add_prefix_space=True), "leading space"),
        (lambda s: s["model"].update(end_of_word_suffix="</w>"), "not a plain byte-level BPE"),
    ],
)
def test_what_is_not_equal_is_refused(small, change, reason):
    tokenizer = changed(small["gpt2"], change)
    with pytest.raises(CannotConvertError, match=reason):
        bpe_ranks(tokenizer.spec, prove=True)
    assert choose_route(tokenizer) == "tokenizers"
    with pytest.raises(UserError, match=r"data\.tokenize\.route='tiktoken' does not fit.*'auto'"):
        choose_route(tokenizer, "tiktoken")


def test_the_refused_order_would_have_changed_ids(small):
    """The refusal is no formality: "abc" is merged from the left or from the right."""
    vocab = dict(small["gpt2"].backend.get_vocab())
    vocab = {t: i for t, i in vocab.items() if len(t) == 1}
    vocab |= {"ab": 1000, "bc": 1001}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("b", "c"), ("a", "b")]))
    backend.pre_tokenizer = KINDS["gpt2"]
    tokenizer = TextTokenizer(backend)
    (ours,) = make_encoder(tokenizer, "tiktoken").encode_batch(["abc"])
    assert ours.tolist() == [1000, vocab["c"]]
    assert tokenizer.encode("abc") == [vocab["a"], 1001]
    assert choose_route(tokenizer) == "tokenizers"


def test_a_failed_probe_falls_back(small, monkeypatch):
    monkeypatch.setattr(encode, "GPT2_SPLIT", r"\S+|\s+")
    assert choose_route(small["gpt2"]) == "tokenizers"


def test_added_words_and_normalizers(small):
    backend = tokenizers.Tokenizer.from_str(small["gpt2"].backend.to_str())
    backend.normalizer = normalizers.NFC()
    backend.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in ("<tool>", "<tool>x")])
    tokenizer = TextTokenizer(backend, eos="<|endoftext|>")
    assert choose_route(tokenizer) == "tiktoken"
    texts = ["a<tool>b<tool>xe\u0301<|endoftext|> <tool", "<tool>", *PROBE]
    ours = make_encoder(tokenizer, "tiktoken").encode_batch(texts)
    theirs = make_encoder(tokenizer, "tokenizers").encode_batch(texts)
    assert [a.tolist() for a in ours] == [b.tolist() for b in theirs]
    assert backend.token_to_id("<tool>x") in ours[0]
    backend.add_tokens([tokenizers.AddedToken("<strip>", lstrip=True, normalized=False)])
    assert choose_route(TextTokenizer(backend)) == "tokenizers"


REAL = {
    "gpt2": "tiktoken",
    "smollm2": "tiktoken",
    "llama3/tokenizer.model.tiktoken": "tiktoken",
    "qwen/qwen.tiktoken": "tiktoken",
    "llama2/tokenizer.model": "sentencepiece",
    "t5/spiece.model": "tokenizers",
}


LONG = ("llama3/tokenizer.model.tiktoken", "qwen/qwen.tiktoken")
SLOW = {name: [pytest.mark.slow] for name in LONG}


@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW.get(n, [])) for n in REAL])
def test_real_tokenizers(shared_data, name):
    folder = shared_data / "text"
    texts = [json.loads(line)["text"] for line in (folder / "python_docs.jsonl").open()][:4]
    texts += [t[:4000] for t in (folder / "udhr_multilingual.tsv").read_text("utf-8").splitlines()]
    texts += [*CORPUS, *PROBE, "\x04\x06 bytes that smollm2 lacks \U00050000"]
    tokenizer = import_tokenizer(shared_data / "tokenizers" / name)
    route = choose_route(tokenizer)
    assert route == REAL[name]
    found = make_encoder(tokenizer, route).encode_batch(texts)
    expected = make_encoder(tokenizer, "tokenizers").encode_batch(texts)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_routes_that_a_tokenizer_does_not_have(small):
    with pytest.raises(UserError, match="not imported from a sentencepiece model"):
        choose_route(small["own"], "sentencepiece")
    unigram = train_tokenizer(CORPUS, Tokenizer(train="unigram", vocab_size=400))
    assert choose_route(unigram) == choose_route(unigram, "tokenizers") == "tokenizers"
    with pytest.raises(UserError, match="not a plain byte-level BPE"):
        choose_route(unigram, "tiktoken")


@pytest.mark.parametrize("exists", [False, True])
def test_an_import_that_is_killed_loses_no_chat_template(shared_data, tmp_path, exists):
    """tokenizer.model alone would be opened, too."""
    llama = import_tokenizer(shared_data / "tokenizers" / "llama2" / "tokenizer.model")
    save_tokenizer(replace(llama, chat_template="{{ messages }}"), tmp_path / "a")
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    code = f"""
        import os, sys
        from lmwright.data.tokens.tokenizer_formats import import_command
        def kill(event, names):
            if event == "os.rename" and str(names[1]).endswith("/tokenizer.json"):
                os._exit(9)
        sys.addaudithook(kill)
        import_command({str(tmp_path / "a")!r}, {str(out)!r})
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)])
    assert killed.returncode == 9
    if exists:
        assert import_tokenizer(out).chat_template == "{{ messages }}"
    else:
        assert not out.exists()
    import_command(tmp_path / "a", out)
    assert open_tokenizer(out).chat_template == "{{ messages }}"


def test_an_import_names_the_disk_that_is_full(small, tmp_path, monkeypatch):
    """The new folder is put together on the disk of temporary files, which may be the full one."""
    save_tokenizer(small["own"], tmp_path / "a")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    fsync = os.fsync

    def full(descriptor):
        if "temporary" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as full_disk:
        import_command(tmp_path / "a", tmp_path / "out")
    assert "/temporary/lmwright-" in full_disk.value.filename
    assert sorted(os.listdir(tmp_path)) == ["a", "temporary"]
    assert not os.listdir(tmp_path / "temporary")
