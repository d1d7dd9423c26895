"""What an objective returns: sums and weights, never means, so that accumulation, packing
and uneven hosts are exact."""

from typing import NamedTuple

from jax import Array


class Loss(NamedTuple):
    """float32 scalars. The gradient is that of `total`; the loss is total over weight."""

    total: Array
    weight: Array
    metrics: dict[str, tuple[Array, Array]]
