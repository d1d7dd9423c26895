"""Model presets from 0.5 M to 619 B parameters; `lmwright params llama-5m` counts one.

Shapes that are published carry the published name's source; the smallest are our own, for
laptops and tests. Each function imports the model, so that listing presets costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmwright.models.llama import Llama


def _llama(**fields: Any) -> "Llama":
    from lmwright.models.llama import Llama

    return Llama(**fields)


def llama_500k() -> "Llama":
    """0.50 M: for tests of the whole way; vocabulary of 1,024."""
    return _llama(
        vocab_size=1024,
        embed_dim=96,
        mlp_dim=256,
        num_layers=4,
        num_heads=6,
        num_kv_heads=3,
        head_dim=16,
        seq_len=256,
    )


def llama_1m() -> "Llama":
    """1.00 M: trains in a minute on two cores; vocabulary of 2,048."""
    return _llama(
        vocab_size=2048,
        embed_dim=128,
        mlp_dim=352,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        seq_len=256,
    )


def llama_5m() -> "Llama":
    """5.25 M: trains in minutes on two cores; the default vocabulary of 8,192."""
    return _llama(
        vocab_size=8192,
        embed_dim=256,
        mlp_dim=768,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        seq_len=512,
    )


def llama_15m() -> "Llama":
    """15.2 M: the shape of stories15M (https://github.com/karpathy/llama2.c)."""
    return _llama(
        vocab_size=32_000,
        embed_dim=288,
        mlp_dim=768,
        num_layers=6,
        num_heads=6,
        num_kv_heads=6,
        head_dim=48,
        seq_len=256,
    )


def llama_42m() -> "Llama":
    """41.7 M: the shape of stories42M (https://github.com/karpathy/llama2.c)."""
    return _llama(
        vocab_size=32_000,
        embed_dim=512,
        mlp_dim=1376,
        num_layers=8,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        seq_len=1024,
    )


def llama_135m() -> "Llama":
    """134.5 M: the shape of SmolLM2-135M (https://arxiv.org/abs/2502.02737)."""
    return _llama(
        vocab_size=49_152,
        embed_dim=576,
        mlp_dim=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        seq_len=2048,
    )


def llama_360m() -> "Llama":
    """361.8 M: the shape of SmolLM2-360M (https://arxiv.org/abs/2502.02737)."""
    return _llama(
        vocab_size=49_152,
        embed_dim=960,
        mlp_dim=2560,
        num_layers=32,
        num_heads=15,
        num_kv_heads=5,
        head_dim=64,
        seq_len=2048,
    )


def llama_1b() -> "Llama":
    """1.24 B: the shape of Llama-3.2-1B, without its scaling of the rope
    (https://arxiv.org/abs/2407.21783)."""
    return _llama(
        vocab_size=128_256,
        embed_dim=2048,
        mlp_dim=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        seq_len=8192,
        rope_theta=500_000.0,
    )


def llama_3b() -> "Llama":
    """3.21 B: the shape of Llama-3.2-3B, without its scaling of the rope
    (https://arxiv.org/abs/2407.21783)."""
    return _llama(
        vocab_size=128_256,
        embed_dim=3072,
        mlp_dim=8192,
        num_layers=28,
        num_heads=24,
        num_kv_heads=8,
        head_dim=128,
        seq_len=8192,
        rope_theta=500_000.0,
    )


def kisoku_3b() -> "Llama":
    """3.33 B: 3,325,627,392 parameters tied, 3,480,161,280 with `head = "untied"`."""
    return _llama(
        vocab_size=50_304,
        embed_dim=3072,
        mlp_dim=8192,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=96,
        seq_len=2048,
    )


def llama_7b() -> "Llama":
    """6.74 B: Llama 2 7B (https://arxiv.org/abs/2307.09288)."""
    return _llama(
        vocab_size=32_000,
        embed_dim=4096,
        mlp_dim=11_008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        seq_len=4096,
        head="untied",
    )


def llama_8b() -> "Llama":
    """8.03 B: Llama 3 8B (https://arxiv.org/abs/2407.21783)."""
    return _llama(
        vocab_size=128_256,
        embed_dim=4096,
        mlp_dim=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        seq_len=8192,
        rope_theta=500_000.0,
        head="untied",
    )


def llama_13b() -> "Llama":
    """13.0 B: Llama 2 13B (https://arxiv.org/abs/2307.09288)."""
    return _llama(
        vocab_size=32_000,
        embed_dim=5120,
        mlp_dim=13_824,
        num_layers=40,
        num_heads=40,
        num_kv_heads=40,
        head_dim=128,
        seq_len=4096,
        head="untied",
    )


def llama_34b() -> "Llama":
    """33.7 B: Code Llama 34B (https://arxiv.org/abs/2308.12950)."""
    return _llama(
        vocab_size=32_000,
        embed_dim=8192,
        mlp_dim=22_016,
        num_layers=48,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        seq_len=16_384,
        rope_theta=1_000_000.0,
        head="untied",
    )


def llama_70b() -> "Llama":
    """70.6 B: Llama 3 70B (https://arxiv.org/abs/2407.21783)."""
    return _llama(
        vocab_size=128_256,
        embed_dim=8192,
        mlp_dim=28_672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        seq_len=8192,
        rope_theta=500_000.0,
        head="untied",
    )


def llama_175b() -> "Llama":
    """208.5 B: the width, depth and heads of GPT-3 175B (https://arxiv.org/abs/2005.14165) with
    our gated mlp, whose third matrix makes it larger; 8 kv heads and the vocabulary as in
    Llama 3 70B, for lack of a published choice."""
    return _llama(
        vocab_size=128_256,
        embed_dim=12_288,
        mlp_dim=49_152,
        num_layers=96,
        num_heads=96,
        num_kv_heads=8,
        head_dim=128,
        seq_len=4096,
        rope_theta=500_000.0,
        head="untied",
    )


def llama_600b() -> "Llama":
    """619.0 B: our own, to be asked for and refused; 8 kv heads and the vocabulary as in
    Llama 3 70B, heads of 18,432 / 128 = 144."""
    return _llama(
        vocab_size=128_256,
        embed_dim=18_432,
        mlp_dim=73_728,
        num_layers=128,
        num_heads=128,
        num_kv_heads=8,
        head_dim=144,
        seq_len=4096,
        rope_theta=500_000.0,
        head="untied",
    )


SHORT = {
    "7b": llama_7b,
    "13b": llama_13b,
    "70b": llama_70b,
    "175b": llama_175b,
    "600b": llama_600b,
}
"""Second names, for those who think in sizes."""
