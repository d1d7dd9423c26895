"""mLSTM of whole rows by the kernels of each platform; signature of `nn.mlstm.mlstm`.

TPU from v4 on     tpu_mlstm, on each device's own rows and heads, where chunks fit it
everything else    nn.mlstm, whose chunks the compiler puts together
"""

from collections.abc import Callable

from jax import Array

from lmwright.core.compute import Compute
from lmwright.kernels import select
from lmwright.nn.mlstm import mlstm


def mix_by(compute: Compute) -> Callable[..., Array]:
    """The mLSTM of these settings."""
    return select.KERNELS["tpu mlstm"] if compute.kernels == "tpu" else mlstm
