"""Presets of released encoders, with the shapes of their config.json on the Hugging Face hub."""

from typing import Any

from lmwright.presets.rows import Shape, row, sizes


def _eurobert(shape: Shape) -> Any:
    from lmwright.models.eurobert import EuroBert

    fields = {"vocab_size": 128_256, "seq_len": 8192, "rope_theta": 250_000.0}
    return EuroBert(**sizes(shape), **fields, head_dim=shape[0] // shape[3])


PRESETS = {
    "eurobert-210m": row(
        "0.31 B: EuroBERT 210m with its head (https://arxiv.org/abs/2503.05500)",
        _eurobert, (768, 3072, 12, 12, 12)),
    "eurobert-610m": row(
        "0.756 B: EuroBERT 610m with its head (https://arxiv.org/abs/2503.05500)",
        _eurobert, (1152, 4096, 26, 18, 6)),
    "eurobert-2.1b": row(
        "2.4 B: EuroBERT 2.1B with its head (https://arxiv.org/abs/2503.05500)",
        _eurobert, (2304, 6144, 32, 18, 6)),
}  # fmt: skip
