"""Presets of Mamba-2, and of Bamba, most of whose layers have it."""

from typing import Any

from lmwright.presets.rows import Shape, row, sizes


def _bamba(shape: Shape, attention: tuple[int, ...], **fields: Any) -> Any:
    from lmwright.models.bamba import Bamba
    from lmwright.models.hf.window import pattern_of

    kinds = ["full" if i in attention else "mamba" for i in range(shape[2])]
    return Bamba(**sizes(shape), mixer_pattern=tuple(pattern_of(kinds)), **fields)


def _mamba2(embed_dim: int, num_layers: int, **fields: Any) -> Any:
    from lmwright.models.mamba2 import Mamba2

    return Mamba2(
        embed_dim=embed_dim, num_layers=num_layers, mamba_num_heads=embed_dim // 32, **fields
    )  # fmt: skip


PRESETS = {
    "mamba2-130m": row("0.129 B: Mamba-2 130M (https://huggingface.co/state-spaces/mamba2-130m)",
        _mamba2, 768, 24, vocab_size=50_288, seq_len=2048, head="tied"),
    "mamba-codestral-7b": row(
        "7.29 B: Mamba Codestral 7B (https://huggingface.co/mistralai/Mamba-Codestral-7B-v0.1)",
        _mamba2, 4096, 64, vocab_size=32_768, seq_len=262_144, mamba_num_groups=8),
    "bamba-9b": row("9.78 B: Bamba 9B (https://huggingface.co/ibm-ai-platform/Bamba-9B-v2)", _bamba,
        (4096, 14_336, 32, 32, 8), (9, 18, 27), vocab_size=128_256, head_dim=128,
        seq_len=262_144),
}  # fmt: skip
