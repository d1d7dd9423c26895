"""TextStream: nothing lost, nothing twice, no broken characters, cut before a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmwright.config.run import Tokenizer
from lmwright.data.tokens.tokenizer import train_tokenizer
from lmwright.evals.text_stream import TextStream

TEXT = ["the cat sat on the mat, \u00e9t\u00e9 na\u00efve \u65e5\u672c\u8a9e \U0001f600"] * 20
BYTE_LEVEL = train_tokenizer(TEXT, Tokenizer(vocab_size=300))


def stream(tokenizer, ids, prompt=(), stop=()):
    found = TextStream(lambda i: tokenizer.decode(i, skip_special=True), prompt, stop)
    pieces = [found.push(token) for token in ids]
    pieces.append(found.finish())
    assert "".join(pieces) == found.text
    return pieces, found


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30), st.text(max_size=10))
def test_any_text_comes_out_whole(prompt, text):
    ids = BYTE_LEVEL.encode(text)
    pieces, found = stream(BYTE_LEVEL, ids, BYTE_LEVEL.encode(prompt))
    assert found.text == text and not found.stopped
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


@settings(max_examples=60, deadline=None)
@given(st.text("ab \u00e9\U0001f600", max_size=30), st.text("ab \u00e9", min_size=1, max_size=3))
def test_cut_before_the_stop_string(text, stop):
    """However the tokens fall on it: byte by byte here."""
    ids = [BYTE_LEVEL.backend.token_to_id(c) for c in byte_tokens(text)]
    _, found = stream(BYTE_LEVEL, ids, stop=(stop, "not in it", "#"))
    assert found.stopped == (stop in text)
    assert found.text == text.partition(stop)[0]


def byte_tokens(text):
    """The byte-level alphabet's characters for each byte of a text."""
    pieces = BYTE_LEVEL.backend.pre_tokenizer.pre_tokenize_str(text)
    return "".join(piece for piece, _ in pieces)


def test_stop_string_over_several_tokens_and_several_strings():
    ids = [BYTE_LEVEL.backend.token_to_id(c) for c in byte_tokens("one END two")]
    _, found = stream(BYTE_LEVEL, ids, stop=("ND t", "END"))
    assert found.text == "one " and found.stopped
    _, found = stream(BYTE_LEVEL, ids, stop=("ND", "END"))  # both end with one token
    assert found.text == "one " and found.stopped
    held = stream(BYTE_LEVEL, ids[:5], stop=("END",))
    assert held[0][4] == "" and held[0][-1] == "E"  # given out only at the end


def test_broken_bytes_are_shown_as_such():
    """Bytes that are no character; the text goes on after them."""
    lead = BYTE_LEVEL.backend.token_to_id(byte_tokens("\u00e9")[0])
    a = BYTE_LEVEL.backend.token_to_id("a")
    assert stream(BYTE_LEVEL, [a, lead, a])[1].text == "a\ufffda"
    assert stream(BYTE_LEVEL, [a, lead])[1].text == "a\ufffd"


def test_a_prompt_may_end_in_half_a_character():
    half = [BYTE_LEVEL.backend.token_to_id(c) for c in byte_tokens("\u00e9")]
    assert stream(BYTE_LEVEL, [half[1]], [half[0]])[1].text == "\u00e9"


def test_spaces_of_a_sentencepiece_tokenizer(shared_data):
    from lmwright.formats.tokenizer_files import open_tokenizer

    tokenizer = open_tokenizer(shared_data / "models" / "stories260k")
    text = "Once upon a time,  there was \u65e5\u672c. She said"
    ids = tokenizer.encode(text)
    for cut in range(1, len(ids)):
        # a decoder drops the first space of what it is given
        shown = tokenizer.decode(ids[:cut], skip_special=True)
        if not shown.endswith("\ufffd"):
            assert shown + stream(tokenizer, ids[cut:], ids[:cut])[1].text == text
    assert stream(tokenizer, ids)[1].text == text


@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_are_not_text(special):
    eos = BYTE_LEVEL.eos_id
    ids = [*BYTE_LEVEL.encode("the cat"), *[eos] * special, *BYTE_LEVEL.encode(" sat")]
    assert stream(BYTE_LEVEL, ids)[1].text == "the cat sat"
