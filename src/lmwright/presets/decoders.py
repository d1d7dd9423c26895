"""Presets of released decoders, with the shapes of their config.json on the Hugging Face hub.

`train.init_from` takes the model of a folder as it is; these are for planning and for training
the same shape from the beginning. A model is imported when it is made, so that listing is cheap.
"""

from typing import Any, Literal

from lmwright.presets.rows import Shape, llama, row, sizes


def _llama3(shape: Shape, factor: float, **fields: Any) -> Any:
    from lmwright.nn.rope import Llama3Rope

    scaling = Llama3Rope(factor=factor, original_seq_len=8192)
    usual = {"vocab_size": 128_256, "seq_len": 131_072, "rope_theta": 500_000.0}
    return llama(shape, rope_scaling=scaling, **(usual | fields))


def _qwen(shape: Shape, **fields: Any) -> Any:
    usual = {"vocab_size": 151_936, "seq_len": 32_768, "rope_theta": 1e6, "norm_eps": 1e-6}
    return llama(shape, **(usual | fields))


def _gemma(shape: Shape, **fields: Any) -> Any:
    from lmwright.models.gemma import Gemma

    return Gemma(**sizes(shape), **({"head_dim": 256} | fields))


def _gemma1(shape: Shape) -> Any:
    from lmwright.models.gemma1 import Gemma1

    return Gemma1(**sizes(shape), vocab_size=256_000, seq_len=8192, head_dim=256)


def _gemma2(shape: Shape, **fields: Any) -> Any:
    caps = {"attention_soft_cap": 50.0, "logits_soft_cap": 30.0}
    return _gemma(shape, vocab_size=256_000, seq_len=8192, window=4096, **caps, **fields)


def _gemma3(shape: Shape, **fields: Any) -> Any:
    from lmwright.nn.rope import LinearRope

    usual = {
        "vocab_size": 262_208, "seq_len": 131_072, "window": 1024, "qk_norm": "head",
        "layer_pattern": ("local",) * 5 + ("global",), "rope_theta": 1e6,
        "local_rope_theta": 10_000.0, "rope_scaling": LinearRope(factor=8.0),
    }  # fmt: skip
    return _gemma(shape, **(usual | fields))


def _gemma4(shape: Shape, **fields: Any) -> Any:
    from lmwright.models.gemma4 import Gemma4
    from lmwright.nn.rope import ProportionalRope

    usual = {
        "vocab_size": 262_144, "seq_len": 131_072, "window": 512, "head_dim": 256,
        "rope_scaling": ProportionalRope(fraction=0.25), "logits_soft_cap": 30.0,
    }  # fmt: skip
    return Gemma4(**sizes(shape), **(usual | fields))


def _olmo2(shape: Shape) -> Any:
    from lmwright.models.olmo2 import Olmo2

    return Olmo2(**sizes(shape), vocab_size=100_352, head_dim=128, seq_len=4096)


def _olmo3(shape: Shape) -> Any:
    from lmwright.models.olmo2 import Olmo2
    from lmwright.nn.rope import YarnRope

    return Olmo2(
        **sizes(shape), vocab_size=100_278, head_dim=128, seq_len=65_536, window=4096,
        local_rope_theta=500_000.0, rope_scaling=YarnRope(factor=8.0, original_seq_len=8192),
    )  # fmt: skip


def _smollm3(shape: Shape) -> Any:
    from lmwright.models.smollm3 import SmolLm3

    return SmolLm3(
        **sizes(shape), vocab_size=128_256, head_dim=128, seq_len=65_536, rope_theta=5_000_000.0
    )


def _ministral3(shape: Shape, **fields: Any) -> Any:
    from lmwright.models.ministral3 import Ministral3

    usual = {"vocab_size": 131_072, "head_dim": 128, "seq_len": 262_144}
    return Ministral3(**sizes(shape), **(usual | fields))


def _qwen35(shape: Shape, values: int, head: Literal["tied", "untied"]) -> Any:
    from lmwright.models.qwen3_5 import Qwen35

    return Qwen35(
        **sizes(shape), vocab_size=248_320, head_dim=256, seq_len=262_144, head=head,
        linear_num_value_heads=values,
    )  # fmt: skip


