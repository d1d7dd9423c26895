"""Byte-level BPE: how known tokenizers split text, and their merges."""

from collections.abc import Mapping
from typing import Any

from lmwright.data.tokens.tokenizer import SPLIT

GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN_SPLIT = SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# Qwen3.5 leaves marks with the letters that they belong to
QWEN35_SPLIT = QWEN_SPLIT.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
DEEPSEEK_SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""DeepSeek-V3's, one after the other."""
O200K_SPLIT = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def byte_vocab(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Byte-level BPE vocabulary and merges from ranks.

    Every cut of a token into two tokens becomes a merge, ordered by the token's rank. Only one
    of them can ever be reached, since what happens inside a token depends on its bytes alone.
    """
    letter = byte_letters()
    text = {token: "".join(letter[b] for b in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], text[left], text[right]))
    merges.sort()
    return {text[t]: r for t, r in ranks.items()}, [m[3:] for m in merges]


def byte_letters() -> list[str]:
    """Printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [letters[b] for b in range(256)]


def merges_of(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Merges of a BPE model in a tokenizer.json, which has them as "a b" or as ["a", "b"]."""
    return [tuple(m.split(" ", 1) if isinstance(m, str) else m) for m in model["merges"]]
