"""FANformer has no form in Hugging Face."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.table import Table


class FanformerHf(Table):
    """A table without architectures: nothing is read, and to write is refused."""

    name = "FANformer"
    model_types: ClassVar = {}

    def architecture(self, model: Any) -> str:
        """Raises UserError: no program computes these layers."""
        raise UserError(
            f"model.kind: no program but lmwright computes the layers of {model.kind!r}, neither "
            "transformers nor a reader of GGUF; keep the run directory"
        )
