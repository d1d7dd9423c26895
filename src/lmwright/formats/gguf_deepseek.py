"""DeepSeek's experts and latents in GGUF, as llama.cpp's convert_hf_to_gguf.py writes them.

    expert_gating_func                      1 for softmax, 2 for sigmoid
    attention.key_length, head_count_kv     a latent with its rotated key, and 1 head of these
    attention.key_length_mla                width of a head of queries
    attention.temperature_scale             the weight by which Mistral 4's queries grow
    rope.scaling.yarn_log_multiplier        a tenth of mscale_all_dim
    attn_k_b [heads, rank, width]           the keys' rows of kv_b_proj, turned
    attn_v_b [heads, width, rank]           the values' rows

The dims of a pair that is rotated are neighbors there, too.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from lmwright.errors import UserError
from lmwright.formats.gguf_apart import Cut
from lmwright.formats.gguf_rope import decimal
from lmwright.models.hf.deepseek import GREEDY, GROUPS, PLAIN, ROTATED
from lmwright.models.hf.ministral3 import GROWTH
from lmwright.models.hf.moe import DENSE

LATENTS, GROWING, GLM = "deepseek2", "mistral4", "glm4moe"
OF_LATENTS = (LATENTS, GROWING)
KEYS = {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
LATENT_KEYS = KEYS | {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": ROTATED,
}
V2 = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
RENAMED = {"num_experts": "n_routed_experts"}
SOFTMAXES = (V2["model_type"], GROWING)
GATING = "expert_gating_func"
SOFTMAX, SIGMOID = 1, 2
WITHOUT = (26, 27)  # layers of models whose queries llama.cpp does not expect from latents
MULTIPLIER = "rope.scaling.yarn_log_multiplier"
SCALE, LENGTH = "attention.temperature_scale", "attention.temperature_length"
JOINED, PARTS = ".kv_b_proj.weight", (".k_b_proj.weight", ".v_b_proj.weight")


def metadata(config: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """Keys below the architecture's name. Raises UserError for what llama.cpp does not compute."""
    if DENSE in config and "first_k_dense_replace" not in config:
        raise UserError(f"{where}: GGUF can only say plain layers before all others")
    if name not in OF_LATENTS:
        return {GATING: SIGMOID}
    if config.get("topk_method") == GROUPS:
        raise UserError(f"{where}: llama.cpp takes the two best experts of a group, not the best")
    if config["q_lora_rank"] is None and config["num_hidden_layers"] not in WITHOUT:
        raise UserError(
            f"{where}: llama.cpp takes queries without latents only in models of "
            f"{' or '.join(map(str, WITHOUT))} layers, such as DeepSeek-V2-Lite; export to a "
            "Hugging Face folder instead"
        )
    rotated, rank = config[ROTATED], config["kv_lora_rank"]
    meta: dict[str, Any] = {
        GATING: SOFTMAX if config["model_type"] in SOFTMAXES else SIGMOID,
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config[PLAIN] + rotated,
    }
    rope = config["rope_parameters"]
    if rope["rope_type"] == "linear":  # for which it scales attention as for YaRN
        raise UserError(
            f"{where}: llama.cpp computes no model.rope_scaling of kind linear here; export to a "
            "Hugging Face folder instead"
        )
    if rope["rope_type"] == "yarn":
        if not rope.get("mscale") or rope.get("mscale") != rope.get("mscale_all_dim"):
            raise UserError(
                f"{where}: llama.cpp computes YaRN here with model.rope_scaling.mscale and "
                "mscale_all_dim alike; export to a Hugging Face folder instead"
            )
        meta[MULTIPLIER] = 0.1 * rope["mscale_all_dim"]
    if name == GROWING:
        meta |= {SCALE: float(rope[GROWTH]), LENGTH: rope["original_max_position_embeddings"]}
    return meta


def config_of(
    meta: Mapping[str, Any], shapes: Mapping[str, Any], config: Mapping[str, Any], name: str,
    where: str,
) -> dict[str, Any]:  # fmt: skip
    """Keys of config.json that other architectures do not have. Raises UserError for what is not
    computed."""
    said = {key.removeprefix(f"{name}."): value for key, value in meta.items()}
    scaled = said.get("rope.scaling.factor", 1.0) not in (0.0, 1.0)
    if name in OF_LATENTS and scaled and said.get("rope.scaling.type", "linear") == "linear":
        raise UserError(
            f"{where}: {name}.rope.scaling.type is linear, for which llama.cpp scales attention as "
            "for YaRN; download another conversion"
        )
    original = said.get("rope.scaling.original_context_length")
    if name == GROWING and said.get(LENGTH, original) != original:
        raise UserError(
            f"{where}: {name}.{LENGTH} = {said[LENGTH]} is not the context of the training before, "
            f"{original}, as in released models; download another conversion"
        )
    sigmoid = said.get(GATING, SOFTMAX) == SIGMOID
    own: dict[str, Any] = {
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
        "num_nextn_predict_layers": 0,
        "norm_topk_prob": said.get("expert_weights_norm", False),  # as llama.cpp takes it
    }
    if name not in OF_LATENTS:
        return own
    if said.get("attention.key_length_mla") is None:
        raise UserError(
            f"{where}: is of an older form, in which keys and values are not cut apart; download "
            "another conversion"
        )
    return (
        own
        | (V2 if name == LATENTS and not sigmoid else {})
        | {
            "num_key_value_heads": config.get("num_attention_heads"),
            PLAIN: said["attention.key_length_mla"] - (config.get(ROTATED) or 0),
            "q_lora_rank": config.get("q_lora_rank"),
            "topk_method": "noaux_tc" if sigmoid else GREEDY,
            DENSE: None,
        }
    )


def is_solar(meta: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """True for a file of GLM-4.5's architecture in which all layers have experts, heads are rotated
    as a whole, and queries and keys have no norms, as in Solar Open."""
    said = {key.removeprefix(f"{GLM}."): value for key, value in meta.items()}
    whole = said.get("rope.dimension_count") == said.get("attention.key_length")
    plain_layers = said.get("leading_dense_block_count") or 0
    return whole and not plain_layers and "blk.0.attn_q_norm.weight" not in tensors


def plain(meta: Mapping[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata as other architectures have them for rotations, and YaRN's own weights."""
    if name not in OF_LATENTS:
        return dict(meta), {}
    own = (f"{name}.{MULTIPLIER}", f"{name}.rope.dimension_count")
    rest = {key: value for key, value in meta.items() if key not in own}
    added = {GROWTH: decimal(meta.get(f"{name}.{SCALE}", 0.0))} if name == GROWING else {}
    if not (tenth := meta.get(own[0])):
        return rest, added
    weight = float(np.round(np.float32(10.0) * np.float32(tenth), 6))
    return rest, added | {"mscale": weight, "mscale_all_dim": weight}


def cut(config: Mapping[str, Any]) -> Cut:
    """`kv_b_proj`, in keys and values."""
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    plain, values = config[PLAIN], config["v_head_dim"]

    def split(whole: np.ndarray) -> tuple[np.ndarray, ...]:
        keys, of_values = np.split(whole.reshape(heads, plain + values, rank), [plain], axis=1)
        return keys.swapaxes(1, 2), of_values

    def join(keys: np.ndarray, of_values: np.ndarray) -> np.ndarray:
        both = np.concatenate([keys.swapaxes(1, 2), of_values], axis=1)
        return both.reshape(heads * (plain + values), rank)

    return Cut(JOINED, PARTS, ((heads, rank, plain), (heads, values, rank)), split, join)
