"""Presets of Falcon-H1, with the published multipliers.

Of the larger one they follow from those of the smaller, which is a third as wide and has half the
numbers in a memory.
"""

from typing import Any

from lmwright.presets.rows import Shape, row, sizes

ROOT = 2**0.5


def _falcon_h1(shape: Shape, **fields: Any) -> Any:
    from lmwright.models.falcon_h1 import FalconH1

    return FalconH1(**sizes(shape), embedding_multiplier=4 * ROOT, **fields)


PRESETS = {
    "falcon-h1-0.5b": row(
        "0.521 B: Falcon-H1 0.5B (https://arxiv.org/abs/2507.22448)", _falcon_h1,
        (1024, 2048, 36, 8, 2), vocab_size=32_784, head_dim=64, seq_len=16_384,
        mamba_state_dim=128, mamba_norm="none", key_multiplier=0.39062499999999994,
        attention_out_multiplier=0.9375, ssm_in_multiplier=1.25, ssm_out_multiplier=ROOT / 6,
        ssm_multipliers=(ROOT / 4, 0.25, ROOT / 4, 0.5, ROOT / 4),
        mlp_multipliers=(0.625 * ROOT, 0.5859375), lm_head_multiplier=0.0390625),
    "falcon-h1-7b": row(
        "7.59 B: Falcon-H1 7B (https://arxiv.org/abs/2507.22448)", _falcon_h1,
        (3072, 12_288, 44, 12, 2), vocab_size=130_048, head_dim=128, seq_len=262_144,
        mamba_head_dim=128, key_multiplier=0.390625 / 9 / ROOT,
        attention_out_multiplier=0.9375 / 9, ssm_in_multiplier=1.25 / 3,
        ssm_out_multiplier=ROOT / 12, ssm_multipliers=(ROOT / 4, 0.25, ROOT / 8, 0.5, ROOT / 4),
        mlp_multipliers=(0.625 * ROOT / 3, 0.5859375 / 18), lm_head_multiplier=0.0390625 / 3),
}  # fmt: skip
