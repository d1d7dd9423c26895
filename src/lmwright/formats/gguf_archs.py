"""Architectures of GGUF, and what each says of a model otherwise than the others."""

from dataclasses import dataclass, field, replace
from typing import Any

from lmwright.formats import (
    gguf_afmoe,
    gguf_apertus,
    gguf_cohere,
    gguf_deepseek,
    gguf_ernie,
    gguf_exaone4,
    gguf_falcon,
    gguf_gemma4,
    gguf_hybrid,
    gguf_layer_norms,
    gguf_lfm2,
    gguf_llama4,
    gguf_mamba,
    gguf_mamba2,
    gguf_mellum,
    gguf_mistral3,
    gguf_nemotron,
)
from lmwright.formats.gguf_gemma4 import PATTERN
from lmwright.models.hf.apertus import FIXED_KEYS
from lmwright.models.hf.bitnet import QUANTIZATION, how_quantized


@dataclass(frozen=True)
class Arch:
    """One of GGUF's architectures and the Hugging Face one that it stands for."""

    hf: str
    model_type: str
    rotated: bool = False
    """q and k rows are stored in pairs (x0, y0, x1, y1 ...) instead of halves."""
    norm_shift: float = 0.0
    """Number that llama.cpp has added to the scales of norms."""
    window: bool = False
    """True if llama.cpp reads the length of a sliding window."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json that the metadata do not have, with their values."""
    mark: str = ""
    """Key of config.json that only its models have, where others have the same architecture."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Keys of KEYS that config.json names differently."""
    keys: dict[str, str] = field(default_factory=dict)
    """Metadata keys of its own, as in KEYS."""
    encoder: bool = False
    """True for a model that looks both ways; its head is not in the file."""
    scales: bool = True
    """True if llama.cpp scales its rotations."""
    factors: bool = False
    """True if it divides them by the factors of Llama 3.1."""
    acts: tuple[str, ...] = ()
    """The activations that it computes, where config.json may say others."""
    biases: bool = False
    """True if it takes biases of all projections of attention, or of the mlp."""
    even: bool = False
    """True if its heads have to be as wide together as the model."""
    partial: bool = False
    """True if it rotates a part of each head."""
    exact_yarn: bool = False
    """True if its models have YaRN without rounded borders, which no metadata say; llama.cpp rounds
    them."""
    by_part: bool = False
    """True if a fused matrix has the queries of all heads, then the keys, then the values, where
    Hugging Face has all three of a head."""
    rope_keys: dict[str, str] = field(default_factory=dict)
    """Keys of rotations that config.json names differently once the metadata are read."""
    hybrid: bool = False
    """True for layers with memories beside those with attention (`gguf_hybrid`)."""
    short_convs: bool = False
    """True for layers with a convolution in the place of attention (`gguf_lfm2`)."""
    mamba: bool = False
    """True for layers with Mamba-2 in the place of attention (`gguf_mamba`)."""
    deepseek: bool = False
    """True for experts as DeepSeek has them (`gguf_deepseek`)."""

    def shift_of(self, name: str) -> float:
        """Number that is added to a tensor by this Hugging Face name."""
        is_norm = name.endswith("norm.weight") and not name.endswith(gguf_hybrid.OWN_NORM)
        return self.norm_shift if is_norm else 0.0


