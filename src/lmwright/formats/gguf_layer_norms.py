"""StableLM and the first OLMo in GGUF; of the former, tensors say what config.json does.

attn_q_norm [heads, head_dim]    StableLM's norms.0.weight, norms.1.weight, ... of one layer
ffn_norm                         of StableLM, where the mlp follows attention
attention.clamp_kqv              OLMo's clip_qkv; 0 for none
"""

from collections.abc import Mapping
from typing import Any

from lmwright.errors import UserError

STABLE, OLMO = "stablelm", "olmo"
NAMES = (STABLE, OLMO)
EPS = "attention.layer_norm_epsilon"
LIMIT = "attention.clamp_kqv"
OLMO_EPS = 1e-5  # which no config.json of it says


def metadata(name: str) -> dict[str, Any]:
    """Keys below the architecture's name."""
    return {EPS: OLMO_EPS} if name == OLMO else {}


def config_of(
    meta: Mapping[str, Any], shapes: Mapping[str, Any], config: Mapping[str, Any], name: str,
    where: str,
) -> dict[str, Any]:  # fmt: skip
    """Keys of config.json that the metadata do not have, or say otherwise. Raises UserError for an
    OLMo with another epsilon."""
    if name == STABLE:
        return {
            "use_qkv_bias": "blk.0.attn_q.bias" in shapes,
            "qk_layernorm": "blk.0.attn_q_norm.weight" in shapes,
            "use_parallel_residual": "blk.0.ffn_norm.weight" not in shapes,
        }
    eps = float(meta.get(f"{name}.{EPS}", OLMO_EPS))
    if abs(eps / OLMO_EPS - 1) > 1e-6:
        raise UserError(
            f"{where}: {name}.{EPS} = {eps:g} is not supported; it is {OLMO_EPS:g} in released "
            "models"
        )
    return {"clip_qkv": config.get("clip_qkv") or None}
