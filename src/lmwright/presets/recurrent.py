"""Presets of models without attention: those of the xLSTM papers, and a small one of our own."""

from typing import Any

from lmwright.presets.rows import row


def _xlstm(embed_dim: int, num_layers: int, num_heads: int, **fields: Any) -> Any:
    from lmwright.models.xlstm import Xlstm

    usual = {"vocab_size": 50_304, "seq_len": 8192, "head_dim": embed_dim // num_heads}
    return Xlstm(
        embed_dim=embed_dim, num_layers=num_layers, num_heads=num_heads,
        mlp_dim=-(-int(embed_dim * 2.667) // 64) * 64, key_dim=embed_dim // num_heads // 2,
        **(usual | fields),
    )  # fmt: skip


PRESETS = {
    "xlstm-7m": row("7.42 M: of the size of llama-5m with an untied head; the default "
        "vocabulary of 8,192", _xlstm, 256, 4, 4, vocab_size=8192, seq_len=512),
    "xlstm-165m": row("162 M: of the comparison in the paper of xLSTM-7B "
        "(https://arxiv.org/abs/2503.13427)", _xlstm, 768, 12, 4, seq_len=2048),
    "xlstm-1.3b": row("1.42 B: 24 layers of 2048 (https://arxiv.org/abs/2503.13427)", _xlstm,
        2048, 24, 4),
    "xlstm-2.7b": row("2.78 B: 32 layers of 2560 (https://arxiv.org/abs/2503.13427)", _xlstm,
        2560, 32, 5),
    "xlstm-7b": row("6.87 B: xLSTM-7B (https://arxiv.org/abs/2503.13427)", _xlstm, 4096, 32, 8),
}  # fmt: skip
