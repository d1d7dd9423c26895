"""Masked diffusion models in Hugging Face: EuroBERT, whose blocks are the same and which opens
without remote code, and a key that tells them from encoders."""

from typing import Any

from lmwright.errors import UserError
from lmwright.models.hf.eurobert import EuroBertHf
from lmwright.models.hf.table import Json

KEY = "masked_diffusion"
PREDICTS = ("own", "next")


class LladaHf(EuroBertHf):
    """Both directions of the family's Hugging Face form."""

    name = "masked diffusion"
    mark = KEY

    def own_config(self, model: Any, config: Json) -> Json:
        """Beside EuroBERT's, which token the output at a place predicts."""
        return super().own_config(model, config) | {KEY: {"predicts": model.predicts}}

    def own_fields(self, config: Json, fields: Json, where: str) -> Json:
        """Which token the output at a place predicts."""
        predicts = config[KEY].get("predicts", "own")
        if predicts not in PREDICTS:
            raise UserError(
                f"{where}: {KEY}.predicts = {predicts!r} is neither {' nor '.join(PREDICTS)}"
            )
        return super().own_fields(config, fields, where) | {"predicts": predicts}
