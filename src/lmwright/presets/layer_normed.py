"""Presets of released decoders with layer norms, with the shapes of their config.json."""

from typing import Any

from lmwright.presets.rows import Shape, row, sizes


def _cohere(shape: Shape, **fields: Any) -> Any:
    from lmwright.models.cohere import Cohere

    return Cohere(**sizes(shape), vocab_size=256_000, head_dim=128, **fields)


def _cohere2(shape: Shape, **fields: Any) -> Any:
    return _cohere(shape, window=4096, rope_theta=50_000.0, logits_multiplier=0.25, **fields)


def _starcoder2(shape: Shape, **fields: Any) -> Any:
    from lmwright.models.starcoder2 import Starcoder2

    usual = {"vocab_size": 49_152, "head_dim": 128, "seq_len": 16_384, "window": 4096}
    return Starcoder2(**sizes(shape), **usual, **fields)


def _opt(shape: Shape) -> Any:
    from lmwright.models.opt import Opt

    width = shape[0] // shape[3]
    return Opt(**sizes(shape), vocab_size=50_272, head_dim=width, seq_len=2048)


def _stablelm2(shape: Shape, **fields: Any) -> Any:
    from lmwright.models.stablelm import StableLm

    usual = {"vocab_size": 100_352, "head_dim": shape[0] // shape[3], "seq_len": 4096}
    return StableLm(**sizes(shape), **usual, **fields)


def _phi(shape: Shape, **fields: Any) -> Any:
    from lmwright.models.phi import Phi

    usual = {"vocab_size": 51_200, "head_dim": shape[0] // shape[3], "seq_len": 2048}
    return Phi(**sizes(shape), **usual, **fields)


def _olmo(shape: Shape, **fields: Any) -> Any:
    from lmwright.models.olmo import Olmo

    return Olmo(**sizes(shape), vocab_size=50_304, head_dim=128, seq_len=2048, **fields)


PRESETS = {
    "command-r": row(
        "32.3 B: Command R 08-2024 (https://huggingface.co/CohereLabs/c4ai-command-r-08-2024)",
        _cohere, (8192, 24_576, 40, 64, 8), seq_len=131_072, rope_theta=4_000_000.0),
    "command-r7b": row(
        "8.03 B: Command R7B 12-2024 (https://huggingface.co/CohereLabs/c4ai-command-r7b-12-2024)",
        _cohere2, (4096, 14_336, 32, 32, 8), seq_len=132_096),
    "command-a": row(
        "111 B: Command A 03-2025 (https://arxiv.org/abs/2504.00698)",
        _cohere2, (12_288, 36_864, 64, 96, 8), seq_len=131_072),
    "starcoder2-3b": row(
        "3.03 B: StarCoder2 3B (https://arxiv.org/abs/2402.19173)",
        _starcoder2, (3072, 12_288, 30, 24, 2), rope_theta=999_999.4420358813),
    "starcoder2-7b": row(
        "7.17 B: StarCoder2 7B (https://arxiv.org/abs/2402.19173)",
        _starcoder2, (4608, 18_432, 32, 36, 4), rope_theta=1e6),
    "starcoder2-15b": row(
        "16 B: StarCoder2 15B (https://arxiv.org/abs/2402.19173)",
        _starcoder2, (6144, 24_576, 40, 48, 4), rope_theta=1e5, head="untied"),
    "stablelm-2-1.6b": row(
        "1.64 B: Stable LM 2 1.6B (https://arxiv.org/abs/2402.17834)",
        _stablelm2, (2048, 5632, 24, 32, 32), bias="qkv"),
    "stablelm-2-12b": row(
        "12.1 B: Stable LM 2 12B (https://huggingface.co/stabilityai/stablelm-2-12b)",
        _stablelm2, (5120, 13_824, 40, 32, 8), residual="parallel", qk_norm="head"),
    "phi-1.5": row(
        "1.42 B: Phi-1.5 (https://arxiv.org/abs/2309.05463)",
        _phi, (2048, 8192, 24, 32, 32)),
    "phi-2": row(
        "2.78 B: Phi-2 (https://huggingface.co/microsoft/phi-2)",
        _phi, (2560, 10_240, 32, 32, 32), rotary_fraction=0.4),
    "opt-125m": row("125 M: OPT 125M (https://arxiv.org/abs/2205.01068)",
        _opt, (768, 3072, 12, 12, 12)),
    "opt-1.3b": row("1.32 B: OPT 1.3B (https://arxiv.org/abs/2205.01068)",
        _opt, (2048, 8192, 24, 32, 32)),
    "opt-2.7b": row("2.65 B: OPT 2.7B (https://arxiv.org/abs/2205.01068)",
        _opt, (2560, 10_240, 32, 32, 32)),
    "opt-6.7b": row("6.66 B: OPT 6.7B (https://arxiv.org/abs/2205.01068)",
        _opt, (4096, 16_384, 32, 32, 32)),
    "olmo-1b": row(
        "1.18 B: OLMo 1B (https://arxiv.org/abs/2402.00838)",
        _olmo, (2048, 8192, 16, 16, 16), head="tied"),
    "olmo-7b": row(
        "6.89 B: OLMo 7B (https://arxiv.org/abs/2402.00838)",
        _olmo, (4096, 11_008, 32, 32, 32)),
}  # fmt: skip
