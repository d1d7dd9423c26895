"""Presets of Bamba, most of whose layers have Mamba-2."""

from typing import Any

from lmwright.presets.rows import Shape, row, sizes


def _bamba(shape: Shape, attention: tuple[int, ...], **fields: Any) -> Any:
    from lmwright.models.bamba import Bamba
    from lmwright.models.hf.window import pattern_of

    kinds = ["full" if i in attention else "mamba" for i in range(shape[2])]
    return Bamba(**sizes(shape), mixer_pattern=tuple(pattern_of(kinds)), **fields)


PRESETS = {
    "bamba-9b": row("9.78 B: Bamba 9B (https://huggingface.co/ibm-ai-platform/Bamba-9B-v2)", _bamba,
        (4096, 14_336, 32, 32, 8), (9, 18, 27), vocab_size=128_256, head_dim=128,
        seq_len=262_144),
}  # fmt: skip
