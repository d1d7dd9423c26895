"""gpt-oss (https://arxiv.org/abs/2508.10925): blocks of a llama whose feed-forward is a mixture of
experts, with biases everywhere; every second layer sees a window, and each head has a sink
(`models.sinks`)."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.errors import UserError
from lmwright.models.decoder import Decoder, LayerReach
from lmwright.models.moe import AttentionBias, MoeDecoder
from lmwright.models.sinks import Sinks
from lmwright.nn.swiglu_oai import SwigluOai


@section
class GptOss(Sinks, MoeDecoder):
    """A decoder of the gpt-oss family; its fields are the model."""

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
