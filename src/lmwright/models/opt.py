"""OPT (https://arxiv.org/abs/2205.01068): a decoder of pre-norm blocks with layer norms, biases
everywhere, an mlp without a gate and learned positions, of which two rows come before the first.
"""

from typing import ClassVar, Literal

from jax import Array

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Tree
from lmwright.models.decoder import Head
from lmwright.models.layer_normed import LayerNormed
from lmwright.models.learned_positions import LearnedPositions
from lmwright.models.own_keys import refuse_groups
from lmwright.nn.mlp import PlainMlp


@section
class Opt(LearnedPositions, LayerNormed):
    """A decoder of the OPT family; its fields are the model."""

    own_keys: ClassVar[bool] = True
    first_row: ClassVar[int] = 2
    norm_eps: ClassVar[float] = 1e-5  # type: ignore[misc]

    kind: Literal["opt"] = "opt"
    mlp_dim: PositiveInt
    mlp: PlainMlp = "relu"
    """Activation of the feed-forward."""
    head: Head = "tied"
    bias: Literal["none", "all"] = "all"
    """Projections that add a bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_groups(self)

    def rotated(self, q: Array, k: Array, tables: Tree) -> tuple[Array, Array]:
        """Queries and keys as they are."""
        return q, k
