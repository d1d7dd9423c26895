"""Supervised fine-tuning: next tokens of what an assistant says, and of nothing else.

Which tokens these are is in the data (`loss_weight`, see docs/conversations.md).
"""

from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.config.run import Fraction, NonNegative, section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model, Objective
from lmwright.core.param import Tree
from lmwright.objectives.clm import next_token_loss


@section
class Sft(Objective):
    """Next-token prediction of completions."""

    kind: Literal["sft"] = "sft"
    z_loss: NonNegative = 0.0
    """Weight of log(Z)^2, which keeps logits from drifting."""
    label_smoothing: Fraction = 0.0
    """Share of each target that is spread over the whole vocabulary."""
    neftune_alpha: NonNegative = 0.0
    """Noise on the embeddings while training (https://arxiv.org/abs/2310.05914); 5 is usual."""

    sums_head_once: ClassVar[bool] = True

    @property
    def draws_noise(self) -> bool:
        """True with noise on the embeddings."""
        return self.neftune_alpha > 0

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Sums over the batch's targets; `key` [B] is for the noise of each row."""
        noisy = w
        if self.neftune_alpha:
            noise = embedding_noise(batch, model.embed_dim, self.neftune_alpha, key)
            noisy = model.with_noise(w, noise.astype(compute.dtype))
        options = {"z_loss": self.z_loss, "smoothing": self.label_smoothing}
        return next_token_loss(model, noisy, w, batch, compute, **options)

    def for_eval(self) -> "Sft":
        """Objective for evaluation, without noise."""
        return replace(self, neftune_alpha=0.0)


def embedding_noise(batch: Batch, embed_dim: int, alpha: float, keys: Array) -> Array:
    """NEFTune's noise, float32 [B, T, D], by a key for each row: uniform in +-alpha / sqrt(L D)
    for a token of a segment of L tokens, none on padding."""
    ids = batch.segment_ids  # [B, T]
    B, T = ids.shape
    rows = jnp.arange(B)[:, None]
    lengths = jnp.zeros((B, T + 1), jnp.float32).at[rows, ids].add(1.0)[rows, ids]  # [B, T]
    size = jnp.where(ids > 0, alpha / jnp.sqrt(lengths * embed_dim), 0.0)
    draw = partial(jax.random.uniform, shape=(T, embed_dim), minval=-1.0, maxval=1.0)
    return size[..., None] * jax.vmap(draw)(keys)
