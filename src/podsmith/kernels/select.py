"""Which implementation runs where. Every kernel equals its `nn/` twin."""

from collections.abc import Callable

from jax import Array

from podsmith.core.dtypes import Compute
from podsmith.nn import attention, xent


def causal_attention(how: Compute) -> Callable[..., Array]:
    """Causal self-attention for this platform; signature of `nn.attention.causal_attention`."""
    return attention.causal_attention


def cross_entropy(how: Compute) -> Callable[..., xent.Xent]:
    """Chunked cross-entropy for this platform; signature of `nn.xent.chunked_xent`."""
    return xent.chunked_xent
