"""Batch: the one shape of training input, from the loader to the objective."""

from dataclasses import dataclass

import jax
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of packed tokens; arrays are [..., B, T].

    Targets are the objective's business: `loss_weight` belongs to a token as a *target*.
    """

    tokens: Array  # int32 [B, T]
    segment_ids: Array  # int32 [B, T]; 0 is padding, documents count from 1
    positions: Array  # int32 [B, T]; restart at each segment
    loss_weight: Array  # float32 [B, T]; weight of predicting this very token
