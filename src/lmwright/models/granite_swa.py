"""Granite with windows (https://huggingface.co/ibm-granite): Granite's blocks, of which three of
four look through a window, with a sink in each head. Local and global layers may rotate otherwise,
or not at all."""

from typing import Annotated, Literal

from jax import Array
from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.param import Tree
from lmwright.core.stack import Aux
from lmwright.models.by_reach import no_rotations, reach_in
from lmwright.models.decoder import Head, LayerReach
from lmwright.models.granite import Multiplied
from lmwright.models.layers import Attend
from lmwright.models.sinks import Sinks
from lmwright.nn.mlp import GatedMlp
from lmwright.nn.rope import rope_tables


@section
class TurnsByReach(Sinks, Multiplied):
    """Granite's blocks with sinks, whose windows and rotations are by the reach of a layer."""

    window: Annotated[
        PositiveInt, Field(description="Tokens that local layers look at, the query included.")
    ] = 128
    layer_pattern: Annotated[
        tuple[LayerReach, ...],
        Field(description="Reach of each layer; the pattern repeats over all layers."),
    ] = ("global", "local", "local", "local")
    local_rope_theta: Annotated[
        Positive | None,
        Field(description="Theta of local layers; that of all layers if unset."),
    ] = None
    rotating_layers: Annotated[
        Literal["all", "local", "global", "none"],
        Field(description="Layers that rotate queries and keys."),
    ] = "all"

    def theta_of(self, kind: str) -> float | None:
        """Theta of layers of this kind; None where they do not rotate."""
        reach = reach_in(kind)
        if self.rotating_layers not in ("all", reach):
            return None
        return (self.local_rope_theta if reach == "local" else None) or self.rope_theta

    def tables(self, positions: Array, length: int) -> Tree:
        """Rotations for positions [B, T] in rows of `length`, by the reach of a layer."""
        thetas = {reach_in(kind): self.theta_of(kind) for kind in set(self.kinds)}
        return {
            reach: no_rotations(positions) if theta is None else rope_tables(
                positions, self.rotary_dim, theta, self.rope_scaling, length=length
            )
            for reach, theta in thetas.items()
        }  # fmt: skip


@section
class GraniteSwa(TurnsByReach):
    """A decoder of the Granite models with windows; its fields are the model."""

    kind: Literal["granite-swa"] = "granite-swa"
    mlp_dim: PositiveInt
    head: Head = "tied"
    mlp: GatedMlp = "swiglu"
    """Gate of the feed-forward."""
    bias: Literal["none", "attention", "mlp", "all"] = "none"
    """Projections that add a bias."""

    @property
    def reach(self) -> tuple[int | None, tuple[LayerReach, ...]]:
        """The window of local layers, and the pattern of local and global ones."""
        return self.window, self.layer_pattern

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and feed-forward."""
        return super().layer(kind, w, x, tables[kind], attend)
