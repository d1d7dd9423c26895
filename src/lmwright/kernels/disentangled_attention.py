"""Disentangled attention by the kernels of each platform; signature of `nn.disentangled.attention`.

CPU               cpu_disentangled
everything else   nn.disentangled, which holds the scores of all pairs of tokens
"""

from collections.abc import Callable

from jax import Array

from lmwright.core.compute import Compute
from lmwright.kernels import cpu_disentangled
from lmwright.nn import disentangled


def attend_by(compute: Compute) -> Callable[..., Array]:
    """The attention of these settings, for whole rows on a device."""
    return cpu_disentangled.attention if compute.kernels == "cpu" else disentangled.attention