def _lfm2(shape: Shape, pattern: Any = None) -> Any:
    from lmwright.models.lfm2 import Lfm2

    return Lfm2(
        **sizes(shape), vocab_size=65_536, head_dim=64, seq_len=128_000,
        mixer_pattern=pattern or LFM2_LAYERS,
    )  # fmt: skip


def _granite(shape: Shape, head_dim: int, logits_scaling: float) -> Any:
    from lmwright.models.granite import Granite

    return Granite(
        **sizes(shape), vocab_size=49_159, head_dim=head_dim, seq_len=131_072, rope_theta=1e7,
        embedding_multiplier=12.0, attention_multiplier=1 / head_dim, residual_multiplier=0.22,
        logits_scaling=logits_scaling,
    )  # fmt: skip


def _phi3(shape: Shape, head_dim: int) -> Any:
    from lmwright.models.phi3 import Phi3

    return Phi3(**sizes(shape), vocab_size=32_064, head_dim=head_dim, seq_len=4096, window=2047)


def _glm4(shape: Shape) -> Any:
    from lmwright.models.glm4 import Glm4

    return Glm4(
        **sizes(shape), vocab_size=151_552, head_dim=128, seq_len=8192, norm_eps=1.5625e-7,
        bias="qkv", out_norms="none",
    )  # fmt: skip


def _ernie45(shape: Shape) -> Any:
    from lmwright.models.ernie4_5 import Ernie45

    return Ernie45(**sizes(shape), vocab_size=103_424, head_dim=128, seq_len=131_072)


def _hunyuan(shape: Shape) -> Any:
    from lmwright.models.hunyuan import Hunyuan

    usual = {"vocab_size": 120_818, "head_dim": 128, "seq_len": 262_144}
    return Hunyuan(**sizes(shape), **usual, rope_theta=11_158_840.0)


def _exaone4(shape: Shape, **fields: Any) -> Any:
    from lmwright.models.exaone4 import Exaone4
    from lmwright.nn.rope import Llama3Rope

    scaling = Llama3Rope(factor=16.0, original_seq_len=8192)
    return Exaone4(
        **sizes(shape), vocab_size=102_400, rope_theta=1e6, rope_scaling=scaling, **fields
    )


def _apertus(shape: Shape) -> Any:
    from lmwright.models.apertus import Apertus
    from lmwright.nn.rope import Llama3Rope

    scaling = Llama3Rope(factor=8.0, original_seq_len=8192)
    return Apertus(
        **sizes(shape), vocab_size=131_072, head_dim=128, seq_len=65_536, rope_scaling=scaling
    )


def _cwm(shape: Shape) -> Any:
    from lmwright.models.cwm import Cwm
    from lmwright.nn.rope import Llama3Rope

    scaling = Llama3Rope(factor=16.0, original_seq_len=8192)
    return Cwm(
        **sizes(shape), vocab_size=128_256, head_dim=128, seq_len=131_072, rope_scaling=scaling
    )


def _helium(shape: Shape) -> Any:
    from lmwright.models.helium import Helium

    return Helium(**sizes(shape), vocab_size=48_000, head_dim=128, seq_len=4096)


def _seed_oss(shape: Shape) -> Any:
    from lmwright.models.seed_oss import SeedOss

    return SeedOss(**sizes(shape), vocab_size=155_136, head_dim=128, seq_len=524_288)


