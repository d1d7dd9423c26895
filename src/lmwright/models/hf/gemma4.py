"""Gemma 4 in Hugging Face: the text model.

Sizes of single layers are said in one of two ways:

    "global_head_dim": 512, "num_global_key_value_heads": 4     released models
    "per_layer_config": {"05": {"head_dim": 512, ...}, ...}     what transformers writes
"""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.experts import EXPERT_SCALE
from lmwright.models.hf.gemma import ACT, HEAD, NORMS, NOT_SUPPORTED
from lmwright.models.hf.moe import SOFTMAX, Experts, stacked_experts
from lmwright.models.hf.pairs import Derived, Fixed, Json, Pair, Words
from lmwright.models.hf.rope import SIDES, sides_config, sides_fields
from lmwright.models.hf.table import WEIGHTS, Fused, Table
from lmwright.models.hf.window import TYPES, pattern_of, reach_said, window_said
from lmwright.models.text_part import SHARED_LAYERS

LAYER = "model.layers.{i}"
WINDOW = 512  # where config.json says none
GLOBAL_SIZES = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}
"""Keys of released models by their names in `per_layer_config`."""
ROPE: Json = {
    SIDES[0]: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SIDES[1]: {"rope_type": "default", "rope_theta": 1e4},
}
"""transformers' rotations where config.json says none."""


def _read_reach(config: Json, fields: Json, where: str) -> Json:
    reach = reach_said(config, 6, fields["num_layers"], where)
    if reach[-1] != "global":  # transformers makes it one
        raise UserError(
            f"{where}: the last layer is {TYPES['local']}, which transformers computes as "
            f"{TYPES['global']}; correct layer_types"
        )
    window = window_said(config, WINDOW, reach, where)
    return {"window": window, "layer_pattern": pattern_of(reach)}


def _write_reach(model: Any, *_: str) -> Json:
    if model.reaches[-1] != "global":
        raise UserError(
            "model.layer_pattern: the last layer of transformers' Gemma 4 is a global one; change "
            "it to export"
        )
    return {"sliding_window": model.window, "layer_types": [TYPES[each] for each in model.reaches]}


def _read_sizes(config: Json, fields: Json, where: str) -> Json:
    reach = reach_said(config, 6, fields["num_layers"], where)
    said = {key: config.get(key) for key in GLOBAL_SIZES}
    if (layers := config.get("per_layer_config")) is not None:
        numbers = [i for i, each in enumerate(reach) if each == "global"]
        if strange := [key for key in layers if not key.isdecimal()]:
            raise UserError(f"{where}: per_layer_config has {strange[0]!r}, not a layer's number")
        layers = {int(key): each for key, each in layers.items()}  # "05" where there are ten
        own = [layers.get(i, {}) for i in numbers]
        first: Json = own[0] if own else {}
        if set(layers) - set(numbers) or any(each != first for each in own):
            raise UserError(
                f"{where}: per_layer_config is not supported for other than global layers, or "
                "where these differ"
            )
        if unknown := sorted(set(first) - set(GLOBAL_SIZES.values())):
            raise UserError(f"{where}: per_layer_config has {', '.join(unknown)}: not supported")
        said = {key: first.get(name) for key, name in GLOBAL_SIZES.items()}
        said["global_head_dim"] = said["global_head_dim"] or config["head_dim"]
    keys = config.get("attention_k_eq_v") or layers is not None
    heads = said["num_global_key_value_heads"] if keys else None
    return {
        "global_head_dim": said["global_head_dim"] or 512,
        "global_kv_heads": None if heads == fields["num_kv_heads"] else heads,
    }


def _write_sizes(model: Any, architecture: str, _: str) -> Json:
    heads = model.global_kv_heads
    if heads not in (None, model.num_kv_heads) and model.global_values == "own":
        raise UserError(
            f'model.global_kv_heads: {architecture} has them only with global_values = "keys"; '
            "unset it to export"
        )
    return {"global_head_dim": model.global_head_dim, "num_global_key_value_heads": heads}


def _read_shared(config: Json, fields: Json, _: str) -> Json:
    count = config.get(SHARED_LAYERS) or 0
    wide = 2 * fields["mlp_dim"] if config.get("use_double_wide_mlp") and count else None
    return {"num_shared_layers": count, "shared_mlp_dim": wide}


def _write_shared(model: Any, architecture: str, _: str) -> Json:
    wide = model.shared_mlp_dim not in (None, model.mlp_dim)
    if wide and model.shared_mlp_dim != 2 * model.mlp_dim:
        raise UserError(
            f"model.shared_mlp_dim: {architecture} has model.mlp_dim or twice that, not "
            f"{model.shared_mlp_dim}; change it to export"
        )
    return {SHARED_LAYERS: model.num_shared_layers, "use_double_wide_mlp": wide}


