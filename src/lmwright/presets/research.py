"""Presets of decoders that were released with their data and their training code."""

from typing import Any

from lmwright.presets.rows import Shape, row, sizes

ETTIN = "https://arxiv.org/abs/2507.11412"
NANOCHAT = "https://github.com/karpathy/nanochat"


def _nanochat(depth: int) -> Any:
    from lmwright.models.nanochat import NanoChat

    width = 64 * depth
    shape = width, 4 * width, depth, width // 128, width // 128
    return NanoChat(**sizes(shape), vocab_size=65_536, head_dim=128, seq_len=2048)


def _ettin(shape: Shape) -> Any:
    from lmwright.models.modernbert import ModernBertDecoder

    return ModernBertDecoder(
        **sizes(shape), vocab_size=50_368, head_dim=64, seq_len=7999, local_rope_theta=160_000.0
    )


def _olmo_hybrid(shape: Shape) -> Any:
    from lmwright.models.olmo_hybrid import OlmoHybrid

    heads = shape[3]
    return OlmoHybrid(
        **sizes(shape), vocab_size=100_352, head_dim=128, seq_len=65_536,
        linear_num_key_heads=heads, linear_num_value_heads=heads, linear_key_dim=96,
        linear_value_dim=192,
    )  # fmt: skip


PRESETS = {
    "nanochat-d20": row(f"561 M: nanochat's first speedrun ({NANOCHAT}/discussions/1)", _nanochat,
        20),
    "nanochat-d32": row(f"1.88 B: nanochat d32 ({NANOCHAT}/discussions/8)", _nanochat, 32),
    "nanochat-d34": row("2.22 B: nanochat d34 (https://huggingface.co/karpathy/nanochat-d34)",
        _nanochat, 34),
    "olmo-hybrid-7b": row(
        "7.43 B: OLMo Hybrid 7B (https://huggingface.co/allenai/Olmo-Hybrid-7B)", _olmo_hybrid,
        (3840, 11_008, 32, 30, 30)),
    "ettin-decoder-17m": row(f"0.0169 B: Ettin decoder ({ETTIN})", _ettin, (256, 384, 7, 4, 4)),
    "ettin-decoder-32m": row(f"0.0321 B: Ettin decoder ({ETTIN})", _ettin, (384, 576, 10, 6, 6)),
    "ettin-decoder-68m": row(f"0.0685 B: Ettin decoder ({ETTIN})", _ettin, (512, 768, 19, 8, 8)),
    "ettin-decoder-150m": row(f"0.15 B: Ettin decoder ({ETTIN})", _ettin,
        (768, 1152, 22, 12, 12)),
    "ettin-decoder-400m": row(f"0.396 B: Ettin decoder ({ETTIN})", _ettin,
        (1024, 2624, 28, 16, 16)),
    "ettin-decoder-1b": row(f"1.03 B: Ettin decoder ({ETTIN})", _ettin, (1792, 3840, 28, 28, 28)),
}  # fmt: skip
