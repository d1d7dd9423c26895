"""The first Gemma (https://arxiv.org/abs/2403.08295): pre-norm blocks as in a llama. Norms are
times 1 + weight, embeddings times the root of their width."""

from typing import Literal

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.param import Tree
from lmwright.models.decoder import Head
from lmwright.models.from_zero import norm_from_zero
from lmwright.models.gemma import ScaledEmbedding
from lmwright.models.llama import PreNorm
from lmwright.nn.mlp import GatedMlp


@section
class Gemma1(ScaledEmbedding, PreNorm):
    """A decoder of the first Gemma models; its fields are the model."""

    kind: Literal["gemma1"] = "gemma1"
    mlp_dim: PositiveInt
    norm_eps: Positive = 1e-6
    head: Head = "tied"
    mlp: GatedMlp = "geglu"
    """Gate of the feed-forward."""

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        names = ("attention_norm", "mlp_norm")
        norms = {name: norm_from_zero("norm", self.embed_dim) for name in names}
        return super().layer_spec(kind) | norms
