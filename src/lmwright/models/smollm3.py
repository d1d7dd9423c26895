"""SmolLM3 (https://huggingface.co/HuggingFaceTB/SmolLM3-3B): blocks of a llama, of which every
fourth does not rotate its queries and keys (NoPE, https://arxiv.org/abs/2501.18795)."""

from typing import Literal

from jax import Array

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.param import Tree
from lmwright.core.stack import Aux
from lmwright.models.by_reach import no_rotations
from lmwright.models.decoder import Head, repeated
from lmwright.models.layers import Attend
from lmwright.models.llama import PreNorm

Rotation = Literal["rope", "nope"]


@section
class SmolLm3(PreNorm):
    """A decoder of the SmolLM3 family; its fields are the model."""

    kind: Literal["smollm3"] = "smollm3"
    mlp_dim: PositiveInt
    rope_pattern: tuple[Rotation, ...] = ("rope", "rope", "rope", "nope")
    """Whether a layer rotates queries and keys; the pattern repeats over all layers."""
    rope_theta: Positive = 2_000_000.0
    norm_eps: Positive = 1e-6
    head: Head = "tied"
    bias: Literal["none", "attention", "mlp", "all"] = "none"
    """Projections that add a bias."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer: whether it rotates."""
        return repeated("rope_pattern", self.rope_pattern, self.num_layers, '["rope"]')

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, by the kind of a layer: of no
        dimension where it does not rotate."""
        return {"rope": super().tables(positions, length), "nope": no_rotations(positions)}

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and feed-forward."""
        return super().layer(kind, w, x, tables[kind], attend)
