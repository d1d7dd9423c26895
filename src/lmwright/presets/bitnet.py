"""Presets of models with ternary weights; the small ones are our own, for laptops and tests."""

from typing import Any

from lmwright.presets.rows import Shape, row, sizes


def _bitnet(shape: Shape, **fields: Any) -> Any:
    from lmwright.models.bitnet import BitNet

    return BitNet(**sizes(shape), head_dim=shape[0] // shape[3], **fields)


PRESETS = {
    "bitnet-500k": row("0.51 M: a BitNet for tests of the whole way; vocabulary of 1,024", _bitnet,
        (96, 256, 4, 6, 3), vocab_size=1024, seq_len=256, rope_theta=10_000.0),
    "bitnet-5m": row(
        "5.25 M: a BitNet that llama.cpp can run; the default vocabulary of 8,192", _bitnet,
        (256, 768, 4, 8, 4), vocab_size=8192, seq_len=512, rope_theta=10_000.0, mlp="swiglu"),
    "bitnet-b1.58-2b-4t": row("2.41 B: BitNet b1.58 2B4T (https://arxiv.org/abs/2504.12285)",
        _bitnet, (2560, 6912, 30, 20, 5), vocab_size=128_256, seq_len=4096),
}  # fmt: skip
