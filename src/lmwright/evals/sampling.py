"""Sampling: from logits to the next token.

The filters are those of transformers, in its order: temperature, top-k, top-p
(https://arxiv.org/abs/1904.09751).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.data.tokens.tokenizer import TextTokenizer
from lmwright.errors import UserError

Method = Literal["greedy", "sampled", "filtered"]
NO_TOKEN = -1  # where logits are no numbers


def refuse_wrong(settings: Any, wrong: Mapping[str, tuple[bool, str]]) -> None:
    """Raises UserError for the first wrong one of some settings; `wrong` says of each, by its name,
    whether it is, and what it must be."""
    for name, (is_wrong, cure) in wrong.items():
        if is_wrong:
            raise UserError(f"{name}: {getattr(settings, name)!r} must be {cure}")


@dataclass(frozen=True)
class Sampling:
    """Settings of text generation."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    """Temperature of sampling; 0 always takes the most likely token."""
    top_k: int | None = None
    """Number of the most likely tokens that are sampled from."""
    top_p: float | None = None
    """Probability of the most likely tokens that are sampled from, together."""
    stop: tuple[str, ...] = ()
    """Strings at which the text ends; they are not part of it."""
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = {
            "max_new_tokens": (self.max_new_tokens < 1, "at least 1"),
            "temperature": (
                not (self.temperature >= 0 and math.isfinite(self.temperature)),
                "0 (greedy) or more",
            ),
            "top_k": (self.top_k is not None and self.top_k < 1, "at least 1"),
            "top_p": (self.top_p is not None and not 0 < self.top_p <= 1, "above 0, at most 1"),
            "seed": (not 0 <= self.seed < 2**32, "from 0 to 2**32 - 1"),
        }
        refuse_wrong(self, wrong)
        if "" in self.stop:
            raise UserError("stop: an empty string ends no text; leave it out")

    def refuse_idle(self) -> None:
        """Raises UserError for filters of a model that samples token after token, at temperature
        0."""
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise UserError("top_k, top_p: have no effect at temperature 0; raise temperature")

    def ends(self, tokenizer: TextTokenizer) -> tuple[int, ...]:
        """Ids that end a text: the tokenizer's own, and those of special tokens, which are no part
        of the text, that stop strings begin with."""
        own = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        if not self.stop:
            return own
        special = tokenizer.special_tokens.items()
        return (*own, *(i for token, i in special if any(s.startswith(token) for s in self.stop)))

    @property
    def method(self) -> Method:
        """Name of the program that serves these settings."""
        if self.temperature == 0:
            return "greedy"
        return "sampled" if self.top_k is None and self.top_p is None else "filtered"


def filter_logits(logits: Array, temperature: Array, top_k: Array, top_p: Array) -> Array:
    """float32 logits [B, V] with all but the tokens kept by top-k and top-p at -inf.

    `top_k` is an int of at most V, `top_p` a float of at most 1; ties with the k-th token stay.
    """
    logits = logits / temperature
    order = jnp.argsort(logits, axis=-1)  # least likely first
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    kth = jnp.take(ranked, ranked.shape[-1] - top_k, axis=-1)
    ranked = jnp.where(ranked < kth[:, None], -jnp.inf, ranked)
    below = jnp.cumsum(jax.nn.softmax(ranked, axis=-1), axis=-1) <= 1.0 - top_p
    below = below.at[:, -1].set(False)  # the most likely token always stays
    ranked = jnp.where(below, -jnp.inf, ranked)
    return jnp.take_along_axis(ranked, jnp.argsort(order, axis=-1), axis=-1)


def choose(
    logits: Array, keys: Array, method: Method, temperature: Array, top_k: Array, top_p: Array
) -> Array:
    """Next tokens int32 [B] for float32 logits [B, V], `NO_TOKEN` where they are NaN; row i samples
    with keys[i] alone."""
    if method == "greedy":
        chosen = jnp.argmax(logits, axis=-1)
    else:
        if method == "sampled":
            logits = logits / temperature
        else:
            logits = filter_logits(logits, temperature, top_k, top_p)
        chosen = jax.vmap(jax.random.categorical)(keys, logits)
    of_chosen = jnp.take_along_axis(logits, chosen[:, None], axis=-1)[:, 0]  # NaN is the largest
    return jnp.where(jnp.isnan(of_chosen), NO_TOKEN, chosen).astype(jnp.int32)
