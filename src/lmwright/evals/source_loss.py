"""Held-out loss of a source: nats per token, perplexity, bits per byte.

Bits per byte divides the loss over all predicted tokens (ends of documents included) by the
UTF-8 bytes of those tokens, so that tokenizers can be compared.
"""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SourceLoss:
    """Means over one source; `loss` is in nats per predicted token. What an objective scores beside
    or instead of tokens is in a class of its own."""

    source: str
    loss: float
    accuracy: float
    tokens: int
    """Tokens, texts, words, pairs or questions, over which `loss` is the mean."""
    text_bytes: int = 0
    """UTF-8 bytes of these tokens; 0 where they are only some of a text's."""
    rows: int = 0
    of_rows: int = 0
    """Rows that the source has; 0 where it has no rows, as a text."""
    scores: dict[str, float] = field(default_factory=dict, compare=False)
    """Means of `Objective.held_out_metrics`."""

    @property
    def rows_text(self) -> str:
        """Text such as "128 of 352 rows"; empty without rows."""
        return f"{self.rows:,} of {self.of_rows:,} rows" if self.of_rows else ""

    @property
    def perplexity(self) -> float | None:
        """None where the loss is not that of tokens."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """None where only some tokens of a text are predicted."""
        if not self.text_bytes:
            return None
        return self.loss * self.tokens / math.log(2) / self.text_bytes

    def averages(self) -> dict[str, float]:
        """Scores that metrics.jsonl keeps beside the loss, by name."""
        return self.scores

    @property
    def note(self) -> str:
        """Scores beside a loss, for people, such as "detector loss 0.1234"; may be empty."""
        return ", ".join(f"{name.replace('_', ' ')} {v:.4f}" for name, v in self.scores.items())

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of a table that has a line for each source."""
        names = ("held-out source", "tokens", "loss", "perplexity", "bits per byte", "accuracy")
        return (*names, "rows") if self.of_rows else names

    @property
    def line(self) -> tuple[str, ...]:
        """The line of this source: itself, how many tokens it has, their loss, and the figures."""
        return (self.source, f"{self.tokens:,}", f"{self.loss:.4f}", *self.figures())

    def figures(self) -> tuple[str, ...]:
        """The columns after the loss."""
        return (
            f"{self.perplexity:,.2f}",
            "-" if self.bits_per_byte is None else f"{self.bits_per_byte:.4f}",
            f"{self.accuracy:.1%}",
            *([self.rows_text.removesuffix(" rows")] if self.of_rows else []),
        )

    def details(self) -> list[Any]:
        """Lines and tables about this source, printed below the table of sources."""
        return [f"{self.source}: {self.note}"] if self.scores else []
