"""Llama 4's text model in Hugging Face, whose files hold the experts of a layer in two tensors."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.decoder import LayerReach
from lmwright.models.hf.moe import Experts, MoeHf
from lmwright.models.hf.pairs import ACT, BIAS, HEAD, Derived, Json, Words, refuse_number
from lmwright.models.hf.rope import ROPE, usual_theta
from lmwright.models.hf.table import KEYS, WEIGHTS
from lmwright.models.hf.window import kinds_of, pattern_of

FFN = "model.layers.{i}.feed_forward"
PARTS = ("gate", "up", "down")
TYPES: dict[LayerReach, str] = {"local": "chunked_attention", "global": "full_attention"}
ROTATING, EVERY, CHUNK = "no_rope_layers", "no_rope_layer_interval", "attention_chunk_size"
SPARSE, STEP = "moe_layers", "interleave_moe_layer_step"
TUNED, GROWTH, STEPS = "attn_temperature_tuning", "attn_scale", "floor_scale"
EXPERT_KEYS = {
    "num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok",
    "mlp_dim": "intermediate_size",
}  # fmt: skip
SIGMOID_INPUTS = {
    "score": "sigmoid", "shares": "all", "scale": 1.0, "num_groups": 1, "bias_rate": None,
    "balance_loss": 0.0, "shared_gate": "none", "capacity_factor": None, "weighed": "inputs",
}  # fmt: skip


def _read_reach(config: Json, fields: Json, where: str) -> Json:
    """Which layers rotate, and look at their chunk alone."""
    num_layers, said, every = fields["num_layers"], config.get(ROTATING), config[EVERY]
    if not said:
        refuse_number(EVERY, every, where, whole=True)
        said = [int((i + 1) % every != 0) for i in range(num_layers)]
    if not isinstance(said, list) or len(said) < num_layers or set(said) - {0, 1}:
        raise UserError(f"{where}: {ROTATING} is not a 0 or 1 for each of {num_layers} layers")
    reach: list[LayerReach] = ["local" if each else "global" for each in said[:num_layers]]
    types = config.get("layer_types")
    if types is not None and kinds_of(types, TYPES, num_layers, where) != reach:
        raise UserError(
            f"{where}: layer_types has chunks in other layers than those that {ROTATING} lets "
            "rotate, which is not computed; correct one of them"
        )
    if config[CHUNK] is None and "local" in reach:
        raise UserError(f"{where}: {CHUNK} is null, but layers attend in chunks; set it")
    chunk = config[CHUNK] if config[CHUNK] is not None else 8192
    refuse_number(CHUNK, chunk, where, whole=True)
    return {"chunk_tokens": chunk, "layer_pattern": pattern_of(reach)}


def _write_reach(model: Any, *_: str) -> Json:
    reach = model.reaches
    rotating = [int(each == "local") for each in reach]
    types = [TYPES[each] for each in reach]
    return {ROTATING: rotating, "layer_types": types, CHUNK: model.chunk_tokens}


def _read_growth(config: Json, fields: Json, where: str) -> Json:
    if not config[TUNED] or not config[GROWTH]:
        return {"query_growth": 0.0}
    refuse_number(GROWTH, config[GROWTH], where)
    refuse_number(STEPS, config[STEPS], where, whole=True)
    return {"query_growth": float(config[GROWTH]), "growth_tokens": int(config[STEPS])}


def _write_growth(model: Any, *_: str) -> Json:
    grows = model.query_growth > 0
    return {TUNED: grows, GROWTH: model.query_growth, STEPS: model.growth_tokens}


def with_experts(step: int, num_layers: int) -> list[int]:
    """Numbers of the layers with experts, the last of each `step`."""
    return list(range(step - 1, num_layers, step))


def _read_layers(config: Json, fields: Json, where: str) -> Json:
    num_layers, said = fields["num_layers"], config.get(SPARSE)
    if said is None:
        refuse_number(STEP, config[STEP], where, whole=True)
        said = with_experts(config[STEP], num_layers)
    return {"dense_layers": [i for i in range(num_layers) if i not in said]}


def _write_layers(model: Any, *_: str) -> Json:
    layers = range(model.num_layers)
    sparse = [i for i in layers if i not in model.dense_layers]
    steps = [i + 1 for i in layers if with_experts(i + 1, model.num_layers) == sparse]
    return {SPARSE: sparse} | ({STEP: steps[0]} if steps else {})


def _read_shared(config: Json, fields: Json, where: str) -> Json:
    own = fields["experts"]
    return {"experts": own | {"shared_dim": own["mlp_dim"]}}


def _write_shared(model: Any, architecture: str, _: str) -> Json:
    if model.experts.shared_dim != model.experts.mlp_dim:
        raise UserError(
            f"model.experts.shared_dim: {architecture} has a shared expert as wide as the others, "
            f"{model.experts.mlp_dim}; change it to export"
        )
    return {}


class Llama4Hf(MoeHf):
    """Both directions of the family's Hugging Face form."""

    name = "Llama 4"
    model_types: ClassVar = {"Llama4ForCausalLM": "llama4_text"}
    weights = WEIGHTS | {
        **{f"layers.{name}": f"{FFN}.{name}_proj.weight" for name in PARTS},
        "layers.router": f"{FFN}.router.weight",
        **{f"layers.expert_{name}": f"{FFN}.experts.{{}}.{name}_proj.weight" for name in PARTS},
        **{f"layers.shared_{name}": f"{FFN}.shared_expert.{name}_proj.weight" for name in PARTS},
    }
    stacked_experts = "columns"
    # its router gives more than one array, and PEFT takes inputs of experts for outputs
    peft_refuses = ("router", *(f"expert_{name}" for name in PARTS))
    aliases: ClassVar[dict[str, str]] = {}
    null = (*MoeHf.null, CHUNK)
    keys = KEYS | {"mlp_dim": "intermediate_size_mlp"}
    pairs = (
        *(ACT, HEAD, BIAS, ROPE, usual_theta(500_000.0)),
        *(Derived(_read_reach, _write_reach), Derived(_read_growth, _write_growth)),
        Derived(_read_layers, _write_layers),
        Experts(EXPERT_KEYS, SIGMOID_INPUTS, ()),
        Derived(_read_shared, _write_shared),
        Words("rotated_norm", "use_qk_norm", {"head": True, "none": False}),
    )
    defaults: ClassVar = {
        "intermediate_size": 8192, "intermediate_size_mlp": 16_384, "num_local_experts": 16,
        "num_experts_per_tok": 1, "num_attention_heads": 40, "num_key_value_heads": 8,
        "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, STEP: 1,
        EVERY: 4, CHUNK: 8192, TUNED: True, GROWTH: 0.1, STEPS: 8192, "use_qk_norm": True,
    }  # fmt: skip
