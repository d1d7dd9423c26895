"""Presets of Granite 3 with experts, with the shapes of their config.json."""

from typing import Any

from lmwright.presets.rows import row


def _granite_moe(
    embed_dim: int, num_layers: int, num_heads: int, num_experts: int, rope_theta: float
) -> Any:
    from lmwright.models.experts import Experts
    from lmwright.models.granite_moe import GraniteMoe

    return GraniteMoe(
        embed_dim=embed_dim, num_layers=num_layers, num_heads=num_heads, num_kv_heads=8,
        vocab_size=49_152, head_dim=64, seq_len=131_072, rope_theta=rope_theta,
        embedding_multiplier=12.0, attention_multiplier=1 / 64, residual_multiplier=0.22,
        logits_scaling=6.0,
        experts=Experts(
            num_experts=num_experts, experts_per_token=8, mlp_dim=512, balance_loss=0.001
        ),
    )  # fmt: skip


PRESETS = {
    "granite-3.1-1b-a400m": row(
        "1.33 B, 0.429 B active: Granite 3.1 1B A400M "
        "(https://huggingface.co/ibm-granite/granite-3.1-1b-a400m-base)",
        _granite_moe, 1024, 24, 16, 32, 1_500_000.0),
    "granite-3.1-3b-a800m": row(
        "3.30 B, 0.883 B active: Granite 3.1 3B A800M "
        "(https://huggingface.co/ibm-granite/granite-3.1-3b-a800m-base)",
        _granite_moe, 1536, 32, 24, 40, 10_000_000.0),
}  # fmt: skip
