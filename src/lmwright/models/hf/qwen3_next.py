"""Qwen3-Next in Hugging Face."""

from typing import ClassVar

from lmwright.models.hf.moe import SHARES
from lmwright.models.hf.pairs import Fixed, Json
from lmwright.models.hf.qwen3_5 import INPUTS, LINEAR, HybridHf, Qwen35MoeHf, experts_beside
from lmwright.models.hf.table import Fused


class Qwen3NextHf(Qwen35MoeHf):
    """Both directions of the family's Hugging Face form."""

    name = "Qwen3-Next"
    model_types: ClassVar = {"Qwen3NextForCausalLM": "qwen3_next"}
    weights = {n: theirs for n, theirs in Qwen35MoeHf.weights.items() if n not in INPUTS} | {
        "layers.qkvz": f"{LINEAR}in_proj_qkvz.weight",
        "layers.ba": f"{LINEAR}in_proj_ba.weight",
    }
    pairs = (
        *HybridHf.pairs,
        experts_beside(SHARES),
        Fixed("decoder_sparse_step", 1, same=(None,)),
        Fixed("mlp_only_layers", [], same=(None,)),
    )
    defaults = Qwen35MoeHf.defaults | {
        "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True,
    }  # fmt: skip

    def fused(self, config: Json, where: str) -> Fused:
        """None: every expert has names of its own."""
        return {}
