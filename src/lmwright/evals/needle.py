"""Needle in a haystack: what a model still finds in a long text.

    haystack, needle: "The secret number is 4839201.", haystack, question: "The secret number is"
    |------------------------------- `length` tokens, answer included -------------------------|

The haystack is the user's own text; the number is random, and found where greedy generation begins
with it. https://github.com/gkamradt/LLMTest_NeedleInAHaystack
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lmwright.data.tokens.tokenizer import TextTokenizer
from lmwright.errors import UserError
from lmwright.evals.generate import generate
from lmwright.evals.sampling import Sampling
from lmwright.formats.loaded import LoadedModel
from lmwright.guard.terminal import print_table

NEEDLE = "\nThe secret number is {number}.\n"
QUESTION = "\nThe secret number is"
DIGITS = 7
SPARE_TOKENS = 2  # of an answer, for a space or a stop beside its number
BATCH_TOKENS = 32_768  # of prompts that are continued together
ENDS = (".", "!", "?", "\n")

Answer = Callable[[Sequence[Sequence[int]], int], list[str]]
"""Continuations of prompts, given as ids, and the most tokens of each."""


@dataclass(frozen=True)
class Hay:
    """Haystack, and what prompts are made with."""

    tokenizer: TextTokenizer
    ids: np.ndarray
    """Tokens of the haystack; it begins anew where a prompt needs more."""
    prefix: tuple[int, ...] = ()
    """Ids that begin every prompt."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the number that answers it."""

    ids: list[int]
    number: str
    answer_tokens: int
    """Room for the answer."""


@dataclass(frozen=True)
class NeedleScores:
    """Numbers found, by length and depth."""

    source: str
    lengths: tuple[int, ...]
    """Tokens of prompt and answer together."""
    depths: tuple[float, ...]
    """Positions of the needle: 0 is the beginning of the haystack, 100 its end."""
    found: tuple[tuple[int, ...], ...]
    """Numbers found, [lengths][depths]."""
    tries: int
    """Numbers asked for at each length and depth."""
    seed: int

    @property
    def share(self) -> float:
        """Share of all numbers that were found."""
        return sum(map(sum, self.found)) / (self.tries * len(self.lengths) * len(self.depths))

    def line(self) -> dict[str, Any]:
        """The line that is kept in the run directory."""
        return {
            "kind": "needle", "source": self.source, "lengths": self.lengths,
            "depths": self.depths, "found": self.found, "tries": self.tries, "seed": self.seed,
        }  # fmt: skip


def make_prompt(hay: Hay, length: int, depth: float, rng: np.random.Generator) -> Prompt:
    """A prompt that is `length` tokens long with its answer, and begins anywhere in the haystack.
    Raises UserError for a length that leaves no haystack."""
    number = str(rng.integers(10 ** (DIGITS - 1), 10**DIGITS))
    encode = hay.tokenizer.encode
    needle, question = encode(NEEDLE.format(number=number)), encode(QUESTION)
    answer_tokens = len(encode(f" {number}")) + SPARE_TOKENS
    size = length - len(hay.prefix) - len(needle) - len(question) - answer_tokens
    if size < 1:
        raise UserError(
            f"--lengths: {length} tokens are less than needle, question and answer; "
            f"take at least {2 * (length - size)}"
        )
    start = rng.integers(len(hay.ids))
    straw = np.take(hay.ids, np.arange(start, start + size), mode="wrap")
    cut = _sentence_end(hay.tokenizer, straw, round(size * depth / 100))
    ids = [*hay.prefix, *straw[:cut].tolist(), *needle, *straw[cut:].tolist(), *question]
    return Prompt(ids, number, answer_tokens)


def _sentence_end(tokenizer: TextTokenizer, straw: np.ndarray, cut: int) -> int:
    """The end of a sentence shortly before `cut`, where there is one."""
    for place in range(cut, max(cut - len(straw) // 20, 0), -1):
        if tokenizer.decode(straw[place - 1 : place].tolist()).endswith(ENDS):
            return place
    return cut


def is_found(number: str, text: str) -> bool:
    """True for an answer that begins with the number and ends it there."""
    match = re.match(r"\s*(\d+)", text)
    return match is not None and match[1] == number


def find_needles(
    answer: Answer,
    hay: Hay,
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    source: str,
    tries: int,
    seed: int = 0,
) -> NeedleScores:
    """Asks for `tries` numbers at each length and depth; equal seeds give equal prompts, whatever
    the other lengths and depths are."""
    found = []
    for length in lengths:
        prompts = [
            make_prompt(hay, length, depth, np.random.default_rng([seed, length, i, round(depth)]))
            for depth in depths
            for i in range(tries)
        ]
        room = max(prompt.answer_tokens for prompt in prompts)
        texts = answer([prompt.ids for prompt in prompts], room)
        hits = [is_found(p.number, text) for p, text in zip(prompts, texts, strict=True)]
        found.append(tuple(np.reshape(hits, (len(depths), tries)).sum(axis=1).tolist()))
    return NeedleScores(source, tuple(lengths), tuple(depths), tuple(found), tries, seed)


def answer_greedily(loaded: LoadedModel, compute: Any) -> Answer:
    """Greedy continuations by a model, as many together as `BATCH_TOKENS` allow."""

    def answer(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[str]:
        rows = max(BATCH_TOKENS // max(map(len, prompts)), 1)
        complete = partial(generate, loaded.model, loaded.weights, loaded.tokenizer)
        settings = Sampling(max_new_tokens=new_tokens, temperature=0.0)
        generations = complete(
            [list(ids) for ids in prompts], settings, compute, end_ids=loaded.end_ids,
            batch_rows=rows,
        )  # fmt: skip
        return [generation.text for generation in generations]

    return answer


def default_lengths(seq_len: int, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """A context and its half, quarter and eighth, in tokens; of a small one, those that have room
    for twice a needle with its question and answer."""
    number = "9" * DIGITS
    said = f"{NEEDLE.format(number=number)}{QUESTION} {number}"
    least = 2 * (len(tokenizer.encode(said)) + SPARE_TOKENS)
    lengths = (seq_len >> shift for shift in (3, 2, 1))
    return (*(length for length in lengths if length >= least), seq_len)


def print_needles(scores: NeedleScores) -> None:
    """Prints the share of numbers found, by length and depth."""
    table = Table(box=None, pad_edge=False)
    table.add_column("tokens", justify="right")
    for depth in scores.depths:
        table.add_column(f"{depth:g}%", justify="right")
    for length, hits in zip(scores.lengths, scores.found, strict=True):
        table.add_row(f"{length:,}", *(f"{n} of {scores.tries}" for n in hits))
    console = Console()
    print_table(console, table)
    console.print(f"found: {scores.share:.1%}", highlight=False)
