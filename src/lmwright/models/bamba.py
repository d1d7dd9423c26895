"""Bamba (https://huggingface.co/blog/bamba): llama's blocks, of which most have Mamba-2 in the
place of attention; the others rotate a part of each head.

    x --+--> norm --> mamba or attention --+--> norm --> mlp --+-->
        +----------------------------------^ +-----------------^
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmwright.config.run import PositiveInt, section
from lmwright.models.mamba import Mamba


@section
class Bamba(Mamba):
    """A decoder of the Bamba family; its fields are the model."""

    mlp: ClassVar[Literal["swiglu"]] = "swiglu"  # type: ignore[misc]

    kind: Literal["bamba"] = "bamba"
    mlp_dim: PositiveInt
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of each head that is rotated, from its first dim on."""
    mamba_num_heads: PositiveInt = 128
    """Heads of Mamba layers, each with a memory: a multiple of `mamba_num_groups`."""
    bias: Literal["none", "attention", "mlp", "all"] = "none"
    """Projections that add a bias, beside those of Mamba-2, which have none."""

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)
