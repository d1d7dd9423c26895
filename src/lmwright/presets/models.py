"""Model presets from 0.5 M to 619 B parameters; `lmwright params llama-5m` counts one.

Shapes that are published carry the published name's source; the smallest are our own, for
laptops and tests.
"""

from typing import Any

from lmwright.presets.rows import Shape, llama, row, sizes


def _fanformer(shape: Shape) -> Any:
    from lmwright.models.fanformer import Fanformer

    return Fanformer(**sizes(shape), vocab_size=50_304, head_dim=128, seq_len=2048)


def _xlstm_blocks(embed_dim: int, num_layers: int, num_heads: int) -> Any:
    from lmwright.models.xlstm_blocks import XlstmBlocks

    return XlstmBlocks(
        embed_dim=embed_dim, num_layers=num_layers, num_heads=num_heads,
        mlp_dim=-(-embed_dim * 4 // 192) * 64, vocab_size=50_304, seq_len=2048,
    )  # fmt: skip


PRESETS = {
    "llama-500k": row("0.50 M: for tests of the whole way; vocabulary of 1,024", llama,
        (96, 256, 4, 6, 3), vocab_size=1024, head_dim=16, seq_len=256),
    "llama-1m": row("1.00 M: trains in a minute on two cores; vocabulary of 2,048", llama,
        (128, 352, 4, 8, 4), vocab_size=2048, head_dim=16, seq_len=256),
    "llama-5m": row("5.25 M: trains in minutes on two cores; the default vocabulary of 8,192",
        llama, (256, 768, 4, 8, 4), vocab_size=8192, head_dim=32, seq_len=512),
    "llama-15m": row("15.2 M: the shape of stories15M (https://github.com/karpathy/llama2.c)",
        llama, (288, 768, 6, 6, 6), vocab_size=32_000, head_dim=48, seq_len=256),
    "llama-42m": row("41.7 M: the shape of stories42M (https://github.com/karpathy/llama2.c)",
        llama, (512, 1376, 8, 8, 8), vocab_size=32_000, head_dim=64, seq_len=1024),
    "llama-135m": row("134.5 M: the shape of SmolLM2-135M (https://arxiv.org/abs/2502.02737)",
        llama, (576, 1536, 30, 9, 3), vocab_size=49_152, head_dim=64, seq_len=2048),
    "llama-360m": row("361.8 M: the shape of SmolLM2-360M (https://arxiv.org/abs/2502.02737)",
        llama, (960, 2560, 32, 15, 5), vocab_size=49_152, head_dim=64, seq_len=2048),
    "llama-1b": row(
        "1.24 B: the shape of Llama-3.2-1B, without its scaling of the rope "
        "(https://arxiv.org/abs/2407.21783)",
        llama, (2048, 8192, 16, 32, 8), vocab_size=128_256, head_dim=64, seq_len=8192,
        rope_theta=500_000.0),
    "llama-3b": row(
        "3.21 B: the shape of Llama-3.2-3B, without its scaling of the rope "
        "(https://arxiv.org/abs/2407.21783)",
        llama, (3072, 8192, 28, 24, 8), vocab_size=128_256, seq_len=8192,
        rope_theta=500_000.0),
    "kisoku-3b": row('3.33 B: 3,325,627,392 parameters tied, 3,480,161,280 with `head = "untied"`',
        llama, (3072, 8192, 32, 32, 8), vocab_size=50_304, head_dim=96, seq_len=2048),
    "llama-7b": row("6.74 B: Llama 2 7B (https://arxiv.org/abs/2307.09288)", llama,
        (4096, 11_008, 32, 32, 32), vocab_size=32_000, seq_len=4096, head="untied"),
    "llama-8b": row("8.03 B: Llama 3 8B (https://arxiv.org/abs/2407.21783)", llama,
        (4096, 14_336, 32, 32, 8), vocab_size=128_256, seq_len=8192,
        rope_theta=500_000.0, head="untied"),
    "llama-13b": row("13.0 B: Llama 2 13B (https://arxiv.org/abs/2307.09288)", llama,
        (5120, 13_824, 40, 40, 40), vocab_size=32_000, seq_len=4096, head="untied"),
    "llama-34b": row("33.7 B: Code Llama 34B (https://arxiv.org/abs/2308.12950)", llama,
        (8192, 22_016, 48, 64, 8), vocab_size=32_000, seq_len=16_384,
        rope_theta=1_000_000.0, head="untied"),
    "llama-70b": row("70.6 B: Llama 3 70B (https://arxiv.org/abs/2407.21783)", llama,
        (8192, 28_672, 80, 64, 8), vocab_size=128_256, seq_len=8192,
        rope_theta=500_000.0, head="untied"),
    "llama-175b": row(
        "208.5 B: the width, depth and heads of GPT-3 175B (https://arxiv.org/abs/2005.14165) "
        "with our gated mlp, whose third matrix makes it larger; 8 kv heads and the "
        "vocabulary as in Llama 3 70B, for lack of a published choice",
        llama, (12_288, 49_152, 96, 96, 8), vocab_size=128_256, seq_len=4096,
        rope_theta=500_000.0, head="untied"),
    "llama-600b": row(
        "619.0 B: our own, for plans of more than a slice holds; 8 kv heads and the vocabulary as "
        "in Llama 3 70B, heads of 18,432 / 128 = 144",
        llama, (18_432, 73_728, 128, 128, 8), vocab_size=128_256, head_dim=144, seq_len=4096,
        rope_theta=500_000.0, head="untied"),
    "fanformer-1b": row("1.24 B: FANformer-1B (https://arxiv.org/abs/2502.21309)", _fanformer,
        (2048, 8192, 16, 16, 16)),
    "xlstm-7-1-164m": row("163.6 M: the shape of xLSTM[7:1] in the first paper "
        "(https://arxiv.org/abs/2405.04517); which blocks have sLSTM is ours", _xlstm_blocks,
        768, 24, 4),
}  # fmt: skip
SHORT = {size: PRESETS[f"llama-{size}"] for size in ("7b", "13b", "34b", "70b", "175b", "600b")}
"""Second names, for those who think in sizes."""