def _read_inputs(config: Json, _: Json, where: str) -> Json:
    usual = 256 if config.get("model_type") == "gemma4_text" else 0  # the 12B has none
    width = config.get("hidden_size_per_layer_input", usual) or None
    rows = config.get("vocab_size_per_layer_input", config["vocab_size"])
    if width and rows != config["vocab_size"]:
        raise UserError(
            f"{where}: vocab_size_per_layer_input = {rows} differs from vocab_size = "
            f"{config['vocab_size']}, which is not supported"
        )
    return {"layer_input_dim": width}


def _write_inputs(model: Any, *_: str) -> Json:
    return {
        "hidden_size_per_layer_input": model.layer_input_dim or 0,
        "vocab_size_per_layer_input": model.vocab_size,
    }


def _read_rope(config: Json, _: Json, where: str) -> Json:
    said = config.get("rope_parameters") or {}
    if not isinstance(said, dict) or not all(isinstance(v, dict) for v in said.values()):
        raise UserError(f"{where}: rope_parameters has not one object a type of layer")
    whole, local = (dict(said.get(side) or ROPE[side]) for side in SIDES)
    return sides_fields(config, whole, local, where)


COMMON: tuple[Pair, ...] = (
    ACT,
    HEAD,
    Derived(_read_rope, lambda model, *_: sides_config(model, (), before=False)),
    Derived(_read_reach, _write_reach),
    Derived(_read_sizes, _write_sizes),
    Words("global_values", "attention_k_eq_v", {"own": False, "keys": True}),
    Derived(_read_shared, _write_shared),
    Derived(_read_inputs, _write_inputs),
    Fixed("attention_bias", False, NOT_SUPPORTED, same=(None,)),
    # "vision" changes how tokens of images see each other alone
    Fixed("use_bidirectional_attention", None, NOT_SUPPORTED, same=(False, "vision")),
)


class Gemma4Hf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Gemma 4"
    model_types: ClassVar = {"Gemma4ForCausalLM": "gemma4_text"}
    weights = WEIGHTS | {
        **{f"layers.{ours}": f"{LAYER}.{theirs}.weight" for ours, theirs in NORMS.items()},
        "token_inputs": "model.embed_tokens_per_layer.weight",
        "input_proj": "model.per_layer_model_projection.weight",
        "input_norm": "model.per_layer_projection_norm.weight",
        "layers.input_gate": f"{LAYER}.per_layer_input_gate.weight",
        "layers.input_out": f"{LAYER}.per_layer_projection.weight",
        "layers.input_out_norm": f"{LAYER}.post_per_layer_input_norm.weight",
        "layers.layer_scale": f"{LAYER}.layer_scalar",
    }
    optional: ClassVar = {"logits_soft_cap": "final_logit_softcapping"}
    pairs: ClassVar[tuple[Pair, ...]] = (
        *COMMON,
        Fixed("enable_moe_block", False, "{key} = {said} needs num_experts; add it", same=(None,)),
    )
    defaults: ClassVar = {
        "head_dim": 256, "rms_norm_eps": 1e-6, "num_key_value_heads": 4, "sliding_window": WINDOW,
        "max_position_embeddings": 131_072,
    }  # fmt: skip


class Gemma4MoeHf(Gemma4Hf):
    """Both directions of the Hugging Face form with experts."""

    name = "Gemma 4 with experts"
    mark = "num_experts"
    weights = Gemma4Hf.weights | {
        "layers.mlp_branch_norm": f"{LAYER}.post_feedforward_layernorm_1.weight",
        "layers.experts_norm": f"{LAYER}.pre_feedforward_layernorm_2.weight",
        "layers.experts_out_norm": f"{LAYER}.post_feedforward_layernorm_2.weight",
        "layers.router": f"{LAYER}.router.proj.weight",
        "layers.router_scale": f"{LAYER}.router.scale",
        f"layers.{EXPERT_SCALE}": f"{LAYER}.router.per_expert_scale",
        **{f"layers.expert_{name}": f"{LAYER}.experts.{{}}.{name}_proj.weight"
           for name in ("gate", "up", "down")},
    }  # fmt: skip
    stacked_experts = "halves"
    pairs = (
        *COMMON,
        Experts(
            {
                "num_experts": "num_experts",
                "experts_per_token": "top_k_experts",
                "mlp_dim": "moe_intermediate_size",
            },
            SOFTMAX | {"shares": "chosen"},
            (),
        ),
        Fixed("enable_moe_block", True),
    )

    def fused(self, config: Json, where: str) -> Fused:
        """The stacked experts of a layer."""
        return stacked_experts(self.fields(config, where), ".experts")
