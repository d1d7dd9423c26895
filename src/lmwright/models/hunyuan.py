"""Hunyuan's dense models (https://huggingface.co/tencent/Hunyuan-7B-Instruct): a llama with norms
of each head of queries and keys, behind the rotation."""

from typing import ClassVar, Literal

from jax import Array

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Tree
from lmwright.core.weight import name_result
from lmwright.models import block
from lmwright.models.decoder import Head
from lmwright.models.layers import Attend
from lmwright.models.llama import PreNorm
from lmwright.nn.attention import Scoring
from lmwright.nn.mlp import GatedMlp


class NormedBehind(PreNorm):
    """Blocks with norms of each head of queries and keys behind the rotation."""

    qk_norm: ClassVar = "head"

    def mixed(self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend) -> Array:
        """[B, T, D] that attention adds to x [B, T, D]."""
        q, k, v = block.project(w, self.attention_input(w, x))
        q, k, v = self.normed(w, *self.rotated(q, k, tables), v)
        q, k = map(name_result, (q, k))
        return block.output(w, attend(q, k, v, Scoring(self.score_scale, self.window_of(kind))))


@section
class Hunyuan(NormedBehind):
    """A decoder of Hunyuan's dense models; its fields are the model."""

    kind: Literal["hunyuan"] = "hunyuan"
    mlp_dim: PositiveInt
    head: Head = "tied"
    bias: Literal["none", "attention"] = "none"
    """Projections that add a bias."""
    mlp: GatedMlp = "swiglu"
    """Gate of the feed-forward."""
