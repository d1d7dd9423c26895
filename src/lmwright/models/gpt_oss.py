"""gpt-oss (https://arxiv.org/abs/2508.10925): blocks of a llama whose feed-forward is a mixture of
experts, with biases everywhere; every second layer sees a window, and the softmax of each head has
a learned score of nothing, its sink.

    scores of a query --+--> softmax --> probabilities of keys, together less than 1
    sink of the head ---+
"""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from jax import Array
from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import Param, Tree
from lmwright.core.stack import Aux
from lmwright.errors import UserError
from lmwright.kernels import select
from lmwright.models.decoder import Decoder, LayerReach
from lmwright.models.layers import Attend
from lmwright.models.moe import AttentionBias, MoeDecoder
from lmwright.nn.attention import Scoring
from lmwright.nn.swiglu_oai import SwigluOai


@section
class GptOss(MoeDecoder):
    """A decoder of the gpt-oss family; its fields are the model."""

    sinks: ClassVar = True
    mlp: ClassVar[SwigluOai] = "swiglu_oai"  # type: ignore[misc]

    kind: Literal["gpt-oss"] = "gpt-oss"
    window: Annotated[
        PositiveInt | None,
        Field(description="Tokens that local layers look at, the query included."),
    ] = 128
    layer_pattern: tuple[LayerReach, ...] = ("local", "global")
    """Reach of each layer; the pattern repeats over all layers."""
    rope_theta: Positive = 150_000.0
    bias: AttentionBias = "attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts.bias != "all":
            raise UserError(
                "model.experts.bias: gpt-oss has biases in its router and experts; write bias = "
                '"all"'
            )
        if self.experts.shared_dim is not None:
            raise UserError("model.experts.shared_dim: gpt-oss has no shared experts; leave it out")
        if self.window is None and self.layer_pattern != ("global",):
            raise UserError(
                'model.layer_pattern: has no effect without model.window; write ["global"], or '
                "give the window too"
            )

    @property
    def reach(self) -> tuple[int | None, tuple[LayerReach, ...]]:
        """The window of local layers, and the pattern of local and global ones."""
        return self.window, self.layer_pattern

    kinds, window_of = Decoder.kinds, Decoder.window_of  # by reach, as most decoders have them

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        return super().layer_spec(kind) | {"sinks": Param("heads", (self.num_heads,), fill=0.0)}

    def hidden(self, w: Tree, batch: Batch, compute: Compute) -> tuple[Array, Aux]:
        """Residual stream after the last norm, [B, T, D], by attention with sinks."""
        return self.hidden_by(select.KERNELS["attention with sinks"](compute), w, batch, compute)

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and experts."""

        def with_sinks(q: Array, k: Array, v: Array, scoring: Scoring) -> Array:
            return attend.run(q, k, v, scoring, w["sinks"])

        return super().layer(kind, w, x, tables, replace(attend, run=with_sinks))
