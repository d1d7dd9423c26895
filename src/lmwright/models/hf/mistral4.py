"""Mistral 4 in Hugging Face, whose files hold the experts of a layer in two tensors."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.deepseek import HEAD_WIDTH, PAIRS, PLAIN, ROTATED, LatentHf
from lmwright.models.hf.ministral3 import read_growing, write_growing
from lmwright.models.hf.moe import (
    DOTS_KEYS,
    FIRST_DENSE,
    Experts,
    shared_count,
    shared_dim,
    stacked_experts,
)
from lmwright.models.hf.pairs import ACT, HEAD, NO_IDS, Derived, Fixed, Json
from lmwright.models.hf.table import Fused

PART = "partial_rotary_factor"
SOFTMAX_GROUPED = {
    "score": "softmax", "bias_rate": None, "shared_gate": "none", "capacity_factor": None,
    "best_of_group": 2,
}  # fmt: skip


def _read_rope(config: Json, fields: Json, where: str) -> Json:
    """Rotations, which say which part of each head they turn; it is that of the widths."""
    rope: Any = config.get("rope_scaling") or config.get("rope_parameters")
    part = rope.get(PART) if isinstance(rope, dict) else None
    rotated, width = fields["qk_rope_head_dim"], fields["head_dim"]
    if part is not None and not (isinstance(part, int | float) and int(width * part) == rotated):
        raise UserError(
            f"{where}: rope_parameters.{PART} = {part!r} is not {ROTATED} = {rotated} of {width}; "
            "correct it, or remove it"
        )
    if part is not None:
        rest = {name: value for name, value in rope.items() if name != PART}
        config = config | {"rope_parameters": rest, "rope_scaling": None}
    return read_growing(config, "Mistral 4", where)


class Mistral4Hf(LatentHf):
    """Both directions of the family's Hugging Face form."""

    name = "Mistral 4"
    model_types: ClassVar = {"Mistral4ForCausalLM": "mistral4"}
    null = (*LatentHf.null, "norm_topk_prob")  # transformers takes it for false
    aliases: ClassVar = {"num_local_experts": "n_routed_experts"}
    stacked_experts = "halves"
    pairs = (
        *(ACT, HEAD, HEAD_WIDTH, FIRST_DENSE, PAIRS, Derived(_read_rope, write_growing)),
        Experts(DOTS_KEYS, SOFTMAX_GROUPED),
        Derived(
            lambda config, fields, _: {
                "experts": fields["experts"] | shared_dim(config, fields["experts"])
            },
            lambda model, architecture, _: shared_count(model, architecture),
        ),
        Fixed("attention_bias", False, same=(None,)),
        NO_IDS,
    )
    defaults: ClassVar = {
        ROTATED: 64, PLAIN: 64, "v_head_dim": 128, "kv_lora_rank": 256, "q_lora_rank": 1024,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "n_routed_experts": 128,
        "n_shared_experts": 1, "moe_intermediate_size": 2048, "intermediate_size": 12_288,
        "num_experts_per_tok": 4, "num_key_value_heads": 32, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1_048_576, "norm_topk_prob": True,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, "beta_fast": 32.0,
            "original_max_position_embeddings": 8192, "beta_slow": 1.0, "mscale_all_dim": 1.0,
            "mscale": 1.0, "llama_4_scaling_beta": 0.1,
        },
    }  # fmt: skip

    def fused(self, config: Json, where: str) -> Fused:
        """The stacked experts of a layer."""
        return stacked_experts(self.fields(config, where), ".experts")