DIFFUSION = "masked_diffusion"
SILU = {"hidden_act": "silu", "attention_bias": False}
UNTIED = {"tie_word_embeddings": False}
OWN_HEAD = ("qwen2moe", "apertus", "minimax-m2", "dots1", gguf_exaone4.MOE)
"""llama.cpp does not load their files without a head. Earlier versions wrote such files, which are
still read."""
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
ARCHS = {
    "llama": Arch(
        "LlamaForCausalLM", "llama", rotated=True, factors=True, biases=True, acts=("silu",)
    ),
    "arcee": Arch(
        "ArceeForCausalLM", "arcee", rotated=True, factors=True, fixed={"hidden_act": "relu2"}
    ),
    "qwen2": Arch("Qwen2ForCausalLM", "qwen2", even=True, fixed={"use_sliding_window": False}),
    "qwen3": Arch("Qwen3ForCausalLM", "qwen3", fixed={"use_sliding_window": False}),
    "qwen2moe": Arch(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        even=True,
        fixed={
            "norm_topk_prob": False, "decoder_sparse_step": 1, "use_sliding_window": False,
            "qkv_bias": True,
        },
        keys={"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    "qwen3moe": Arch(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "use_sliding_window": False},
    ),
    gguf_mellum.NAME: Arch(
        "MellumForCausalLM", "mellum", window=True,
        fixed=SILU | UNTIED | {"norm_topk_prob": True},
    ),
    "smollm3": Arch("SmolLM3ForCausalLM", "smollm3", rotated=True, fixed={"hidden_act": "silu"}),
    gguf_mistral3.NAME: Arch(
        "Ministral3ForCausalLM", "ministral3", rotated=True, fixed={"hidden_act": "silu"}
    ),
    "phi3": Arch("Phi3ForCausalLM", "phi3", partial=True, even=True, fixed={"hidden_act": "silu"}),
    "glm4": Arch("Glm4ForCausalLM", "glm4", partial=True, biases=True, acts=("silu",)),
    "chatglm": Arch(
        "GlmForCausalLM", "glm", partial=True, biases=True, even=True, acts=("silu",)
    ),
    "ernie4_5": Arch(
        "Ernie4_5ForCausalLM", "ernie4_5", fixed={"hidden_act": "silu", "use_bias": False}
    ),
    gguf_ernie.NAME: Arch(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", fixed={"hidden_act": "silu", "use_bias": False},
        keys=gguf_ernie.KEYS, renamed=gguf_ernie.RENAMED,
    ),
    gguf_apertus.NAME: Arch(
        "ApertusForCausalLM", "apertus", factors=True, fixed=FIXED_KEYS,
    ),
    gguf_exaone4.NAME: Arch(
        "Exaone4ForCausalLM", "exaone4", window=True, factors=True, even=True,
        fixed={"hidden_act": "silu"},
    ),
    gguf_cohere.PLAIN: Arch(
        "CohereForCausalLM", "cohere", even=True, fixed=gguf_cohere.FIXED, keys=gguf_cohere.KEYS,
    ),
    gguf_cohere.WINDOWS: Arch(
        "Cohere2ForCausalLM", "cohere2", even=True, window=True, fixed=gguf_cohere.FIXED,
        keys=gguf_cohere.KEYS,
    ),
    "starcoder2": Arch(
        "Starcoder2ForCausalLM", "starcoder2", biases=True, even=True,
        acts=("gelu_pytorch_tanh",), fixed={"use_bias": True},
        keys={gguf_layer_norms.EPS: "norm_epsilon"},
    ),
    "nemotron": Arch(
        "NemotronForCausalLM", "nemotron", norm_shift=1.0, partial=True, biases=True, even=True,
        acts=("relu2",), fixed=UNTIED, keys={gguf_layer_norms.EPS: "norm_eps"},
    ),
    "jais2": Arch(
        "Jais2ForCausalLM", "jais2", biases=True, acts=("relu2",),
        fixed={"attention_bias": True, "mlp_bias": True},
        keys={gguf_layer_norms.EPS: "layer_norm_eps"},
    ),
    gguf_layer_norms.STABLE: Arch(
        "StableLmForCausalLM", "stablelm", partial=True, even=True,
        fixed=UNTIED | {"hidden_act": "silu"},
        keys={
            gguf_layer_norms.EPS: "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
    ),
    "phi2": Arch(
        "PhiForCausalLM", "phi", partial=True, biases=True, even=True, acts=("gelu_new",),
        fixed=UNTIED | {"qk_layernorm": False}, keys={gguf_layer_norms.EPS: "layer_norm_eps"},
    ),
    gguf_layer_norms.OLMO: Arch(
        "OlmoForCausalLM", "olmo", rotated=True, even=True, fixed={"hidden_act": "silu"},
        keys={gguf_layer_norms.LIMIT: "clip_qkv"},
    ),
    gguf_exaone4.MOE: Arch(
        "ExaoneMoeForCausalLM", "exaone_moe", window=True, factors=True, deepseek=True,
        fixed={"hidden_act": "silu"}, keys=gguf_exaone4.MOE_KEYS,
    ),
    "hunyuan-dense": Arch(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", fixed={"hidden_act": "silu"}
    ),
    "hunyuan-moe": Arch(
        "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", fixed={"hidden_act": "silu"},
        keys={"expert_shared_feed_forward_length": "intermediate_size"},
        renamed={"moe_intermediate_size": "intermediate_size", "num_experts_per_tok": "moe_topk"},
    ),
    "seed_oss": Arch(
        "SeedOssForCausalLM", "seed_oss", biases=True,
        fixed={"hidden_act": "silu", "attention_out_bias": False},
    ),
    "gptneox": Arch(
        "GPTNeoXForCausalLM", "gpt_neox", partial=True, biases=True, by_part=True,
        acts=("gelu", "gelu_new"),
        fixed=UNTIED | {"attention_bias": True},
        keys={
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
            "hidden_activation": "hidden_act",  # which llama.cpp does not read
        },
        rope_keys={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    ),
    "gpt2": Arch(
        "GPT2LMHeadModel", "gpt2", biases=True, acts=("gelu", "gelu_new"),
        renamed={"hidden_act": "activation_function"},
        keys={
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "hidden_activation": "activation_function",
        },
    ),
    "starcoder": Arch(
        "GPTBigCodeForCausalLM", "gpt_bigcode", biases=True, acts=("gelu_pytorch_tanh",),
        fixed={"multi_query": True}, renamed={"hidden_act": "activation_function"},
        keys={gguf_layer_norms.EPS: "layer_norm_epsilon"},
    ),
    "olmo2": Arch("Olmo2ForCausalLM", "olmo2", even=True, fixed=UNTIED),
    "olmoe": Arch(
        "OlmoeForCausalLM", "olmoe", even=True, fixed=UNTIED,
        renamed={"moe_intermediate_size": "intermediate_size"},
    ),
    "gpt-oss": Arch(
        "GptOssForCausalLM", "gpt_oss", window=True, biases=True,
        fixed=UNTIED | {"hidden_act": "silu"},
        renamed={"moe_intermediate_size": "intermediate_size"},
        exact_yarn=True,
    ),
    "gemma": Arch(
        "GemmaForCausalLM", "gemma", norm_shift=1.0,
        fixed={"hidden_act": GEMMA["hidden_activation"], "tie_word_embeddings": True},
    ),
    "gemma2": Arch("Gemma2ForCausalLM", "gemma2", norm_shift=1.0, window=True, fixed=GEMMA),
    "gemma3": Arch(
        "Gemma3ForCausalLM",
        "gemma3_text",
        norm_shift=1.0,
        window=True,
        fixed=GEMMA | {"rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6},
    ),
    "gemma4": Arch(
        "Gemma4ForCausalLM", "gemma4_text", window=True, factors=True, keys=gguf_gemma4.KEYS,
        fixed=GEMMA,
    ),
    "granite": Arch(
        "GraniteForCausalLM", "granite", rotated=True, factors=True, biases=True,
        fixed={"hidden_act": "silu"},
        keys=gguf_mamba.MULTIPLIERS,
    ),
    "granitemoe": Arch(
        "GraniteMoeForCausalLM", "granitemoe", rotated=True, factors=True, biases=True,
        fixed={"hidden_act": "silu"}, keys=gguf_mamba.MULTIPLIERS,
        renamed={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    ),
    gguf_mamba.NAME: Arch(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", rotated=True, biases=True, mamba=True,
        keys=gguf_mamba.KEYS,
        renamed={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    ),
    gguf_nemotron.NAME: Arch(
        "NemotronHForCausalLM", "nemotron_h", fixed=gguf_nemotron.FIXED, keys=gguf_nemotron.KEYS,
        renamed=gguf_nemotron.RENAMED,
    ),
    gguf_nemotron.MOE: Arch(
        "NemotronHForCausalLM", "nemotron_h", mark=gguf_nemotron.EXPERTS,
        fixed=gguf_nemotron.MOE_FIXED, keys=gguf_nemotron.MOE_KEYS,
        renamed=gguf_nemotron.RENAMED | {"num_experts": gguf_nemotron.EXPERTS},
    ),
    gguf_falcon.NAME: Arch(
        "FalconH1ForCausalLM", "falcon_h1", fixed=gguf_falcon.FIXED, keys=gguf_falcon.KEYS,
    ),
    gguf_mamba2.NAME: Arch(
        "Mamba2ForCausalLM", "mamba2", keys=gguf_mamba2.KEYS, renamed=gguf_mamba2.RENAMED,
    ),
    "eurobert": Arch(
        "EuroBertForMaskedLM", "eurobert", encoder=True, scales=False,
        fixed=SILU,
    ),
    "modern-bert": Arch(
        "ModernBertForMaskedLM", "modernbert", encoder=True, scales=False, window=True,
        fixed=dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias"), False),
        renamed={"rope_theta": "global_rope_theta", "sliding_window": "local_attention"},
        keys={
            "attention.layer_norm_epsilon": "norm_eps",
            PATTERN: "global_attn_every_n_layers",
            "rope.freq_base_swa": "local_rope_theta",
            "hidden_activation": "hidden_activation",
        },
    ),
    "bitnet": Arch(
        "BitNetForCausalLM", "bitnet",
        fixed={
            "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": True,
            QUANTIZATION: how_quantized("online"),
        },
    ),
    "qwen35": Arch(
        "Qwen3_5ForCausalLM", "qwen3_5_text", norm_shift=1.0, partial=True, hybrid=True,
        fixed=SILU,
        keys=gguf_hybrid.KEYS,
    ),
    "qwen35moe": Arch(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", norm_shift=1.0, partial=True, hybrid=True,
        fixed=SILU,
        keys=gguf_hybrid.MOE_KEYS,
    ),
    "qwen3next": Arch(
        "Qwen3NextForCausalLM", "qwen3_next", norm_shift=1.0, partial=True, hybrid=True,
        fixed=SILU | {"norm_topk_prob": True, "decoder_sparse_step": 1},
        keys=gguf_hybrid.MOE_KEYS,
    ),
    "lfm2": Arch(
        "Lfm2ForCausalLM", "lfm2", even=True, short_convs=True, fixed=gguf_lfm2.FIXED,
        keys=gguf_lfm2.KEYS, renamed={"rms_norm_eps": "norm_eps"},
    ),
    "lfm2moe": Arch(
        "Lfm2MoeForCausalLM", "lfm2_moe", even=True, short_convs=True,
        fixed=gguf_lfm2.MOE_FIXED,
        keys=gguf_lfm2.MOE_KEYS, renamed={"rms_norm_eps": "norm_eps"},
    ),
    "dots1": Arch(
        "Dots1ForCausalLM", "dots1", fixed=SILU, keys=gguf_deepseek.KEYS,
        renamed=gguf_deepseek.RENAMED, deepseek=True,
    ),
    gguf_deepseek.GLM: Arch(
        "Glm4MoeForCausalLM", "glm4_moe", partial=True, biases=True, fixed={"hidden_act": "silu"},
        keys=gguf_deepseek.KEYS, renamed=gguf_deepseek.RENAMED, deepseek=True,
    ),
    gguf_llama4.NAME: Arch(
        "Llama4ForCausalLM", "llama4_text", factors=True, fixed={"hidden_act": "silu"},
        keys=gguf_llama4.KEYS, renamed=gguf_llama4.RENAMED,
    ),
    gguf_afmoe.NAME: Arch(
        "AfmoeForCausalLM", "afmoe", window=True, fixed=gguf_afmoe.FIXED, keys=gguf_afmoe.KEYS,
    ),
    "minimax-m2": Arch(
        "MiniMaxM2ForCausalLM", "minimax_m2", partial=True, fixed={"hidden_act": "silu"},
        renamed={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        deepseek=True,
    ),
    gguf_deepseek.LATENTS: Arch(
        "DeepseekV3ForCausalLM", "deepseek_v3", fixed=SILU, keys=gguf_deepseek.LATENT_KEYS,
        renamed=gguf_deepseek.RENAMED, deepseek=True,
    ),
    gguf_deepseek.GROWING: Arch(
        "Mistral4ForCausalLM", "mistral4", fixed=SILU, keys=gguf_deepseek.LATENT_KEYS,
        renamed=gguf_deepseek.RENAMED, deepseek=True,
    ),
    "llada": Arch(
        "EuroBertForMaskedLM", "eurobert", rotated=True, mark=DIFFUSION, acts=("silu",)
    ),
    "dream": Arch(
        "Qwen2ForCausalLM", "qwen2", even=True, mark=DIFFUSION,
        fixed={"hidden_act": "silu"},
    ),
}  # fmt: skip
# without plain layers, norms of q and k, and parts of a head that are not rotated
SOLAR = Arch(
    "SolarOpenForCausalLM", "solar_open", biases=True, fixed={"hidden_act": "silu"},
    keys=gguf_deepseek.KEYS, renamed=gguf_deepseek.RENAMED, deepseek=True,
)  # fmt: skip
# Granite 4's layers without its multipliers, of which some rotate a part of each head
BAMBA = Arch(
    "BambaForCausalLM", "bamba", rotated=True, partial=True, biases=True, mamba=True,
    fixed={"hidden_act": "silu"}, keys=gguf_mamba.MIXER,
)  # fmt: skip
TOLD = {
    gguf_deepseek.GLM: (SOLAR, gguf_deepseek.is_solar),
    gguf_mamba.NAME: (BAMBA, gguf_mamba.is_bamba),
}
"""Models that go by another one's name in GGUF, and what tells them by metadata and tensors."""
SAME = {  # whose files are those of another
    "MistralForCausalLM": "llama",
    "DeepseekV2ForCausalLM": gguf_deepseek.LATENTS,
    "Glm4MoeLiteForCausalLM": gguf_deepseek.LATENTS,
}
MIXTRAL = Arch(
    "MixtralForCausalLM", "mixtral", rotated=True, factors=True, acts=("silu",),
    renamed={"num_experts": "num_local_experts"},
)  # fmt: skip
# OLMo 2 with windows in three of four layers, where nothing scales rotations
OLMO3 = Arch("Olmo3ForCausalLM", "olmo3", even=True, window=True, fixed=UNTIED)
# Granite 3's experts with an mlp beside them
BESIDE = replace(
    ARCHS["granitemoe"], hf="GraniteMoeSharedForCausalLM", model_type="granitemoeshared",
    keys=gguf_mamba.MULTIPLIERS | {gguf_mamba.SHARED: "shared_intermediate_size"},
)  # fmt: skip
VARIANTS = {
    "llama": (MIXTRAL, "expert_count"), "olmo2": (OLMO3, "attention.sliding_window"),
    "granitemoe": (BESIDE, gguf_mamba.SHARED),
}  # fmt: skip
"""Models that go by another one's name in GGUF, and the metadata key that only they have."""
# llama.cpp scales the queries of its largest gemmas otherwise
LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
