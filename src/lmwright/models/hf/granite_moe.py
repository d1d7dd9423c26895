"""Granite 3 with experts in Hugging Face: without an mlp beside them, with one, and with windows.

Files hold gate and up of all experts of a layer as one tensor, and those of the mlp, too.
"""

from typing import Any, ClassVar

from lmwright.models.hf.granite import MULTIPLIERS, SCALES, USUAL
from lmwright.models.hf.granite_swa import SINKS, THETAS, WINDOWS
from lmwright.models.hf.moe import (
    COMMON,
    NO_PLAIN,
    SOFTMAX,
    SPARSE,
    Experts,
    MoeHf,
    stacked_experts,
)
from lmwright.models.hf.pairs import ACT, BIAS, HEAD, NO_IDS, Derived, Json, refuse_number
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import WEIGHTS, Fused
from lmwright.models.hf.window import reach_config

PLAIN, SHARED = "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"
WIDTH = "shared_intermediate_size"
SHARED_MLP = {
    f"layers.{ours}": f"model.layers.{{i}}.shared_mlp.{theirs}_linear.weight"
    for ours, theirs in (("gate_up", "input"), ("down", "output"))
}
STEM = "block_sparse_moe.experts"
EXPERTS = (
    Experts(COMMON | {"mlp_dim": "intermediate_size"}, SOFTMAX | {"shares": "chosen"}, ()),
    Derived(write=lambda model, *_: {"num_local_experts": model.experts.num_experts}),
)
USUAL_EXPERTS: Json = {
    "num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001,
    "intermediate_size": 11_008,
}  # fmt: skip


def _expert_weights(router: str) -> dict[str, str]:
    """Names of the weights of experts, and of a router with this name."""
    names = {f"layers.expert_{name}": f"{SPARSE}.experts.{{}}.{name}_proj.weight"
             for name in ("gate", "up", "down")}  # fmt: skip
    return names | {"layers.router": f"{SPARSE}.{router}.weight"}


class Stacked(MoeHf):
    """Table of a family whose files hold the experts of a layer in two tensors."""

    stacked_experts = "halves"
    null = (*MoeHf.null, *MULTIPLIERS)

    def fused(self, config: Json, where: str) -> Fused:
        """The experts of a layer, by the names of files and by those of transformers' class."""
        parts = stacked_experts(self.fields(config, where), STEM)
        return {**parts, **{there: parts[name] for name, there in self.stacked_names.items()}}


class NamedAsReleased(Stacked):
    """Table of one whose files have other names than transformers' class."""

    modules: ClassVar = {f"{SPARSE}.router.layer": f"{SPARSE}.router"}
    stacked_names: ClassVar = {
        f"{STEM}.gate_up_proj": "block_sparse_moe.input_linear.weight",
        f"{STEM}.down_proj": "block_sparse_moe.output_linear.weight",
    }
    weights = WEIGHTS | _expert_weights("router.layer")


def _read_beside(config: Json, _: Json, where: str) -> Json:
    """The mlp beside the experts, of which the plain architecture has none."""
    wide = 0 if config["architectures"][0] == PLAIN else config.get(WIDTH, 0)
    if wide != 0:
        refuse_number(WIDTH, wide, where, whole=True)
    return {"mlp_dim": wide or None}


def _write_beside(model: Any, architecture: str, _: str) -> Json:
    return {} if architecture == PLAIN else {WIDTH: model.mlp_dim or 0}


PAIRS = (
    *(ACT, HEAD, BIAS, ROPE, NO_IDS, SCALES, *EXPERTS),
    Derived(_read_beside, _write_beside),
)


class GraniteMoeHf(NamedAsReleased):
    """Both directions of the Hugging Face form without windows."""

    name = "Granite 3 with experts"
    model_types: ClassVar = {PLAIN: "granitemoe", SHARED: "granitemoeshared"}
    weights = NamedAsReleased.weights | SHARED_MLP
    keys = NO_PLAIN
    pairs = PAIRS
    defaults: ClassVar = USUAL | USUAL_EXPERTS

    def architecture(self, model: Any) -> str:
        """That with an mlp beside the experts where the model has one."""
        return SHARED if model.mlp_dim else PLAIN


class GraniteMoeSwaHf(Stacked):
    """Both directions of the Hugging Face form with windows."""

    name = "Granite with windows and experts"
    model_types: ClassVar = {"GraniteMoeSWAForCausalLM": "granitemoe_swa"}
    weights = WEIGHTS | SHARED_MLP | SINKS | _expert_weights("router")
    keys = NO_PLAIN
    pairs = (
        *PAIRS,
        Derived(WINDOWS.read, lambda model, *_: reach_config(model)),
        THETAS,
    )
    defaults: ClassVar = USUAL | USUAL_EXPERTS
