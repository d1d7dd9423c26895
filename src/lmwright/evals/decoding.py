"""The programs of generation: prompts into a cache, and tokens out of it.

prompts [B, T] --prefill--> logits, cache --decode, a few steps a call--> tokens, logits, cache
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from lmwright.core.compute import LANES, Compute
from lmwright.core.param import Tree
from lmwright.evals.sampling import Method, Sampling, choose
from lmwright.models import cached
from lmwright.models.decoder import Decoder

Knobs = tuple[ArrayLike, ArrayLike, ArrayLike]
"""Temperature, top-k and top-p."""


def calls_ahead() -> int:
    """Calls that are under way at once: a card computes while the host reads."""
    return 1 if jax.default_backend() == "cpu" else 2


def row_keys(seed: int, numbers: list[int], num_rows: int) -> Array:
    """Keys [B] of rows with such numbers, and of padding behind them."""
    return keys_of(seed, np.asarray(numbers + [0] * (num_rows - len(numbers)), np.uint32))


def keys_of(seed: ArrayLike, numbers: ArrayLike) -> Array:
    """Keys [B] of the draws of rows with numbers [B]."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers)


def knobs_of(settings: Sampling, model: Decoder) -> Knobs:
    """The settings that a program takes as numbers."""
    return (
        np.float32(settings.temperature or 1.0),
        np.int32(min(settings.top_k or model.vocab_size, model.vocab_size)),
        np.float32(settings.top_p or 1.0),
    )


def rounded_tokens(size: int, compute: Compute) -> int:
    """Tokens of a padded row: few values, for few compilations, and little padding. On TPUs, whose
    attention kernels need it, a multiple of 128."""
    step = LANES if compute.platform == "tpu" else max(16, (1 << (size - 1).bit_length()) // 8)
    return -(-size // step) * step


def turns_with_length(model: Decoder) -> bool:
    """True for a model whose rotations depend on the length of a row."""
    scaling = getattr(model, "rope_scaling", None)
    return scaling is not None and scaling.kind in ("dynamic", "longrope")


@partial(jax.jit, static_argnums=(0, 1, 2))
def prefill(
    model: Decoder, compute: Compute, length: int, w: Tree, tokens: Array, valid: Array
) -> tuple[Array, Tree]:
    """Logits [B, V] after the prompts [B, T], and their kv cache of `length`."""
    cache = cached.new_cache(model, tokens.shape[0], length, compute)
    hidden, cache = cached.extend(model, w, tokens, valid, cache, compute, empty_cache=True)
    return model.logits(w, hidden[:, -1:])[:, 0], cache


def decode_steps(
    model: Decoder, compute: Compute, steps: int, method: Method, w: Tree, logits: Array,
    cache: Tree, keys: Array, first: Array, knobs: Knobs,
) -> tuple[Array, Array, Tree]:  # fmt: skip
    """`steps` new tokens [B, steps], the logits [B, V] after them and the longer cache; `first`
    tokens, one number or [B], were made before."""

    def one(carry: tuple[Array, Tree], step: Array) -> tuple[tuple[Array, Tree], Array]:
        logits, cache = carry
        draws = jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(first + step, keys.shape))
        token = choose(logits, draws, method, *knobs)
        valid = jnp.ones((token.shape[0], 1), bool)
        hidden, cache = cached.extend(model, w, token[:, None], valid, cache, compute)
        return (model.logits(w, hidden)[:, 0], cache), token

    (logits, cache), tokens = jax.lax.scan(one, (logits, cache), jnp.arange(steps))
    return tokens.T, logits, cache


decode = jax.jit(decode_steps, static_argnums=(0, 1, 2, 3), donate_argnums=(6,))
