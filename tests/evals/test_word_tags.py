"""Tags of words whose tokens stand between those that a tokenizer puts around a text."""

import numpy as np
import pytest

from lmwright.data.tokens.around import ids_around
from lmwright.data.tokens.tokenizer_formats import import_tokenizer
from lmwright.evals import word_tags
from lmwright.evals.word_tags import WordTags

TEXTS = ("Unaffable cats sat there", "a", " ".join(f"antidisestablishment{i}" for i in range(9)))
NUM_LABELS, MOST = 30_522, 24


@pytest.fixture
def reader(shared_data, monkeypatch):
    """A tagger, without its model, whose score of each token's own id is the highest."""
    tags = object.__new__(WordTags)
    tags.tokenizer = import_tokenizer(str(shared_data / "tokenizers" / "bert_uncased"))
    tags.around, tags.side, tags.most = ids_around(tags.tokenizer), "right", MOST
    tags._run = None
    tags.model = type("Model", (), {"labels": range(NUM_LABELS)})

    def told(_run, documents, most):
        assert max(map(len, documents)) <= most
        return [(np.arange(NUM_LABELS) == np.array(ids)[:, None]) * 1.0 for ids in documents]

    monkeypatch.setattr(word_tags, "of_tokens", told)
    return tags


def test_a_word_has_the_tag_of_its_first_token(reader):
    """By the `tokenizers` library, which numbers words itself; those that do not fit have none."""
    backend = reader.tokenizer.backend
    encoded, cut = reader.encode(TEXTS)
    assert cut == [False, False, True]
    for text, was_cut, found in zip(TEXTS, cut, reader.scores(encoded), strict=True):
        whole = backend.encode(text.split(), is_pretokenized=True)
        assert whole.word_ids[0] is None  # [CLS]
        first = [whole.word_ids.index(word) for word in range(len(text.split()))]
        tags = [None if np.isnan(row).any() else int(row.argmax()) for row in found.scores]
        kept = len(first) - tags.count(None)
        assert tags == [whole.ids[at] for at in first[:kept]] + [None] * tags.count(None)
        ends = [*first[1:], len(whole.ids) - 1]  # before [SEP]
        room = [end + 1 <= MOST for end in ends]
        assert kept == room.count(True) and (None in tags) == was_cut
