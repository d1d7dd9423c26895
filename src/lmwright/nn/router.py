"""Routers: which experts a token goes to, with which shares, and what is measured of it.

    logits [B, T, E] --softmax or sigmoid--> scores --+ bias, best groups--> the k best: experts
                                                |                               |
                                                +---------> their scores -------+--> shares

Softmax routing: Mixtral (https://arxiv.org/abs/2401.04088) and, with the shares left as they
come out of the softmax, OLMoE (https://arxiv.org/abs/2409.02060). Sigmoid routing with groups
and a bias that balances without a loss: DeepSeek-V3 (https://arxiv.org/abs/2412.19437). Each choice
against those that come near it: SparseMixer-v2 (https://arxiv.org/abs/2409.12136), without draws.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

TINY = 1e-20  # keeps a sum of sigmoids that are all zero finite, as DeepSeek's code does


@dataclass(frozen=True)
class Routing:
    """Settings for choosing k of E experts.

    `shares` are normalized over the chosen experts ("chosen": for softmax the same as taking
    the softmax after the choice), left as they are among all ("all"), or of a softmax for each
    choice over itself and the experts left whose logits are less by at most `margin` times the
    larger size of both ("near"); then multiplied by `scale`. Only the `groups_per_token` best of
    `num_groups` equal groups of experts are chosen from; a group is as good as its
    `best_of_group` best experts together.
    """

    experts_per_token: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    shares: Literal["chosen", "all", "near"] = "chosen"
    scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 2
    margin: float | None = None


class Choice(NamedTuple):
    """Routing of tokens: experts int32 and routing weights float32, [B, T, k], and all scores [B,
    T, E]."""

    experts: Array
    shares: Array
    scores: Array


def choose(logits: Array, bias: Array | None, routing: Routing) -> Choice:
    """The choice for float32 logits [B, T, E]; a bias [E] has a say in the choice alone."""
    softmax = routing.score == "softmax"
    scores = jax.nn.softmax(logits, axis=-1) if softmax else jax.nn.sigmoid(logits)
    if routing.margin is not None:
        experts, shares = _choose_near(logits, routing.experts_per_token, routing.margin)
        return Choice(experts, shares * routing.scale, scores)
    ranked = jax.lax.stop_gradient(scores if bias is None else scores + bias)
    if routing.num_groups > 1:
        ranked = _best_groups(ranked, routing)
    experts = jax.lax.top_k(ranked, routing.experts_per_token)[1]
    # by comparison: a gather's gradient is a scatter, which TPUs do one by one
    shares = jnp.sum(jnp.where(_is_chosen(experts, logits.shape[-1]), scores[..., None, :], 0), -1)
    if routing.shares == "chosen":
        shares /= jnp.sum(shares, axis=-1, keepdims=True) + (0 if softmax else TINY)
    return Choice(experts, shares * routing.scale, scores)


def _choose_near(logits: Array, k: int, margin: float) -> tuple[Array, Array]:
    """The k best experts, int32 [B, T, k], and shares, float32 [B, T, k], each by a softmax over
    the experts left that come near it. No gradient flows through what is near."""
    taken, experts, shares = jnp.zeros(logits.shape, bool), [], []
    for _ in range(k):
        left = jax.lax.stop_gradient(jnp.where(taken, -jnp.inf, logits))
        best = jnp.max(left, axis=-1, keepdims=True)
        near = best - left <= margin * jnp.maximum(jnp.abs(left), best)
        expert = jnp.argmax(left, axis=-1)
        own = expert[..., None] == jnp.arange(logits.shape[-1])
        weights = jax.nn.softmax(jnp.where(near & ~taken, logits, -jnp.inf), axis=-1)
        shares.append(jnp.sum(jnp.where(own, weights, 0), axis=-1))
        experts.append(expert.astype(jnp.int32))
        taken |= own
    return jnp.stack(experts, axis=-1), jnp.stack(shares, axis=-1)


def _best_groups(ranked: Array, routing: Routing) -> Array:
    """Scores with all but the best groups at minus infinity."""
    grouped = ranked.reshape(*ranked.shape[:-1], routing.num_groups, -1)
    worth = jnp.sum(
        jax.lax.top_k(grouped, min(routing.best_of_group, grouped.shape[-1]))[0], axis=-1
    )
    best = jax.lax.top_k(worth, routing.groups_per_token)[1]
    in_best = jnp.any(_is_chosen(best, routing.num_groups), axis=-2)
    return jnp.where(in_best[..., None], grouped, -jnp.inf).reshape(ranked.shape)


def _is_chosen(ids: Array, count: int) -> Array:
    """bool [..., k, count]: True at the expert, of `count`, that each of ids [..., k] is."""
    return ids[..., None] == jnp.arange(count)


def router_sums(
    choice: Choice, logits: Array, real: Array, dropped: Array, bias: Array | None
) -> dict[str, Array]:
    """Statistics of a layer's router, as float32 sums over tokens: `real` [B, T] is False at
    padding, which is not counted; `dropped` [B, T] counts choices without a slot.

    counts, probs    [E]: choices, and scores that sum to one for each token
    tokens, layers   what the sums are of
    busiest          share of all choices that goes to the most chosen expert
    entropy, z       of the scores; squared log of the softmax's sum
    balance          a number whose gradient with respect to `bias` is each expert's choices
                     above the mean; only where there is a bias
    """
    num_experts = logits.shape[-1]
    weight = real.astype(jnp.float32)[..., None]
    chosen = jnp.any(_is_chosen(choice.experts, num_experts), axis=-2)
    counts = jnp.sum(chosen * weight, axis=(0, 1))
    probs = choice.scores / (jnp.sum(choice.scores, axis=-1, keepdims=True) + TINY)
    entropy = -jnp.sum(probs * jnp.log(probs + TINY) * weight)
    z = jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1, keepdims=True)) * weight)
    sums = {
        "counts": counts,
        "probs": jnp.sum(probs * weight, axis=(0, 1)),
        "tokens": jnp.sum(weight),
        "layers": jnp.ones(()),
        "busiest": jnp.max(counts) / jnp.maximum(jnp.sum(counts), 1.0),
        "entropy": entropy,
        "z": z,
        "dropped": jnp.sum(dropped * weight[..., 0]),
    }
    if bias is not None:
        above = jax.lax.stop_gradient(counts - jnp.mean(counts))
        sums["balance"] = jnp.sum(bias * above)
    return sums


def load_balance(counts: Array, probs: Array, tokens: Array) -> Array:
    """E times the sum over experts of (choices a token) x (mean score), from sums over tokens
    and layers: k where all experts are equally busy.

    This is `load_balancing_loss_func` of transformers, which joins all layers before it
    multiplies; Switch Transformers (https://arxiv.org/abs/2101.03961) do so layer by layer.
    """
    tokens = jnp.maximum(tokens, 1.0)
    return counts.shape[0] * jnp.sum(counts / tokens * (probs / tokens))
