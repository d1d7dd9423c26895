"""Hunyuan's models with experts in Hugging Face."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.hunyuan import ALPHA_ROPE, BEHIND
from lmwright.models.hf.moe import BLOCK, EXPERTS, NO_PLAIN, SOFTMAX, Experts, MoeHf
from lmwright.models.hf.pairs import ACT, BIAS, HEAD, NO_IDS, Derived, Json
from lmwright.models.hf.table import WEIGHTS

CHOSEN = "moe_topk"
KEYS = {"num_experts": "num_experts", "experts_per_token": CHOSEN, "mlp_dim": "intermediate_size"}
SHARED = {f"layers.shared_{name}": f"{BLOCK}.shared_mlp.{name}_proj.weight"
          for name in ("gate", "up", "down")}  # fmt: skip


def _read_shared(config: Json, fields: Json, where: str) -> Json:
    """The mlp beside the experts, as wide as one of them."""
    return {"experts": fields["experts"] | {"shared_dim": fields["experts"]["mlp_dim"]}}


def _write_shared(model: Any, architecture: str, _: str) -> Json:
    experts = model.experts
    if experts.shared_dim != experts.mlp_dim:
        raise UserError(
            f"model.experts.shared_dim: {architecture} has one shared expert, as wide as "
            f"model.experts.mlp_dim = {experts.mlp_dim}, not {experts.shared_dim}; change it to "
            "export"
        )
    return {}


class HunyuanMoeHf(MoeHf):
    """Both directions of the family's Hugging Face form."""

    name = "Hunyuan with experts"
    model_types: ClassVar = {"HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe"}
    weights = WEIGHTS | BEHIND | EXPERTS | SHARED | {"layers.router": f"{BLOCK}.gate.wg.weight"}
    keys = NO_PLAIN
    aliases: ClassVar = {**MoeHf.aliases, "num_experts_per_tok": CHOSEN}
    pairs = (
        *(ACT, HEAD, BIAS, ALPHA_ROPE, NO_IDS),
        Experts(
            KEYS, {n: v for n, v in SOFTMAX.items() if n != "shared_dim"} | {"shares": "chosen"}, ()
        ),
        Derived(_read_shared, _write_shared),
    )
    defaults: ClassVar = {
        "num_experts": 1, CHOSEN: 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "vocab_size": 290_943, "hidden_size": 4096, "intermediate_size": 11_008,
        "num_hidden_layers": 32, "num_attention_heads": 32,
    }  # fmt: skip

    def fields(self, config: Json, where: str) -> Json:
        """Fields of the model for a config.json at `where`, which may say the choices of each
        layer. Raises UserError for anything that this family does not compute."""
        chosen = config.get(CHOSEN)
        if isinstance(chosen, list):
            if len(set(map(str, chosen))) != 1:
                raise UserError(
                    f"{where}: {CHOSEN} differs from layer to layer, which is not supported"
                )
            config = config | {CHOSEN: chosen[0]}
        return super().fields(config, where)
