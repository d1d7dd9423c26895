"""Detectors in Hugging Face: the table of their encoder, with Microsoft's names for the head.

DebertaV2Model    DebertaV2ForMaskedLM with mask_predictions in place of lm_predictions

transformers has no class with this head; as the encoder of any of its classes it reads the rest.
Nor has it one with the mask decoder of Microsoft's generators, whose positions it leaves out.
"""

from lmwright.errors import UserError
from lmwright.models.hf.embedder import VECTORS
from lmwright.models.hf.over import Over
from lmwright.models.hf.pairs import Json, only_written
from lmwright.models.hf.table import with_biases
from lmwright.models.text_part import MASK_DECODER, architecture_of

HEAD_PREFIX = "mask_predictions."
HEAD_WEIGHTS = with_biases({
    f"detector.{ours}": f"{HEAD_PREFIX}{theirs}"
    for ours, theirs in {"norm": "LayerNorm", "dense": "dense", "out": "classifier"}.items()
})  # fmt: skip
POSITIONS = "deberta.embeddings.position_embeddings.weight"


class _MaskDecoderOver(Over):
    """Form that has the architecture of its encoder, and a key of its own."""

    def of_encoder(self, config: Json, where: str) -> Json | None:
        """config.json of the encoder alone, None for one of another form. Raises UserError for
        another decoder."""
        if (kind := config.get(MASK_DECODER)) is None:
            return None
        if kind != "enhanced" or architecture_of(config) not in self.encoders():
            raise UserError(f"{where}: {MASK_DECODER} = {kind!r} is not known; remove it")
        return {name: value for name, value in config.items() if name != MASK_DECODER}


DETECTOR = Over(
    lambda table: table.detector,
    lambda table: {**table.weights, **HEAD_WEIGHTS},
    unless=VECTORS,
)
MASK_DECODER_FORM = _MaskDecoderOver(
    lambda table: table.detector and table.architectures[0],
    lambda table: {**table.weights, "positions": POSITIONS},
    (only_written(**{MASK_DECODER: "enhanced"}),),
)
