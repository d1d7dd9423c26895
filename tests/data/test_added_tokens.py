"""Tokens that are added to a Unigram vocabulary keep their ids in data, where special ones are
text."""

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from lmwright.data.tokens.tokenizer_formats import import_tokenizer

LETTERS = ["\u2581", *"abcdefghijklmnopqrstuvwxyz[]MASK"]
PIECES = [("[PAD]", 0.0), ("[UNK]", 0.0), *((c, -5.0 - i / 9) for i, c in enumerate(LETTERS))]


def test_a_word_behind_a_special_token_keeps_its_id(tmp_path):
    """As in DeBERTa-v3, whose mask token stands behind its vocabulary, and in T5."""
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(models.Unigram(PIECES, unk_id=1))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["[PAD]", "[UNK]", "[MASK]"])
    backend.add_tokens([AddedToken("zyx", normalized=False), "wvu"])
    backend.save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ours = import_tokenizer(tmp_path)
    mask = len(PIECES)
    assert [ours.backend.token_to_id(t) for t in ("[MASK]", "zyx", "wvu")] == list(
        range(mask, mask + 3)
    )
    for text in ("hello zyx there wvu", "zyxwvu", " a  zyx b"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids
        assert ours.encode_batch([text]) == [ours.encode(text)]
    # the special one is text in data, and its own id in prompts
    assert mask not in ours.encode("a [MASK] b")
    assert ours.decode(ours.encode("a [MASK] b zyx")) == "a [MASK] b zyx"
    assert mask in ours.encode("a [MASK] b", parse_special=True)
