"""Model presets with experts: total and active parameters in the names of their sources.

`lmwright params olmoe-1b-7b` counts both. The smallest is our own, for laptops and tests.
"""

from typing import Any

from lmwright.presets.rows import row


def _moe(kind: str, experts: dict[str, Any], **fields: Any) -> Any:
    from lmwright.models import KINDS
    from lmwright.models.experts import Experts

    return KINDS[kind](experts=Experts(**experts), **fields)


def _oss(num_layers: int, num_experts: int) -> Any:
    from lmwright.nn.rope import YarnRope

    experts = dict(num_experts=num_experts, experts_per_token=4, mlp_dim=2880, bias="all")
    return _moe(
        "gpt-oss", experts, vocab_size=201_088, embed_dim=2880, num_layers=num_layers,
        num_heads=64, num_kv_heads=8, head_dim=64, seq_len=131_072,
        rope_scaling=YarnRope(factor=32.0, original_seq_len=4096, borders="exact"),
    )  # fmt: skip


def _gemma4(**fields: Any) -> Any:
    from lmwright.nn.rope import ProportionalRope

    experts = dict(num_experts=128, experts_per_token=8, mlp_dim=704)
    return _moe("gemma4-moe", experts, rope_scaling=ProportionalRope(fraction=0.25), **fields)


def _mellum(**fields: Any) -> Any:
    from lmwright.nn.rope import YarnRope

    experts = dict(num_experts=64, experts_per_token=8, mlp_dim=896, balance_loss=0.001)
    rope = YarnRope(factor=16.0, original_seq_len=8192)
    return _moe("mellum", experts, rope_scaling=rope, local_rope_theta=500_000.0, **fields)


def _mistral4(**fields: Any) -> Any:
    experts = dict(num_experts=128, experts_per_token=4, mlp_dim=2048, shared_dim=2048)
    latents = dict(head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=256,
                   q_lora_rank=1024)  # fmt: skip
    return _moe("mistral4", experts, **latents, **fields)


def _deepseek(kind: str, experts: dict[str, Any], **fields: Any) -> Any:
    own = dict(dense_layers=(0,), head_dim=192, qk_rope_head_dim=64, v_head_dim=128,
               kv_lora_rank=512)  # fmt: skip
    return _moe(kind, experts, **(own | fields))


def _stretched(kind: str, experts: dict[str, Any], mscale: float, **fields: Any) -> Any:
    from lmwright.nn.rope import YarnRope

    rope = YarnRope(factor=40.0, original_seq_len=4096, mscale=mscale, mscale_all_dim=mscale)
    return _deepseek(kind, experts, seq_len=163_840, rope_scaling=rope, **fields)


BIASED: dict[str, Any] = dict(score="sigmoid", bias_rate=0.001)


def _solar(**fields: Any) -> Any:
    from lmwright.nn.rope import YarnRope

    experts = dict(num_experts=128, experts_per_token=8, mlp_dim=1280, shared_dim=1280, **BIASED)
    rope = YarnRope(factor=2.0, original_seq_len=65_536)
    return _moe("solar-open", experts, rope_scaling=rope, **fields)


def _trinity(width: int, **fields: Any) -> Any:
    experts = dict(num_experts=128, experts_per_token=8, mlp_dim=width, shared_dim=width,
                   scale=2.826, **BIASED)  # fmt: skip
    return _moe(
        "afmoe", experts, vocab_size=200_192, head_dim=128, dense_layers=(0, 1), window=2048,
        embedding_scale="root", seq_len=131_072, **fields,
    )  # fmt: skip


def _llama4(num_experts: int, factor: float | None = None, **fields: Any) -> Any:
    from lmwright.nn.rope import Llama3Rope

    experts = dict(num_experts=num_experts, experts_per_token=1, mlp_dim=8192, shared_dim=8192,
                   score="sigmoid", shares="all", weighed="inputs")  # fmt: skip
    rope = Llama3Rope(factor=factor, original_seq_len=8192) if factor else None
    return _moe(
        "llama4", experts, vocab_size=202_048, embed_dim=5120, mlp_dim=16_384, num_layers=48,
        num_heads=40, num_kv_heads=8, head_dim=128, rope_scaling=rope, **fields,
    )  # fmt: skip


