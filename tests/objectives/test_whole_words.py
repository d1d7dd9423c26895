"""Whole words are hidden together: where words begin, and which of them a row hides."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from lmwright.config import run as sections
from lmwright.config.load import dump_toml
from lmwright.core.contract import Batch
from lmwright.data.tokens.tokenizer import TextTokenizer, train_tokenizer
from lmwright.data.tokens.tokenizer_formats import import_tokenizer
from lmwright.data.tokens.words import ALONE, word_pieces
from lmwright.objectives.masking import starts_of_words
from lmwright.objectives.mlm import Mlm
from lmwright.objectives.ramp import Ramp

PROSE = (
    'The old sailor, who had counted nine stones, looks at the sea: "It doesn\'t remember." ',
    "In 1984 a neighbor (tall, red-haired) paid 12.50 for some bread\u2014and forgot it!\n\n",
    "Der Vogel h\u00f6rte \u00fcber 300 Lieder; na\u00efve caf\u00e9s aren't rare.\n"
    "Another line\twith a tab. ",
    "She'll sing of unremembered mornings, waiting, waiting... for its counting shadow. ",
)
LENGTH = 400
SPECIAL = ["<eos>", "<mask>"]


def wordpiece():
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend, trainers.WordPieceTrainer(vocab_size=110, special_tokens=["[UNK]", *SPECIAL])


def metaspace():
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend, trainers.UnigramTrainer(vocab_size=110, special_tokens=SPECIAL)


def gpt2():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return backend, trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet
    )


@functools.cache
def trained(make):
    backend, trainer = make()
    endings = "they'll we'll he'll she's that's aren't isn't " * 3  # pieces, as in real ones
    backend.train_from_iterator([endings, *PROSE], trainer)
    return TextTokenizer(backend, eos="<eos>", mask="<mask>")


@functools.cache
def our_own():
    spec = sections.Tokenizer(special_tokens=("<|endoftext|>", "<|mask|>"), vocab_size=300)
    return train_tokenizer(PROSE, spec)


def row_of(ids, documents=None, length=LENGTH):
    """A batch of one row with padding; `documents` are the lengths of its documents."""
    lengths = documents or [len(ids)]
    segments = np.repeat(np.arange(len(lengths)) + 1, lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    arrays = (np.array(ids), segments, positions, np.ones(len(ids), np.float32))
    return Batch(*(jnp.asarray(np.pad(a, (0, length - len(a)))[None]) for a in arrays))


find_starts = jax.jit(starts_of_words)


def begins(tokenizer, ids, documents=None):
    """Whether each token begins a word."""
    codes = np.full(512, ALONE, np.uint8)
    codes[: tokenizer.vocab_size] = np.frombuffer(word_pieces(tokenizer), np.uint8)
    starts = find_starts(row_of(ids, documents), jnp.asarray(codes))[0]
    return (np.asarray(starts) == np.arange(LENGTH))[: len(ids)]


@pytest.mark.parametrize("make", [wordpiece, metaspace, gpt2])
def test_words_are_those_of_the_tokenizer(make):
    """As its `word_ids` has them; which blanks between words belong together is left open."""
    tokenizer = trained(make)
    for text in (*PROSE, "".join(PROSE)):
        if make is metaspace:  # whose words go on behind the end of a line
            text = " ".join(text.split())
        encoding = tokenizer.plain.encode(text, add_special_tokens=False)
        theirs = np.diff(encoding.word_ids, prepend=-1) != 0
        of_text = [bool(text[a:b].strip()) for a, b in encoding.offsets]
        found = begins(tokenizer, encoding.ids)
        np.testing.assert_array_equal(found[of_text], theirs[of_text])
    assert not theirs.all() and found.sum() > 50


def test_words_of_gpt2_in_real_text(shared_data):
    tokenizer = import_tokenizer(shared_data / "tokenizers" / "gpt2")
    text = (shared_data / "text" / "wikitext2_raw_test.txt").read_text()[:100_000]
    encoding = tokenizer.plain.encode(text, add_special_tokens=False)
    codes = jnp.asarray(np.frombuffer(word_pieces(tokenizer), np.uint8))
    starts = np.asarray(find_starts(row_of(encoding.ids, length=len(encoding)), codes))[0]
    of_text = [bool(text[a:b].strip()) for a, b in encoding.offsets]
    theirs = np.diff(encoding.word_ids, prepend=-1) != 0
    np.testing.assert_array_equal((starts == np.arange(len(encoding)))[of_text], theirs[of_text])


def test_words_of_our_own_tokenizers():
    """They are those of its split, but for the sign that this leaves in front of a word."""
    tokenizer = our_own()
    text = "".join(PROSE)
    encoding = tokenizer.plain.encode(text, add_special_tokens=False)
    theirs = np.diff(encoding.word_ids, prepend=-1) != 0
    found = begins(tokenizer, encoding.ids)
    for (start, stop), ours, split in zip(encoding.offsets, found, theirs, strict=True):
        if text[start:stop].strip() and ours != split:
            assert (ours and text[start - 1] in '("-\u2014\t') or text[start].isdigit()
    assert np.sum(found != theirs) < 12 < np.sum(~found)


def test_a_document_and_a_special_token_begin_a_word():
    tokenizer = trained(wordpiece)
    ids = [tokenizer.backend.token_to_id(t) for t in ("w", "##a", "##a", "##a", "<eos>", "##a")]
    assert list(begins(tokenizer, ids)) == [True, False, False, False, True, True]
    assert list(begins(tokenizer, ids, [2, 4])) == [True, False, True, False, True, True]
    assert word_pieces(tokenizer)[ids[4]] == ALONE


@pytest.mark.parametrize("ratio", [0.3, Ramp(start=0.1, end=0.5)])
def test_a_row_hides_words_until_its_share_is_full(ratio):
    """Equal to a loop over words in the order of their first pieces' draws."""
    tokenizer = trained(wordpiece)
    objective = Mlm(mask_ratio=ratio, unit="word").with_tokenizer(tokenizer)
    encodings = [tokenizer.plain.encode(text, add_special_tokens=False) for text in PROSE]
    hide = jax.jit(lambda row, draws: objective.hide(row, tokenizer.vocab_size, draws))
    for number, encoding in enumerate(encodings):
        row, keys = row_of(encoding.ids), jax.random.split(jax.random.key(number), 1)
        hidden = hide(row, objective.draws(keys[0], jnp.arange(1), 1, 0.5))
        changed = np.flatnonzero(np.asarray(hidden.tokens != row.tokens)[0])
        key = jax.random.fold_in(keys[0], 0)
        draws = np.asarray(jax.random.uniform(jax.random.split(key, 3)[0], (LENGTH,)))
        words, left = {}, round(0.3 * len(encoding.ids))
        for place, word in enumerate(encoding.word_ids):
            words.setdefault(word, []).append(place)
        expected = []
        for places in sorted(words.values(), key=lambda places: draws[places[0]]):
            expected += places[: left - len(expected)]
        assert sorted(expected) == list(changed) and len(changed) == left
        assert sorted(np.asarray(hidden.places)[np.asarray(hidden.predicted) > 0]) == list(changed)


def test_the_words_go_with_the_objective_and_are_not_written_down():
    tokenizer = our_own()
    plain = Mlm(unit="word", random_share=0.1)
    known = plain.with_tokenizer(tokenizer)
    assert known == plain.with_tokenizer(tokenizer) != replace(known, pieces=b"")
    held = known.for_eval()
    assert held.codes == known.codes == word_pieces(tokenizer) and held.unit == "word"
    run = sections.Run(
        name="t", dir="d", model=None, objective=known, optim=None, data=sections.Data(dir="data"),
        train=sections.Train(steps=1, global_batch_size=1),
    )  # fmt: skip
    assert 'unit = "word"' in dump_toml(run) and "pieces" not in dump_toml(run)
    assert not Mlm().with_tokenizer(tokenizer).codes
