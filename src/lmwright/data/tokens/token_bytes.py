"""TokenBytes: the number of text bytes that each token stands for."""

import json

import numpy as np

from lmwright.data.tokens.tokenizer import TextTokenizer

SPACE = "\u2581"  # how sentencepiece writes a space
BYTE = frozenset(f"<0x{b:02X}>" for b in range(256))


def is_byte_level(tokenizer: TextTokenizer) -> bool:
    """True if each letter of a piece of the vocabulary stands for one byte."""
    pipeline = [tokenizer.spec.get(part) for part in ("pre_tokenizer", "decoder")]
    return '"ByteLevel"' in json.dumps(pipeline)


class TokenBytes:
    """Number of UTF-8 bytes of ids, of the text as the tokenizer normalizes it; special tokens have
    none.

    A part of a character counts for the bytes that it holds, so that the bytes of a text's
    tokens add up to those of the text.
    """

    def __init__(self, tokenizer: TextTokenizer):
        byte_level = is_byte_level(tokenizer)
        vocab = tokenizer.backend.get_vocab(with_added_tokens=False)
        size = tokenizer.vocab_size
        self._bytes, self._special = np.zeros(size, np.int64), np.zeros(size, bool)
        self._spaced = np.zeros(size, bool)  # begins with what may be a space that was put there
        for piece, i in vocab.items():
            if byte_level:
                self._bytes[i] = len(piece)  # one letter stands for one byte
                self._spaced[i] = piece.startswith("\u0120")
            else:
                self._bytes[i] = 1 if piece in BYTE else len(piece.replace(SPACE, " ").encode())
                self._spaced[i] = piece.startswith(SPACE)
        for i, token in tokenizer.backend.get_added_tokens_decoder().items():
            self._bytes[i] = 0 if token.special else len(token.content.encode())
            self._special[i], self._spaced[i] = token.special, False
        if not _adds_space(tokenizer):
            self._spaced[:] = False

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """int64, of the shape of int tokens [..., T]; ids without a token have none. A space that
        the tokenizer puts before a text is none of the text."""
        known = tokens < len(self._bytes)
        ids = np.where(known, tokens, 0)
        begins = np.zeros(tokens.shape, bool)
        begins[..., 1:] = (self._special[ids] & known)[..., :-1]
        return np.where(known, self._bytes[ids] - (begins & self._spaced[ids]), 0)


def _adds_space(tokenizer: TextTokenizer) -> bool:
    """True if the first token of a text has a space that the text does not begin with."""
    first = tokenizer.plain.encode("a", add_special_tokens=False).tokens[:1]
    return bool(first) and first[0][0] in (SPACE, "\u0120")