PRESETS = {
    "moe-6m": row(
        "6.04 M, 3.68 M active: trains in minutes on two cores; the default vocabulary of 8,192",
        _moe, "qwen3-moe", dict(num_experts=8, experts_per_token=2, mlp_dim=128,
                                balance_loss=0.01, z_loss=0.001),
        vocab_size=8192, embed_dim=256, mlp_dim=256, num_layers=4, num_heads=8, num_kv_heads=4,
        head_dim=32, seq_len=512, head="tied", rope_theta=10_000.0),
    "qwen1.5-moe-a2.7b": row(
        "14.3 B, 2.69 B active: Qwen1.5-MoE-A2.7B (https://qwenlm.github.io/blog/qwen-moe)",
        _moe, "qwen2-moe", dict(num_experts=60, experts_per_token=4, mlp_dim=1408, shared_dim=5632,
                                shared_gate="sigmoid", shares="all", balance_loss=0.001),
        vocab_size=151_936, embed_dim=2048, mlp_dim=5632, num_layers=24, num_heads=16,
        num_kv_heads=16, head_dim=128, seq_len=8192),
    "olmoe-1b-7b": row(
        "6.92 B, 1.28 B active: OLMoE-1B-7B (https://arxiv.org/abs/2409.02060)",
        _moe, "olmoe", dict(num_experts=64, experts_per_token=8, mlp_dim=1024, shares="all",
                            balance_loss=0.01, z_loss=0.001),
        vocab_size=50_304, embed_dim=2048, num_layers=16, num_heads=16, num_kv_heads=16,
        head_dim=128, seq_len=4096),
    "qwen3-30b-a3b": row(
        "30.5 B, 3.35 B active: Qwen3-30B-A3B (https://arxiv.org/abs/2505.09388)",
        _moe, "qwen3-moe", dict(num_experts=128, experts_per_token=8, mlp_dim=768,
                                balance_loss=0.001),
        vocab_size=151_936, embed_dim=2048, mlp_dim=6144, num_layers=48, num_heads=32,
        num_kv_heads=4, head_dim=128, seq_len=40_960),
    "mellum2-12b-a2.5b": row(
        "12.1 B, 2.44 B active: Mellum 2 (https://arxiv.org/abs/2605.31268)",
        _mellum, vocab_size=98_304, embed_dim=2304, mlp_dim=7168, num_layers=28, num_heads=32,
        num_kv_heads=4, head_dim=128, seq_len=131_072),
    "ernie-4.5-21b-a3b": row(
        "21.8 B, 3.35 B active: ERNIE 4.5 21B-A3B (https://ernie.baidu.com/blog/posts/ernie4.5)",
        _moe, "ernie4-5-moe", dict(num_experts=64, experts_per_token=6, mlp_dim=1536,
                                   shared_dim=3072, bias_rate=0.001),
        vocab_size=103_424, embed_dim=2560, mlp_dim=12_288, num_layers=28, num_heads=20,
        num_kv_heads=4, head_dim=128, dense_layers=(0,), seq_len=131_072),
    "qwen3.5-35b-a3b": row(
        "34.7 B, 3.45 B active: the text of Qwen3.5 35B-A3B "
        "(https://huggingface.co/Qwen/Qwen3.5-35B-A3B)",
        _moe, "qwen3-5-moe", dict(num_experts=256, experts_per_token=8, mlp_dim=512,
                                  shared_dim=512, shared_gate="sigmoid", balance_loss=0.001),
        vocab_size=248_320, embed_dim=2048, num_layers=40, num_heads=16, num_kv_heads=2,
        head_dim=256, seq_len=262_144),
    "qwen3-next-80b-a3b": row(
        "79.7 B, 3.87 B active: Qwen3-Next-80B-A3B and Qwen3-Coder-Next "
        "(https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct)",
        _moe, "qwen3-next", dict(num_experts=512, experts_per_token=10, mlp_dim=512,
                                 shared_dim=512, shared_gate="sigmoid", balance_loss=0.001),
        vocab_size=151_936, embed_dim=2048, num_layers=48, num_heads=16, num_kv_heads=2,
        head_dim=256, seq_len=262_144),
    "lfm2-8b-a1b": row(
        "8.34 B, 1.56 B active: LFM2-8B-A1B (https://arxiv.org/abs/2511.23404)",
        _moe, "lfm2-moe", dict(num_experts=32, experts_per_token=4, mlp_dim=1792, **BIASED),
        vocab_size=65_536, embed_dim=2048, mlp_dim=7168, num_layers=24, num_heads=32,
        num_kv_heads=8, head_dim=64, seq_len=128_000, dense_layers=(0, 1),
        mixer_pattern=("conv", "conv", *("full", "conv", "conv", "conv") * 4, "full")),
    "gemma4-26b-a4b": row(
        "25.2 B, 3.82 B active: the text part of Gemma 4 26B-A4B (https://ai.google.dev/gemma)",
        _gemma4, vocab_size=262_144, embed_dim=2816, mlp_dim=2112, num_layers=30, num_heads=16,
        num_kv_heads=8, head_dim=256, global_kv_heads=2, global_values="keys", window=1024,
        seq_len=262_144, logits_soft_cap=30.0),
    "deepseek-v2-lite": row(
        "15.7 B, 2.66 B active: DeepSeek-V2-Lite (https://arxiv.org/abs/2405.04434)",
        _stretched, "deepseek-v2", dict(num_experts=64, experts_per_token=6, mlp_dim=1408,
                                        shared_dim=2816, shares="all", balance_loss=0.001),
        0.707, vocab_size=102_400, embed_dim=2048, mlp_dim=10_944, num_layers=27, num_heads=16,
        num_kv_heads=16),
    "deepseek-v3": row(
        "671 B, 37.6 B active: DeepSeek-V3 (https://arxiv.org/abs/2412.19437)",
        _stretched, "deepseek-v3", dict(num_experts=256, experts_per_token=8, mlp_dim=2048,
                                        shared_dim=2048, scale=2.5, num_groups=8,
                                        groups_per_token=4, **BIASED),
        1.0, vocab_size=129_280, embed_dim=7168, mlp_dim=18_432, num_layers=61, num_heads=128,
        num_kv_heads=128, q_lora_rank=1536, dense_layers=(0, 1, 2)),
    "moonlight-16b-a3b": row(
        "16.0 B, 2.91 B active: Moonlight-16B-A3B (https://arxiv.org/abs/2502.16982)",
        _deepseek, "deepseek-v3", dict(num_experts=64, experts_per_token=6, mlp_dim=1408,
                                       shared_dim=2816, scale=2.446, **BIASED),
        vocab_size=163_840, embed_dim=2048, mlp_dim=11_264, num_layers=27, num_heads=16,
        num_kv_heads=16, seq_len=8192, rope_theta=50_000.0, norm_eps=1e-5),
    "glm-4.7-flash": row(
        "29.9 B, 3.90 B active: GLM-4.7-Flash (https://huggingface.co/zai-org/GLM-4.7-Flash)",
        _deepseek, "glm4-moe-lite", dict(num_experts=64, experts_per_token=4, mlp_dim=1536,
                                         shared_dim=1536, scale=1.8, **BIASED),
        vocab_size=154_880, embed_dim=2048, mlp_dim=10_240, num_layers=47, num_heads=20,
        num_kv_heads=20, head_dim=256, v_head_dim=256, q_lora_rank=768, seq_len=202_752,
        rope_theta=1_000_000.0),
    "glm-4.5-air": row(
        "107 B, 13.4 B active: GLM-4.5-Air (https://arxiv.org/abs/2508.06471)",
        _moe, "glm4-moe", dict(num_experts=128, experts_per_token=8, mlp_dim=1408,
                               shared_dim=1408, **BIASED),
        vocab_size=151_552, embed_dim=4096, mlp_dim=10_944, num_layers=46, num_heads=96,
        num_kv_heads=8, head_dim=128, bias="qkv", dense_layers=(0,), seq_len=131_072),
    "minimax-m2": row(
        "229 B, 11.0 B active: MiniMax-M2 (https://huggingface.co/MiniMaxAI/MiniMax-M2)",
        _moe, "minimax-m2", dict(num_experts=256, experts_per_token=8, mlp_dim=1536, **BIASED),
        vocab_size=200_064, embed_dim=3072, num_layers=62, num_heads=48, num_kv_heads=8,
        head_dim=128, seq_len=196_608),
    "k-exaone-236b-a23b": row(
        "237 B, 23.7 B active: K-EXAONE 236B-A23B (https://arxiv.org/abs/2601.01739)",
        _moe, "exaone-moe", dict(num_experts=128, experts_per_token=8, mlp_dim=2048,
                                 shared_dim=2048, scale=2.5, **BIASED),
        vocab_size=153_600, embed_dim=6144, mlp_dim=18_432, num_layers=48, num_heads=64,
        num_kv_heads=8, head_dim=128, dense_layers=(0,), rope_theta=1_000_000.0,
        seq_len=262_144),
    "mistral-small-4-119b": row(
        "119 B, 6.63 B active: the text of Mistral Small 4, by the defaults of transformers' class "
        "(https://huggingface.co/mistralai/Mistral-Small-4-119B-2603)",
        _mistral4, vocab_size=131_072, embed_dim=4096, mlp_dim=12_288, num_layers=36, num_heads=32,
        num_kv_heads=32, seq_len=1_048_576),
    "solar-open-100b": row(
        "103 B, 12.1 B active: Solar Open 100B (https://arxiv.org/abs/2601.07022)",
        _solar, vocab_size=196_608, embed_dim=4096, num_layers=48, num_heads=64, num_kv_heads=8,
        head_dim=128, seq_len=131_072),
    "trinity-nano": row(
        "6.12 B, 1.02 B active: Trinity Nano (https://arxiv.org/abs/2602.17004)",
        _trinity, 256, embed_dim=1024, mlp_dim=3072, num_layers=56, num_heads=8, num_kv_heads=2),
    "trinity-mini": row(
        "26.1 B, 3.47 B active: Trinity Mini (https://arxiv.org/abs/2602.17004)",
        _trinity, 1024, embed_dim=2048, mlp_dim=6144, num_layers=32, num_heads=32,
        num_kv_heads=4),
    "llama-4-scout": row(
        "108 B, 17.2 B active: the text part of Llama 4 Scout, context of 262,144 "
        "(https://huggingface.co/meta-llama/Llama-4-Scout-17B-16E)",
        _llama4, 16, factor=8.0, seq_len=262_144),
    "llama-4-maverick": row(
        "401 B, 17.2 B active: the text part of Llama 4 Maverick, context of 1,048,576 "
        "(https://huggingface.co/meta-llama/Llama-4-Maverick-17B-128E)",
        _llama4, 128, seq_len=1_048_576, rotated_norm="none", dense_layers=tuple(range(0, 48, 2))),
    "gpt-oss-20b": row(
        "20.9 B, 4.19 B active: gpt-oss-20b (https://arxiv.org/abs/2508.10925)",
        _oss, num_layers=24, num_experts=32),
    "gpt-oss-120b": row(
        "117 B, 5.71 B active: gpt-oss-120b (https://arxiv.org/abs/2508.10925)",
        _oss, num_layers=36, num_experts=128),
    "mixtral-8x7b": row(
        "46.7 B, 12.9 B active: Mixtral 8x7B (https://arxiv.org/abs/2401.04088)",
        _moe, "mixtral", dict(num_experts=8, experts_per_token=2, mlp_dim=14_336,
                              balance_loss=0.02),
        vocab_size=32_000, embed_dim=4096, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, seq_len=32_768),
    "hunyuan-a13b": row(
        "80.4 B, 12.7 B active: Hunyuan A13B (https://huggingface.co/tencent/Hunyuan-A13B-Instruct)",
        _moe, "hunyuan-moe", dict(num_experts=64, experts_per_token=8, mlp_dim=3072,
                                  shared_dim=3072),
        vocab_size=128_167, embed_dim=4096, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, seq_len=32_768, rope_theta=11_158_840.0, head="tied"),
    "phi-3.5-moe": row(
        "41.9 B, 6.64 B active: Phi-3.5-MoE for 4096 tokens (https://arxiv.org/abs/2404.14219)",
        _moe, "phimoe", dict(num_experts=16, experts_per_token=2, mlp_dim=6400, shares="near",
                             margin=0.02),
        vocab_size=32_064, embed_dim=4096, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, seq_len=4096, bias="attention", head_bias="all"),
}  # fmt: skip
