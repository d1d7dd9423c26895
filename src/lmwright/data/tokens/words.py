"""Words: where the pieces of a tokenizer begin one.

A word is what the tokenizer cuts a text into before it looks for pieces. Whether a piece begins one
follows from it and the piece before it:

    WordPiece       each piece without the prefix that says that it goes on, as ##
    sentencepiece   each piece with a space in front
    byte-level      each piece with a space in front, and where letters, digits and other signs meet

So a token needs one byte: whether it begins a word by itself, and what stands at its two ends.
"""

import json
import unicodedata
from collections.abc import Callable

from lmwright.data.tokens.bpe import byte_letters
from lmwright.data.tokens.token_bytes import BYTE, SPACE
from lmwright.data.tokens.tokenizer import TextTokenizer

ANY, LETTER, DIGIT, SIGN, BLANK, EDGE, JOINT, SAME = range(8)
"""The character at an end of a token: ANY where that does not matter, EDGE beside special tokens,
JOINT for a space alone, which belongs to the word behind it, SAME for the rest of a character that
begins in a token before."""
BEGINS = 1  # the lowest bit; then three for the left end, three for the right one
LEADS_OF_SIGNS = (0xC2, 0xE2, 0xF0)  # signs of Latin-1, punctuation, emoji: few are letters
ALONE = BEGINS | EDGE << 1 | EDGE << 4


def word_pieces(tokenizer: TextTokenizer) -> bytes:
    """A byte for each id, as said above; special tokens and ids without a token stand alone."""
    codes = bytearray([ALONE]) * tokenizer.vocab_size
    code = _code_of(tokenizer)
    for piece, i in tokenizer.backend.get_vocab(with_added_tokens=False).items():
        codes[i] = code(piece)
    for i in tokenizer.backend.get_added_tokens_decoder():
        codes[i] = ALONE
    return bytes(codes)


def _code_of(tokenizer: TextTokenizer) -> Callable[[str], int]:
    """Function from a piece to its byte."""
    spec = tokenizer.spec
    if spec["model"].get("type") == "WordPiece":
        prefix = spec["model"]["continuing_subword_prefix"]
        return lambda piece: 0 if piece.startswith(prefix) else BEGINS
    if '"ByteLevel"' in json.dumps([spec.get("pre_tokenizer"), spec.get("decoder")]):
        byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
        return lambda piece: _ends(bytes(byte_of[letter] for letter in piece))
    return _after_space


def _after_space(piece: str) -> int:
    text = chr(int(piece[3:5], 16)) if piece in BYTE else piece
    if text.isspace():  # such as the end of a line
        return BEGINS | BLANK << 4
    return BEGINS if text.startswith(SPACE) else 0


def _ends(piece: bytes) -> int:
    if piece == b" ":
        return BEGINS | JOINT << 4
    text = piece.decode("utf-8", "replace")
    leads = [byte for byte in piece if byte >= 0xC0]
    left = _class_of(text[0], piece[0] if piece[0] >= 0xC0 else None)
    right = _class_of(text[-1], leads[-1] if leads else None)
    return (BEGINS if left == BLANK else 0) | left << 1 | right << 4


def _class_of(letter: str, lead: int | None) -> int:
    """Class of a character; of one that is cut, by its first byte if that is there."""
    if letter == "\ufffd":
        return SAME if lead is None else SIGN if lead in LEADS_OF_SIGNS else LETTER
    if letter.isspace():
        return BLANK
    return {"L": LETTER, "M": LETTER, "N": DIGIT}.get(unicodedata.category(letter)[0], SIGN)
