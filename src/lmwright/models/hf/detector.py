"""Detectors in Hugging Face: the table of their encoder, with Microsoft's names for the head.

DebertaV2Model    DebertaV2ForMaskedLM with mask_predictions in place of lm_predictions

transformers has no class with this head; as the encoder of any of its classes it reads the rest.
Nor has it one with the mask decoder of Microsoft's generators, whose positions it leaves out.
"""

from collections.abc import Mapping
from typing import Any

from lmwright.models.hf.table import Json
from lmwright.models.text_part import MASK_DECODER

DETECTORS = {"DebertaV2Model": "DebertaV2ForMaskedLM"}
"""Architecture of a detector, and that of its encoder with the head over the vocabulary."""
HEAD_PREFIX = "mask_predictions."
HEAD_WEIGHTS = {
    f"detector.{ours}{end}": f"{HEAD_PREFIX}{theirs}.{kind}"
    for ours, theirs in {"norm": "LayerNorm", "dense": "dense", "out": "classifier"}.items()
    for end, kind in (("", "weight"), ("_bias", "bias"))
}

POSITIONS = "deberta.embeddings.position_embeddings.weight"


class DetectorHf:
    """The Hugging Face form of a detector."""

    architectures = tuple(DETECTORS)

    def __init__(self, model: Any):
        self.name = model.encoder.hf.name
        self.weights: Mapping[str, str] = {**model.encoder.hf.weights, **HEAD_WEIGHTS}

    def config(self, model: Any) -> Json:
        """config.json of a detector, tokenizer ids left out. Raises UserError for what it cannot
        say."""
        config = model.encoder.hf.config(model.encoder)
        whole = {encoder: detector for detector, encoder in DETECTORS.items()}
        return config | {"architectures": [whole[config["architectures"][0]]]}


class MaskDecoderHf:
    """The Hugging Face form of an encoder with a mask decoder; positions have Microsoft's name."""

    architectures = ("DebertaV2ForMaskedLM",)

    def __init__(self, model: Any):
        self.name = model.encoder.hf.name
        self.weights: Mapping[str, str] = {**model.encoder.hf.weights, "positions": POSITIONS}

    def config(self, model: Any) -> Json:
        """config.json of the model, tokenizer ids left out. Raises UserError for what it cannot
        say."""
        return model.encoder.hf.config(model.encoder) | {MASK_DECODER: "enhanced"}
