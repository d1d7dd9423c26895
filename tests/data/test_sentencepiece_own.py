"""Sentencepiece models that a user trained give the ids of the library, or are refused by the map
of characters that keeps them from it."""

import random

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from lmwright.data.tokens.tokenizer_formats import import_tokenizer
from lmwright.errors import UserError

ODD = (
    "\n", "\t", " ", "   ", "\u3000", "<0x0A>", "<0x", "<", "\r\n", "\u2581", "</s>", "<unk>",
    "e\u0301", "\ufb01", "\u200b", "1", "\x00", "\u1112\u1161", "\u1e9b\u0323", "\uff21\u0301",
)  # fmt: skip
"""Parts of texts on which a converted model and the library are most likely to differ."""


def _trained(shared_data, tmp_path, kind, rule, **options):
    words = (shared_data / "text/tinyshakespeare.txt").read_text()[:200_000]
    (tmp_path / "text.txt").write_text(words)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "my"), vocab_size=600,
        model_type=kind, normalization_rule_name=rule, minloglevel=2, **options,
    )  # fmt: skip
    return tmp_path / "my.model"


def _same_ids(path, count=400):
    tokenizer = import_tokenizer(path)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    chance = random.Random(1)
    for _ in range(count):
        parts = chance.choices((*ODD, "the king", " said ", "Who", "ROMEO:", "x"), k=9)
        text = "".join(parts)
        assert tokenizer.encode(text) == reference.encode(text), repr(text)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("fallback", [True, False])
def test_a_model_without_a_map_has_the_ids_of_the_library(shared_data, tmp_path, kind, fallback):
    _same_ids(_trained(shared_data, tmp_path, kind, "identity", byte_fallback=fallback))


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_map_that_changes_ids_is_refused_and_can_be_taken_out(shared_data, tmp_path, kind):
    path = _trained(shared_data, tmp_path, kind, "nmt_nfkc", byte_fallback=True)
    with pytest.raises(
        UserError, match=r"take the map of characters out .*docs/tokenizer.md, Sentencepiece mod"
    ):
        import_tokenizer(path)
    model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.ClearField("precompiled_charsmap")
    plain = tmp_path / "plain.model"
    plain.write_bytes(model.SerializeToString())
    _same_ids(plain)
    before = sentencepiece.SentencePieceProcessor(model_file=str(path))
    text = "To be, or  not to be: that is caf\u00e9. "
    assert import_tokenizer(plain).encode(text) == before.encode(text)
