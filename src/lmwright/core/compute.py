"""Compute: how a model is evaluated, as opposed to what it is."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from lmwright.core.remat import RematName

Kernels = Literal["reference", "cpu", "tpu", "early tpu"]
ContextAttention = Literal["ring", "all_to_all"]

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


@dataclass(frozen=True)
class Compute:
    """Static choices of one compiled program: activation dtype, what the backward pass
    recomputes, whether layers are unrolled, the set of kernels, tokens of a row whose logits
    exist at once, how attention sees rows that are cut over devices, and the pieces in which
    rows pass through the stages of a pipeline."""

    precision: str = "fp32"
    remat: RematName = "none"
    unroll: bool = False
    kernels: Kernels = "reference"
    loss_chunk_tokens: int = 1024
    context_attention: ContextAttention = "ring"
    num_microbatches: int = 1

    @property
    def dtype(self) -> jnp.dtype:
        return DTYPES[self.precision]
