"""Presets of Granite 4, dense ones and with experts, most of whose layers have Mamba-2.

Where published, multipliers follow from the sizes: attention scores are divided by `head_dim`,
and logits by `embed_dim` / 256.
"""

from typing import Any

from lmwright.presets.rows import Shape, row, sizes

TEN = (*("mamba",) * 5, "full", *("mamba",) * 4)
"""Mixers of ten layers."""
SMALLEST = (
    *("mamba",) * 10, "full", *("mamba",) * 2, "full", *("mamba",) * 3, "full", *("mamba",) * 9,
    "full",
)  # fmt: skip
"""Of 28 layers, and of four more."""


def _granite4(shape: Shape, mamba_num_heads: int, **fields: Any) -> Any:
    from lmwright.models import KINDS
    from lmwright.models.experts import Experts

    embed_dim, _, _, num_heads, _ = shape
    head_dim, experts = embed_dim // num_heads, fields.pop("experts", None)
    usual = {
        "vocab_size": 100_352, "head_dim": head_dim, "seq_len": 131_072, "mixer_pattern": TEN,
        "embedding_multiplier": 12.0, "attention_multiplier": 1 / head_dim,
        "residual_multiplier": 0.22, "logits_scaling": embed_dim / 256,
    }  # fmt: skip
    more = {"experts": Experts(**experts)} if experts else {}
    kind = KINDS["granite4-moe" if experts else "granite4"]
    return kind(**sizes(shape), mamba_num_heads=mamba_num_heads, **(usual | more | fields))


PRESETS = {
    "granite-4.0-h-350m": row(
        "0.340 B: Granite 4.0 H 350M (https://huggingface.co/ibm-granite/granite-4.0-h-350m)",
        _granite4, (768, 2048, 32, 12, 4), 48, mamba_head_dim=32, mixer_pattern=SMALLEST,
        seq_len=32_768, residual_multiplier=0.246),
    "granite-4.0-h-1b": row(
        "1.46 B: Granite 4.0 H 1B (https://huggingface.co/ibm-granite/granite-4.0-h-1b)",
        _granite4, (1536, 4096, 40, 12, 4), 48),
    "granite-4.0-h-micro": row(
        "3.19 B: Granite 4.0 H Micro (https://huggingface.co/ibm-granite/granite-4.0-h-micro)",
        _granite4, (2048, 8192, 40, 32, 8), 64),
    "granite-4.0-h-tiny": row(
        "6.94 B, 1.47 B active: Granite 4.0 H Tiny "
        "(https://huggingface.co/ibm-granite/granite-4.0-h-tiny)",
        _granite4, (1536, 1024, 40, 12, 4), 48,
        experts=dict(num_experts=64, experts_per_token=6, mlp_dim=512, balance_loss=0.001)),
    "granite-4.0-h-small": row(
        "32.2 B, 8.8 B active: Granite 4.0 H Small "
        "(https://huggingface.co/ibm-granite/granite-4.0-h-small)",
        _granite4, (4096, 1536, 40, 32, 8), 128,
        experts=dict(num_experts=72, experts_per_token=10, mlp_dim=768, balance_loss=0.001)),
}  # fmt: skip
