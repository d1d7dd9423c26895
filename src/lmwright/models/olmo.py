"""The first OLMo (https://arxiv.org/abs/2402.00838): blocks of a llama whose layer norms have no
weights; queries, keys and values within a limit."""

from typing import ClassVar, Literal

from jax import Array

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Tree
from lmwright.models.layer_normed import LayerNormed
from lmwright.models.limited import QkvLimit, limited
from lmwright.nn.mlp import GatedMlp


@section
class Olmo(LayerNormed):
    """A decoder of the first OLMo family; its fields are the model."""

    norm_eps: ClassVar[float] = 1e-5  # type: ignore[misc]

    kind: Literal["olmo"] = "olmo"
    mlp_dim: PositiveInt
    mlp: GatedMlp = "swiglu"
    """Gate of the feed-forward."""
    bias: Literal["none", "attention"] = "none"
    """Projections that add a bias."""
    qkv_limit: QkvLimit = None

    def norms_spec(self, *names: str) -> Tree:
        """Nothing: norms have no weights."""
        return {}

    def normed(self, w: Tree, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values within the limit."""
        return limited(self.qkv_limit, q, k, v)
