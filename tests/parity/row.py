"""One row of the table of families, and the parts that many rows share."""

from dataclasses import dataclass, field
from typing import Any

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
    "max_position_embeddings": 192, "rms_norm_eps": 3e-4, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OLD = {"original_max_position_embeddings": 13}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def rope(kind: str = "default", **said: Any) -> dict[str, Any]:
    """rope_parameters with a theta of its own."""
    return {"rope_type": kind, "rope_theta": 5003.0, **said}


@dataclass(frozen=True)
class Row:
    """One model of the table."""

    architecture: str
    config: dict[str, Any] = field(default_factory=dict)
    """What differs from SIZES; None takes a key out."""
    gradients: bool = True
    """Whether its gradients are compared too; else its logits alone."""
    generates: bool = False
    """Whether its text is compared token for token."""

    @property
    def said(self) -> dict[str, Any]:
        """Its config.json."""
        whole = SIZES | {"rope_parameters": rope()} | self.config
        return {k: v for k, v in whole.items() if v is not None}