def _pythia(shape: Shape, **fields: Any) -> Any:
    from lmwright.models.gpt_neox import GptNeox

    usual = {"vocab_size": 50_304, "head_dim": shape[0] // shape[3], "seq_len": 2048}
    return GptNeox(**sizes(shape), **(usual | fields))


def _gpt2(shape: Shape) -> Any:
    from lmwright.models.gpt2 import Gpt2

    return Gpt2(**sizes(shape), vocab_size=50_257, head_dim=64, seq_len=1024)


LFM2_LAYERS = (*("conv", "conv", "full") * 2, "conv", *("conv", "full") * 4)  # then again

LFM2_LARGEST = (*("conv", "conv", "full") * 2, *("conv", "conv", "conv", "full") * 4)

PRESETS = {
    "llama-3.1-8b": row(
        "8.03 B: Llama 3.1 8B, context of 131,072 (https://arxiv.org/abs/2407.21783)",
        _llama3, (4096, 14_336, 32, 32, 8), factor=8.0, head="untied"),
    "llama-3.1-70b": row(
        "70.6 B: Llama 3.1 70B, context of 131,072 (https://arxiv.org/abs/2407.21783)",
        _llama3, (8192, 28_672, 80, 64, 8), factor=8.0, head="untied"),
    "llama-3.2-1b": row(
        "1.24 B: Llama 3.2 1B, context of 131,072 (https://arxiv.org/abs/2407.21783)",
        _llama3, (2048, 8192, 16, 32, 8), factor=32.0, head_dim=64),
    "llama-3.2-3b": row(
        "3.21 B: Llama 3.2 3B, context of 131,072 (https://arxiv.org/abs/2407.21783)",
        _llama3, (3072, 8192, 28, 24, 8), factor=32.0),
    "mistral-7b": row("7.24 B: Mistral 7B v0.1 with its window (https://arxiv.org/abs/2310.06825)",
        llama, (4096, 14_336, 32, 32, 8), vocab_size=32_000, seq_len=32_768, window=4096,
        head="untied"),
    "mistral-small-3.2-24b": row(
        "23.6 B: the text of Mistral Small 3.1 and 3.2, Magistral and Devstral Small 1 "
        "(https://huggingface.co/mistralai/Mistral-Small-3.2-24B-Instruct-2506)",
        llama, (5120, 32_768, 40, 32, 8), vocab_size=131_072, seq_len=131_072, rope_theta=1e9,
        head="untied"),
    "ministral-3-3b": row("3.43 B: the text of Ministral 3 3B "
        "(https://huggingface.co/mistralai/Ministral-3-3B-Base-2512)",
        _ministral3, (3072, 9216, 26, 32, 8), head="tied"),
    "ministral-3-8b": row("8.49 B: the text of Ministral 3 8B "
        "(https://huggingface.co/mistralai/Ministral-3-8B-Base-2512)",
        _ministral3, (4096, 14_336, 34, 32, 8)),
    "ministral-3-14b": row("13.5 B: the text of Ministral 3 14B "
        "(https://huggingface.co/mistralai/Ministral-3-14B-Base-2512)",
        _ministral3, (5120, 16_384, 40, 32, 8), rope_theta=1e9),
    "qwen2.5-0.5b": row("0.494 B: Qwen2.5 0.5B (https://arxiv.org/abs/2412.15115)", _qwen,
        (896, 4864, 24, 14, 2), head_dim=64, bias="qkv"),
    "qwen2.5-1.5b": row("1.54 B: Qwen2.5 1.5B (https://arxiv.org/abs/2412.15115)", _qwen,
        (1536, 8960, 28, 12, 2), bias="qkv", seq_len=131_072),
    "qwen2.5-3b": row("3.09 B: Qwen2.5 3B (https://arxiv.org/abs/2412.15115)", _qwen,
        (2048, 11_008, 36, 16, 2), bias="qkv"),
    "qwen2.5-7b": row("7.62 B: Qwen2.5 7B (https://arxiv.org/abs/2412.15115)", _qwen,
        (3584, 18_944, 28, 28, 4), bias="qkv", head="untied",
        vocab_size=152_064, seq_len=131_072),
    "qwen2.5-14b": row("14.8 B: Qwen2.5 14B (https://arxiv.org/abs/2412.15115)", _qwen,
        (5120, 13_824, 48, 40, 8), bias="qkv", head="untied",
        vocab_size=152_064, seq_len=131_072, norm_eps=1e-5),
    "qwen2.5-32b": row("32.8 B: Qwen2.5 32B (https://arxiv.org/abs/2412.15115)", _qwen,
        (5120, 27_648, 64, 40, 8), bias="qkv", head="untied",
        vocab_size=152_064, seq_len=131_072, norm_eps=1e-5),
    "qwen2.5-72b": row("72.7 B: Qwen2.5 72B (https://arxiv.org/abs/2412.15115)", _qwen,
        (8192, 29_568, 80, 64, 8), bias="qkv", head="untied",
        vocab_size=152_064, seq_len=131_072, norm_eps=1e-5),
    "qwen3-0.6b": row("0.596 B: Qwen3 0.6B (https://arxiv.org/abs/2505.09388)", _qwen,
        (1024, 3072, 28, 16, 8), qk_norm="head"),
    "qwen3-1.7b": row("1.72 B: Qwen3 1.7B (https://arxiv.org/abs/2505.09388)", _qwen,
        (2048, 6144, 28, 16, 8), qk_norm="head"),
    "qwen3-4b": row("4.02 B: Qwen3 4B (https://arxiv.org/abs/2505.09388)", _qwen,
        (2560, 9728, 36, 32, 8), qk_norm="head"),
    "qwen3-8b": row("8.19 B: Qwen3 8B (https://arxiv.org/abs/2505.09388)", _qwen,
        (4096, 12_288, 36, 32, 8), qk_norm="head", head="untied"),
    "qwen3-14b": row("14.8 B: Qwen3 14B (https://arxiv.org/abs/2505.09388)", _qwen,
        (5120, 17_408, 40, 40, 8), qk_norm="head", head="untied"),
    "qwen3-32b": row("32.8 B: Qwen3 32B (https://arxiv.org/abs/2505.09388)", _qwen,
        (5120, 25_600, 64, 64, 8), qk_norm="head", head="untied"),
    "gemma-2b": row("2.51 B: Gemma 2B (https://arxiv.org/abs/2403.08295)", _gemma1,
        (2048, 16_384, 18, 8, 1)),
    "gemma-7b": row("8.54 B: Gemma 7B (https://arxiv.org/abs/2403.08295)", _gemma1,
        (3072, 24_576, 28, 16, 16)),
    "gemma2-2b": row("2.61 B: Gemma 2 2B (https://arxiv.org/abs/2408.00118)", _gemma2,
        (2304, 9216, 26, 8, 4)),
    "gemma2-9b": row("9.24 B: Gemma 2 9B (https://arxiv.org/abs/2408.00118)", _gemma2,
        (3584, 14_336, 42, 16, 8)),
    "gemma2-27b": row("27.2 B: Gemma 2 27B (https://arxiv.org/abs/2408.00118)", _gemma2,
        (4608, 36_864, 46, 32, 16), head_dim=128, query_dim=144),
    "gemma3-1b": row("1.00 B: Gemma 3 1B (https://arxiv.org/abs/2503.19786)", _gemma3,
        (1152, 6912, 26, 4, 1),
        vocab_size=262_144, seq_len=32_768, window=512, rope_scaling=None),
    "gemma3-4b": row("3.88 B: the text part of Gemma 3 4B (https://arxiv.org/abs/2503.19786)",
        _gemma3, (2560, 10_240, 34, 8, 4)),
    "gemma3-12b": row("11.8 B: the text part of Gemma 3 12B (https://arxiv.org/abs/2503.19786)",
        _gemma3, (3840, 15_360, 48, 16, 8)),
    "gemma3-27b": row("27.0 B: the text part of Gemma 3 27B (https://arxiv.org/abs/2503.19786)",
        _gemma3, (5376, 21_504, 62, 32, 16), head_dim=128, query_dim=168),
    "vaultgemma-1b": row("1.04 B: VaultGemma 1B (https://arxiv.org/abs/2510.15001)", _gemma,
        (1152, 6912, 26, 4, 4), vocab_size=256_000, seq_len=1024, window=512,
        layer_pattern=("global",), out_norms="none"),
    "gemma4-e2b": row("4.63 B: the text part of Gemma 4 E2B (https://ai.google.dev/gemma)",
        _gemma4, (1536, 6144, 35, 8, 1), layer_pattern=("local",) * 4 + ("global",),
        num_shared_layers=20, shared_mlp_dim=12_288, layer_input_dim=256),
    "gemma4-e4b": row("7.46 B: the text part of Gemma 4 E4B (https://ai.google.dev/gemma)",
        _gemma4, (2560, 10_240, 42, 8, 2), num_shared_layers=18, layer_input_dim=256),
    "gemma4-31b": row("30.7 B: the text part of Gemma 4 31B (https://ai.google.dev/gemma)",
        _gemma4, (5376, 21_504, 60, 32, 16), window=1024, seq_len=262_144,
        global_kv_heads=4, global_values="keys"),
    "olmo2-1b": row("1.48 B: OLMo 2 1B (https://arxiv.org/abs/2501.00656)", _olmo2,
        (2048, 8192, 16, 16, 16)),
    "olmo2-7b": row("7.30 B: OLMo 2 7B (https://arxiv.org/abs/2501.00656)", _olmo2,
        (4096, 11_008, 32, 32, 32)),
    "olmo2-13b": row("13.7 B: OLMo 2 13B (https://arxiv.org/abs/2501.00656)", _olmo2,
        (5120, 13_824, 40, 40, 40)),
    "olmo2-32b": row("32.2 B: OLMo 2 32B (https://arxiv.org/abs/2501.00656)", _olmo2,
        (5120, 27_648, 64, 40, 8)),
    "olmo3-7b": row("7.30 B: OLMo 3 7B (https://arxiv.org/abs/2512.13961)", _olmo3,
        (4096, 11_008, 32, 32, 32)),
    "olmo3-32b": row("32.2 B: OLMo 3 32B (https://arxiv.org/abs/2512.13961)", _olmo3,
        (5120, 27_648, 64, 40, 8)),
    "smollm3-3b": row("3.08 B: SmolLM3 3B (https://huggingface.co/HuggingFaceTB/SmolLM3-3B)",
        _smollm3, (2048, 11_008, 36, 16, 4)),
    "qwen3.5-0.8b": row("752 M: the text of Qwen3.5 0.8B (https://huggingface.co/Qwen/Qwen3.5-0.8B)",
        _qwen35, (1024, 3584, 24, 8, 2), values=16, head="tied"),
    "qwen3.5-2b": row("1.88 B: the text of Qwen3.5 2B (https://huggingface.co/Qwen/Qwen3.5-2B)",
        _qwen35, (2048, 6144, 24, 8, 2), values=16, head="tied"),
    "qwen3.5-4b": row("4.21 B: the text of Qwen3.5 4B (https://huggingface.co/Qwen/Qwen3.5-4B)",
        _qwen35, (2560, 9216, 32, 16, 4), values=32, head="tied"),
    "qwen3.5-9b": row("8.95 B: the text of Qwen3.5 9B (https://huggingface.co/Qwen/Qwen3.5-9B)",
        _qwen35, (4096, 12_288, 32, 16, 4), values=32, head="untied"),
    "qwen3.5-27b": row("26.9 B: the text of Qwen3.5 27B (https://huggingface.co/Qwen/Qwen3.5-27B)",
        _qwen35, (5120, 17_408, 64, 24, 4), values=48, head="untied"),
    "lfm2-350m": row("0.354 B: LFM2 and LFM2.5 350M (https://arxiv.org/abs/2511.23404)",
        _lfm2, (1024, 4608, 16, 16, 8)),
    "lfm2-700m": row("0.742 B: LFM2 700M (https://arxiv.org/abs/2511.23404)",
        _lfm2, (1536, 6912, 16, 24, 8)),
    "lfm2-1.2b": row("1.17 B: LFM2 and LFM2.5 1.2B (https://arxiv.org/abs/2511.23404)",
        _lfm2, (2048, 8192, 16, 32, 8)),
    "lfm2-2.6b": row("2.57 B: LFM2 2.6B (https://arxiv.org/abs/2511.23404)",
        _lfm2, (2048, 10_752, 30, 32, 8), LFM2_LARGEST),
    "granite-3.3-2b": row(
        "2.53 B: Granite 3.3 2B (https://huggingface.co/ibm-granite/granite-3.3-2b-base)",
        _granite, (2048, 8192, 40, 32, 8), head_dim=64, logits_scaling=8.0),
    "granite-3.3-8b": row(
        "8.17 B: Granite 3.3 8B (https://huggingface.co/ibm-granite/granite-3.3-8b-base)",
        _granite, (4096, 12_800, 40, 32, 8), head_dim=128, logits_scaling=16.0),
    "phi-3-mini": row("3.82 B: Phi-3 mini 4K with its window (https://arxiv.org/abs/2404.14219)",
        _phi3, (3072, 8192, 32, 32, 32), head_dim=96),
    "phi-3-medium": row(
        "14.0 B: Phi-3 medium 4K with its window (https://arxiv.org/abs/2404.14219)",
        _phi3, (5120, 17_920, 40, 40, 10), head_dim=128),
    "glm-4-9b": row("9.40 B: GLM-4 9B, before 0414 (https://arxiv.org/abs/2406.12793)", _glm4,
        (4096, 13_696, 40, 32, 2)),
    "ernie-4.5-0.3b": row(
        "0.361 B: ERNIE 4.5 0.3B (https://huggingface.co/baidu/ERNIE-4.5-0.3B-PT)", _ernie45,
        (1024, 3072, 18, 16, 2)),
    "hunyuan-1.8b": row("1.79 B: Hunyuan 1.8B (https://huggingface.co/tencent/Hunyuan-1.8B-Instruct)",
        _hunyuan, (2048, 6144, 32, 16, 4)),
    "exaone-4.0-1.2b": row("1.28 B: EXAONE 4.0 1.2B (https://arxiv.org/abs/2507.11407)", _exaone4,
        (2048, 4096, 30, 32, 8), head_dim=64, seq_len=65_536),
    "exaone-4.0-32b": row("32.0 B: EXAONE 4.0 32B (https://arxiv.org/abs/2507.11407)", _exaone4,
        (5120, 27_392, 64, 40, 8), head_dim=128, seq_len=131_072, head="untied", window=4096),
    "apertus-8b": row(
        "8.05 B: Apertus 8B (https://arxiv.org/abs/2509.14233)", _apertus,
        (4096, 21_504, 32, 32, 8)),
    "apertus-70b": row(
        "70.6 B: Apertus 70B (https://arxiv.org/abs/2509.14233)", _apertus,
        (8192, 43_008, 80, 64, 8)),
    "cwm-32b": row(
        "32.6 B: Code World Model, context of 131,072 (https://arxiv.org/abs/2510.02387)",
        _cwm, (6144, 21_504, 64, 48, 8)),
    "helium-1-preview-2b": row(
        "2.17 B: Helium-1 preview 2B (https://huggingface.co/kyutai/helium-1-preview-2b)",
        _helium, (2560, 7040, 24, 20, 20)),
    "seed-oss-36b": row(
        "36.2 B: Seed-OSS 36B (https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Base)", _seed_oss,
        (5120, 27_648, 64, 80, 8)),
    "gpt2-small": row("124 M: GPT-2 (https://huggingface.co/openai-community/gpt2)", _gpt2,
        (768, 3072, 12, 12, 12)),
    "gpt2-medium": row("355 M: GPT-2 medium (https://huggingface.co/openai-community/gpt2-medium)",
        _gpt2, (1024, 4096, 24, 16, 16)),
    "gpt2-large": row("774 M: GPT-2 large (https://huggingface.co/openai-community/gpt2-large)",
        _gpt2, (1280, 5120, 36, 20, 20)),
    "gpt2-xl": row("1.56 B: GPT-2 XL (https://huggingface.co/openai-community/gpt2-xl)", _gpt2,
        (1600, 6400, 48, 25, 25)),
    "pythia-70m": row("70.4 M: Pythia 70M (https://arxiv.org/abs/2304.01373)", _pythia,
        (512, 2048, 6, 8, 8)),
    "pythia-160m": row("162 M: Pythia 160M (https://arxiv.org/abs/2304.01373)", _pythia,
        (768, 3072, 12, 12, 12)),
    "pythia-410m": row("405 M: Pythia 410M (https://arxiv.org/abs/2304.01373)", _pythia,
        (1024, 4096, 24, 16, 16)),
    "pythia-1b": row("1.01 B: Pythia 1B (https://arxiv.org/abs/2304.01373)", _pythia,
        (2048, 8192, 16, 8, 8)),
    "pythia-1.4b": row("1.41 B: Pythia 1.4B (https://arxiv.org/abs/2304.01373)", _pythia,
        (2048, 8192, 24, 16, 16)),
    "pythia-2.8b": row("2.78 B: Pythia 2.8B (https://arxiv.org/abs/2304.01373)", _pythia,
        (2560, 10_240, 32, 32, 32)),
    "pythia-6.9b": row("6.86 B: Pythia 6.9B (https://arxiv.org/abs/2304.01373)", _pythia,
        (4096, 16_384, 32, 32, 32), vocab_size=50_432),
    "pythia-12b": row("11.8 B: Pythia 12B (https://arxiv.org/abs/2304.01373)", _pythia,
        (5120, 20_480, 36, 40, 40), vocab_size=50_688),
}  # fmt: skip
SHORT = {name: PRESETS[f"phi-{name.removeprefix('phi')}"] for name in ("phi3-mini", "phi3-medium")}
"""Second names."""
