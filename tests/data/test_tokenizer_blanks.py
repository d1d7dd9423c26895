"""Sentencepiece models whose pieces of blanks have one score, as Mistral's tokenizer.model has."""

import io
import re

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from lmwright.data.tokens.tokenizer import load_tokenizer, save_tokenizer
from lmwright.data.tokens.tokenizer_formats import import_tokenizer
from tests.data.user_run import texts

SPACE = "\u2581"
# Mistral's: every length up to 16 but one, and all of one score
LENGTHS = (*range(2, 15), 16)


def one_score(raw):
    """The model with pieces of blanks of LENGTHS alone, all of one score."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(raw)
    there = {p.piece: p for p in proto.pieces if re.fullmatch(f"{SPACE}{{2,}}", p.piece)}
    for number, piece in enumerate(there.values()):
        piece.piece = f"<gone{number}>" if len(piece.piece) not in LENGTHS else piece.piece
        piece.score = -1e9
    for n in LENGTHS:
        if SPACE * n not in there:
            proto.pieces.add(piece=SPACE * n, score=-1e9, type=1)
    return proto.SerializeToString()


def pair(raw, folder):
    """Our tokenizer, saved and loaded again, and the library's."""
    (folder / "tokenizer.model").write_bytes(one_score(raw))
    save_tokenizer(import_tokenizer(folder / "tokenizer.model"), folder / "saved")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return load_tokenizer(folder / "saved"), reference


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    raw = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts(200)), model_writer=raw, model_type="bpe", vocab_size=400,
        byte_fallback=True, remove_extra_whitespaces=False, normalization_rule_name="identity",
        minloglevel=2,
    )  # fmt: skip
    return pair(raw.getvalue(), tmp_path_factory.mktemp("small"))


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from(" " * 12 + "abcdej\n\u00e9"), max_size=120))
def test_ids_are_sentencepieces(small, text):
    tokenizer, reference = small
    assert tokenizer.encode(text) == reference.encode(text)


@pytest.mark.parametrize("around", [("", ""), ("ab", "cd"), ("\n", "x"), ("x  ", "\n")])
def test_every_length(small, around):
    tokenizer, reference = small
    for n in range(200):
        text = (" " * n).join(around)
        assert tokenizer.encode(text) == reference.encode(text), n
    assert tokenizer.decode(tokenizer.encode("a" + " " * 17 + "b")) == "a" + " " * 17 + "b"


def test_llama2s_file_with_one_score(shared_data, tmp_path):
    raw = (shared_data / "tokenizers/llama2/tokenizer.model").read_bytes()
    tokenizer, reference = pair(raw, tmp_path)
    for n in range(100):
        for text in (" " * n, f"def f():\n{' ' * n}return 1", f"{' ' * n}x{' ' * n}\t y"):
            assert tokenizer.encode(text) == reference.encode(text), n
