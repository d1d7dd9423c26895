"""Presets of released decoders, with the shapes of their config.json on the Hugging Face hub.

`train.init_from` takes the model of a folder as it is; these are for planning and for training
the same shape from the beginning. Each function imports the model, so that listing is cheap.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmwright.models.gemma import Gemma
    from lmwright.models.llama import Llama
    from lmwright.models.olmo2 import Olmo2
    from lmwright.models.phi3 import Phi3

Shape = tuple[int, int, int, int, int]
"""embed_dim, mlp_dim, num_layers, num_heads, num_kv_heads."""


def _sizes(shape: Shape) -> dict[str, int]:
    names = ("embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads")
    return dict(zip(names, shape, strict=True))


def _llama(shape: Shape, **fields: Any) -> "Llama":
    from lmwright.models.llama import Llama

    return Llama(**_sizes(shape), **({"head_dim": 128} | fields))


def _llama3(shape: Shape, factor: float, **fields: Any) -> "Llama":
    from lmwright.nn.rope_scaling import Llama3Rope

    scaling = Llama3Rope(factor=factor, original_seq_len=8192)
    usual = {"vocab_size": 128_256, "seq_len": 131_072, "rope_theta": 500_000.0}
    return _llama(shape, rope_scaling=scaling, **(usual | fields))


def _qwen(shape: Shape, **fields: Any) -> "Llama":
    usual = {"vocab_size": 151_936, "seq_len": 32_768, "rope_theta": 1e6, "norm_eps": 1e-6}
    return _llama(shape, **(usual | fields))


def _gemma(shape: Shape, **fields: Any) -> "Gemma":
    from lmwright.models.gemma import Gemma

    return Gemma(**_sizes(shape), **({"head_dim": 256} | fields))


def _gemma2(shape: Shape, **fields: Any) -> "Gemma":
    caps = {"attention_soft_cap": 50.0, "logits_soft_cap": 30.0}
    return _gemma(shape, vocab_size=256_000, seq_len=8192, window=4096, **caps, **fields)


def _gemma3(shape: Shape, **fields: Any) -> "Gemma":
    from lmwright.nn.rope_scaling import LinearRope

    usual = {
        "vocab_size": 262_208, "seq_len": 131_072, "window": 1024, "qk_norm": "head",
        "layer_pattern": ("local",) * 5 + ("global",), "rope_theta": 1e6,
        "local_rope_theta": 10_000.0, "rope_scaling": LinearRope(factor=8.0),
    }  # fmt: skip
    return _gemma(shape, **(usual | fields))


def _olmo2(shape: Shape) -> "Olmo2":
    from lmwright.models.olmo2 import Olmo2

    return Olmo2(**_sizes(shape), vocab_size=100_352, head_dim=128, seq_len=4096)


def _phi3(shape: Shape, head_dim: int) -> "Phi3":
    from lmwright.models.phi3 import Phi3

    return Phi3(**_sizes(shape), vocab_size=32_064, head_dim=head_dim, seq_len=4096, window=2047)


def llama_3_1_8b() -> "Llama":
    """8.03 B: Llama 3.1 8B, context of 131,072 (https://arxiv.org/abs/2407.21783)."""
    return _llama3((4096, 14_336, 32, 32, 8), factor=8.0, head="untied")


def llama_3_1_70b() -> "Llama":
    """70.6 B: Llama 3.1 70B, context of 131,072 (https://arxiv.org/abs/2407.21783)."""
    return _llama3((8192, 28_672, 80, 64, 8), factor=8.0, head="untied")


def llama_3_2_1b() -> "Llama":
    """1.24 B: Llama 3.2 1B, context of 131,072 (https://arxiv.org/abs/2407.21783)."""
    return _llama3((2048, 8192, 16, 32, 8), factor=32.0, head_dim=64)


def llama_3_2_3b() -> "Llama":
    """3.21 B: Llama 3.2 3B, context of 131,072 (https://arxiv.org/abs/2407.21783)."""
    return _llama3((3072, 8192, 28, 24, 8), factor=32.0)


def mistral_7b() -> "Llama":
    """7.24 B: Mistral 7B v0.1 with its window (https://arxiv.org/abs/2310.06825)."""
    return _llama(
        (4096, 14_336, 32, 32, 8), vocab_size=32_000, seq_len=32_768, window=4096, head="untied"
    )


def qwen2_5_0_5b() -> "Llama":
    """0.494 B: Qwen2.5 0.5B (https://arxiv.org/abs/2412.15115)."""
    return _qwen((896, 4864, 24, 14, 2), head_dim=64, bias="qkv")


def qwen2_5_1_5b() -> "Llama":
    """1.54 B: Qwen2.5 1.5B (https://arxiv.org/abs/2412.15115)."""
    return _qwen((1536, 8960, 28, 12, 2), bias="qkv", seq_len=131_072)


def qwen2_5_3b() -> "Llama":
    """3.09 B: Qwen2.5 3B (https://arxiv.org/abs/2412.15115)."""
    return _qwen((2048, 11_008, 36, 16, 2), bias="qkv")


def qwen2_5_7b() -> "Llama":
    """7.62 B: Qwen2.5 7B (https://arxiv.org/abs/2412.15115)."""
    long = {"vocab_size": 152_064, "seq_len": 131_072}
    return _qwen((3584, 18_944, 28, 28, 4), bias="qkv", head="untied", **long)


def qwen2_5_14b() -> "Llama":
    """14.8 B: Qwen2.5 14B (https://arxiv.org/abs/2412.15115)."""
    long = {"vocab_size": 152_064, "seq_len": 131_072, "norm_eps": 1e-5}
    return _qwen((5120, 13_824, 48, 40, 8), bias="qkv", head="untied", **long)


def qwen2_5_32b() -> "Llama":
    """32.8 B: Qwen2.5 32B (https://arxiv.org/abs/2412.15115)."""
    long = {"vocab_size": 152_064, "seq_len": 131_072, "norm_eps": 1e-5}
    return _qwen((5120, 27_648, 64, 40, 8), bias="qkv", head="untied", **long)


def qwen2_5_72b() -> "Llama":
    """72.7 B: Qwen2.5 72B (https://arxiv.org/abs/2412.15115)."""
    long = {"vocab_size": 152_064, "seq_len": 131_072, "norm_eps": 1e-5}
    return _qwen((8192, 29_568, 80, 64, 8), bias="qkv", head="untied", **long)


def qwen3_0_6b() -> "Llama":
    """0.596 B: Qwen3 0.6B (https://arxiv.org/abs/2505.09388)."""
    return _qwen((1024, 3072, 28, 16, 8), qk_norm="head")


def qwen3_1_7b() -> "Llama":
    """1.72 B: Qwen3 1.7B (https://arxiv.org/abs/2505.09388)."""
    return _qwen((2048, 6144, 28, 16, 8), qk_norm="head")


def qwen3_4b() -> "Llama":
    """4.02 B: Qwen3 4B (https://arxiv.org/abs/2505.09388)."""
    return _qwen((2560, 9728, 36, 32, 8), qk_norm="head")


def qwen3_8b() -> "Llama":
    """8.19 B: Qwen3 8B (https://arxiv.org/abs/2505.09388)."""
    return _qwen((4096, 12_288, 36, 32, 8), qk_norm="head", head="untied")


def qwen3_14b() -> "Llama":
    """14.8 B: Qwen3 14B (https://arxiv.org/abs/2505.09388)."""
    return _qwen((5120, 17_408, 40, 40, 8), qk_norm="head", head="untied")


def qwen3_32b() -> "Llama":
    """32.8 B: Qwen3 32B (https://arxiv.org/abs/2505.09388)."""
    return _qwen((5120, 25_600, 64, 64, 8), qk_norm="head", head="untied")


def gemma2_2b() -> "Gemma":
    """2.61 B: Gemma 2 2B (https://arxiv.org/abs/2408.00118)."""
    return _gemma2((2304, 9216, 26, 8, 4))


def gemma2_9b() -> "Gemma":
    """9.24 B: Gemma 2 9B (https://arxiv.org/abs/2408.00118)."""
    return _gemma2((3584, 14_336, 42, 16, 8))


def gemma2_27b() -> "Gemma":
    """27.2 B: Gemma 2 27B (https://arxiv.org/abs/2408.00118)."""
    return _gemma2((4608, 36_864, 46, 32, 16), head_dim=128, query_dim=144)


def gemma3_1b() -> "Gemma":
    """1.00 B: Gemma 3 1B (https://arxiv.org/abs/2503.19786)."""
    small = {"vocab_size": 262_144, "seq_len": 32_768, "window": 512, "rope_scaling": None}
    return _gemma3((1152, 6912, 26, 4, 1), **small)


def gemma3_4b() -> "Gemma":
    """3.88 B: the text part of Gemma 3 4B (https://arxiv.org/abs/2503.19786)."""
    return _gemma3((2560, 10_240, 34, 8, 4))


def gemma3_12b() -> "Gemma":
    """11.8 B: the text part of Gemma 3 12B (https://arxiv.org/abs/2503.19786)."""
    return _gemma3((3840, 15_360, 48, 16, 8))


def gemma3_27b() -> "Gemma":
    """27.0 B: the text part of Gemma 3 27B (https://arxiv.org/abs/2503.19786)."""
    return _gemma3((5376, 21_504, 62, 32, 16), head_dim=128, query_dim=168)


def olmo2_1b() -> "Olmo2":
    """1.48 B: OLMo 2 1B (https://arxiv.org/abs/2501.00656)."""
    return _olmo2((2048, 8192, 16, 16, 16))


def olmo2_7b() -> "Olmo2":
    """7.30 B: OLMo 2 7B (https://arxiv.org/abs/2501.00656)."""
    return _olmo2((4096, 11_008, 32, 32, 32))


def olmo2_13b() -> "Olmo2":
    """13.7 B: OLMo 2 13B (https://arxiv.org/abs/2501.00656)."""
    return _olmo2((5120, 13_824, 40, 40, 40))


def olmo2_32b() -> "Olmo2":
    """32.2 B: OLMo 2 32B (https://arxiv.org/abs/2501.00656)."""
    return _olmo2((5120, 27_648, 64, 40, 8))


def phi3_mini() -> "Phi3":
    """3.82 B: Phi-3 mini 4K with its window (https://arxiv.org/abs/2404.14219)."""
    return _phi3((3072, 8192, 32, 32, 32), head_dim=96)


def phi3_medium() -> "Phi3":
    """14.0 B: Phi-3 medium 4K with its window (https://arxiv.org/abs/2404.14219)."""
    return _phi3((5120, 17_920, 40, 40, 10), head_dim=128)


SHORT = {
    "llama-3.1-8b": llama_3_1_8b,
    "llama-3.1-70b": llama_3_1_70b,
    "llama-3.2-1b": llama_3_2_1b,
    "llama-3.2-3b": llama_3_2_3b,
    "qwen2.5-0.5b": qwen2_5_0_5b,
    "qwen2.5-1.5b": qwen2_5_1_5b,
    "qwen2.5-3b": qwen2_5_3b,
    "qwen2.5-7b": qwen2_5_7b,
    "qwen2.5-14b": qwen2_5_14b,
    "qwen2.5-32b": qwen2_5_32b,
    "qwen2.5-72b": qwen2_5_72b,
    "qwen3-0.6b": qwen3_0_6b,
    "qwen3-1.7b": qwen3_1_7b,
    "phi-3-mini": phi3_mini,
    "phi-3-medium": phi3_medium,
}
"""Second names, spelled as their makers do."""
