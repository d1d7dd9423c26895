"""Decoders with experts in Hugging Face.

On disk every expert has names of its own, `{}` in the tables; transformers stacks them when it
loads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.pairs import (
    ACT,
    BIAS,
    HEAD,
    Derived,
    Json,
    Words,
    only_written,
    refuse_number,
)
from lmwright.models.hf.rope import PARTIAL_ROPE, ROPE, usual_theta
from lmwright.models.hf.table import KEYS, WEIGHTS, Fused, Table, required

NEW_BIAS_RATE = 0.001
"""DeepSeek-V3's, for going on with a model whose config.json does not say it."""
ALIASES = {"num_local_experts": "num_experts"}
"""Keys by which transformers' releases write the same."""
SHARED = "n_shared_experts"
DENSE, TYPES = "mlp_layer_types", ("sparse", "dense")
NO_PLAIN = {ours: theirs for ours, theirs in KEYS.items() if ours != "mlp_dim"}
BLOCK, SPARSE = "model.layers.{i}.mlp", "model.layers.{i}.block_sparse_moe"
EXPERTS = {
    "layers.router": f"{BLOCK}.gate.weight",
    **{f"layers.expert_{name}": f"{BLOCK}.experts.{{}}.{name}_proj.weight"
       for name in ("gate", "up", "down")},
}  # fmt: skip
COMMON = {"num_experts": "num_experts", "experts_per_token": "num_experts_per_tok",
          "balance_loss": "router_aux_loss_coef"}  # fmt: skip
"""Keys of most of them."""
SHARES = Words("shares", "norm_topk_prob", {"chosen": True, "all": False})
SOFTMAX = {"score": "softmax", "scale": 1.0, "num_groups": 1, "shared_dim": None,
           "bias_rate": None, "capacity_factor": None}  # fmt: skip


def _read_listed(config: Json, fields: Json, where: str) -> Json:
    step, plain = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = range(fields["num_layers"])
    return {"dense_layers": [i for i in layers if i in plain or (i + 1) % step]}


def dense_said(said: Any, num_layers: int, where: str) -> list[int]:
    """Numbers of the plain layers by `mlp_layer_types`. Raises UserError where a type is unknown or
    one is missing."""
    if not isinstance(said, list) or len(said) != num_layers or not set(said) <= {*TYPES}:
        raise UserError(
            f"{where}: {DENSE} must have one of {' and '.join(TYPES)} for each of "
            f"num_hidden_layers = {num_layers}; correct it"
        )
    return [i for i, kind in enumerate(said) if kind == TYPES[1]]


def dense_config(model: Any) -> Json:
    """The key that says which layers are plain."""
    return {DENSE: [TYPES[i in model.dense_layers] for i in range(model.num_layers)]}


def first_dense(key: str) -> Derived:
    """Pair of `dense_layers` and the key that says how many of the first layers are plain."""

    def read(config: Json, fields: Json, where: str) -> Json:
        return {"dense_layers": list(range(min(config.get(key, 0), fields["num_layers"])))}

    def write(model: Any, architecture: str, _: str) -> Json:
        if model.dense_layers != tuple(range(len(model.dense_layers))):
            raise UserError(
                f"model.dense_layers: {architecture} has dense layers only at the beginning, "
                f"not {list(model.dense_layers)}; change it to export"
            )
        return {key: len(model.dense_layers)}

    return Derived(read, write)


def _read_types(config: Json, fields: Json, where: str) -> Json:
    first, num_layers = config["first_k_dense_replace"], fields["num_layers"]
    said = config.get(DENSE) or [TYPES[i < first] for i in range(num_layers)]
    return {"dense_layers": dense_said(said, num_layers, where)}


def _write_types(model: Any, *_: str) -> Json:
    dense = model.dense_layers
    first = dense == tuple(range(len(dense)))  # what tools beside transformers read
    return dense_config(model) | ({"first_k_dense_replace": len(dense)} if first else {})


FIRST_OR_LISTED = Derived(_read_types, _write_types)
LISTED_DENSE = Derived(
    _read_listed,
    lambda model, *_: {"decoder_sparse_step": 1, "mlp_only_layers": list(model.dense_layers)},
)
FIRST_DENSE = first_dense("first_k_dense_replace")
USED_WINDOW = Derived(
    lambda config, *_: {
        "window": config["sliding_window"] if config.get("use_sliding_window") else None
    },
    lambda model, *_: {"use_sliding_window": bool(model.window), "sliding_window": model.window},
)


@dataclass(frozen=True)
class Experts:
    """Pair of the section `model.experts`, which has keys and words of its own."""

    keys: Mapping[str, str]
    expected: Mapping[str, Any]
    """Fields that the architecture cannot say otherwise."""
    words: tuple[Words, ...] = (SHARES,)
    latents: bool = False
    """True if another pair says `latent_dim`."""

    def read(self, config: Json, _: Json, where: str) -> Json:
        """The section. Raises UserError for what is missing or not computed."""
        own = required(config, self.keys, where) | dict(self.expected)
        for size in ("num_experts", "experts_per_token", "mlp_dim"):
            if size in self.keys:
                refuse_number(self.keys[size], own[size], where, whole=True)
        for pair in self.words:
            own |= pair.read(config, own, where)
        return {"experts": own}

    def write(self, model: Any, architecture: str, family: str) -> Json:
        """The keys in config.json. Raises UserError for what the architecture cannot express."""
        experts, usual = model.experts, {} if self.latents else {"latent_dim": None}
        for name, value in {"weighed": "outputs", **usual, **self.expected}.items():
            if (other := getattr(experts, name)) != value:
                raise UserError(
                    f"model.experts.{name}: {architecture} has {value!r} there, not {other!r}; "
                    f"change it to export"
                )
        config = {theirs: getattr(experts, ours) for ours, theirs in self.keys.items()}
        for pair in self.words:
            config |= pair.write(experts, architecture, family)
        return config


def stacked_experts(fields: Json, stem: str) -> Fused:
    """The tensors of a layer's experts, `stem` their beginning, where files hold gate and up of
    each one behind the other."""
    wide, numbers = fields["experts"]["mlp_dim"], range(fields["experts"]["num_experts"])
    name = f"{stem}.{{}}.{{}}_proj.weight".format
    inputs = tuple((name(i, part), wide) for i in numbers for part in ("gate", "up"))
    outputs = tuple((name(i, "down"), fields["embed_dim"]) for i in numbers)
    return {f"{stem}.gate_up_proj": inputs, f"{stem}.down_proj": outputs}


class MoeHf(Table):
    """Table whose model has a section of experts."""

    weights = WEIGHTS | EXPERTS
    null: ClassVar[tuple[str, ...]] = ("sliding_window",)
    """Keys whose null is not to be silent."""
    aliases: ClassVar[Mapping[str, str]] = ALIASES

    def fields(self, config: Json, where: str) -> Json:
        """Fields of the model for a config.json at `where`. Raises UserError for anything that
        this family does not compute."""
        null = (*self.null, *self.optional.values())
        known = {k: v for k, v in config.items() if v is not None or k in null}
        if config.get("num_key_value_heads", ...) is None:
            known["num_key_value_heads"] = config.get("num_attention_heads")
        return super().fields({self.aliases.get(k, k): v for k, v in known.items()}, where)


NUMBERED_EXPERTS = {
    "layers.router": f"{SPARSE}.gate.weight",
    **{f"layers.expert_{ours}": f"{SPARSE}.experts.{{}}.{theirs}.weight"
       for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
}  # fmt: skip


class MixtralHf(MoeHf):
    """Both directions of Mixtral's Hugging Face form."""

    name = "Mixtral"
    model_types: ClassVar = {"MixtralForCausalLM": "mixtral"}
    weights = WEIGHTS | NUMBERED_EXPERTS
    keys = NO_PLAIN
    optional: ClassVar = {"window": "sliding_window"}
    pairs = (
        ACT,
        HEAD,
        ROPE,
        usual_theta(1_000_000.0),
        Experts(COMMON | {"mlp_dim": "intermediate_size"}, SOFTMAX | {"shares": "chosen"}, ()),
        Derived(write=lambda model, *_: {"num_local_experts": model.experts.num_experts}),
        only_written(attention_bias=False),
    )
    defaults: ClassVar = {
        "num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001,
        "num_key_value_heads": 8,
    }  # fmt: skip


class Qwen3MoeHf(MoeHf):
    """Both directions of Qwen 3 MoE's Hugging Face form."""

    name = "Qwen 3 MoE"
    model_types: ClassVar = {"Qwen3MoeForCausalLM": "qwen3_moe"}
    pairs = (
        *(ACT, HEAD, BIAS, ROPE, LISTED_DENSE, USED_WINDOW),
        Experts(COMMON | {"mlp_dim": "moe_intermediate_size"}, SOFTMAX),
    )
    defaults: ClassVar = {
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "intermediate_size": 6144, "router_aux_loss_coef": 0.001, "num_key_value_heads": 4,
        "sliding_window": 4096,
    }  # fmt: skip


def _read_asked_balance(config: Json, fields: Json, _: str) -> Json:
    """The weight of the loss that balances experts, which transformers does not use unless it is
    asked for the router's logits."""
    used = config.get("output_router_logits") or False
    balance = {"balance_loss": config["router_aux_loss_coef"] if used else 0.0}
    return {"experts": fields["experts"] | balance}


def _write_asked_balance(model: Any, *_: str) -> Json:
    """The keys that say it."""
    weight = model.experts.balance_loss
    return {"router_aux_loss_coef": weight, "output_router_logits": weight > 0}


ASKED_BALANCE = Derived(_read_asked_balance, _write_asked_balance)
UNBALANCED = {ours: theirs for ours, theirs in COMMON.items() if ours != "balance_loss"}


def _refuse_uneven(model: Any, architecture: str, _: str) -> Json:
    if model.num_heads * model.head_dim != model.embed_dim:
        raise UserError(
            f"model.head_dim: {architecture} has model.embed_dim / model.num_heads = "
            f"{model.embed_dim / model.num_heads:g}, not {model.head_dim}; change it to export"
        )
    return {}


class OlmoeHf(MoeHf):
    """Both directions of OLMoE's Hugging Face form."""

    name = "OLMoE"
    model_types: ClassVar = {"OlmoeForCausalLM": "olmoe"}
    keys = NO_PLAIN
    optional: ClassVar = {"qkv_limit": "clip_qkv"}
    pairs = (
        *(ACT, HEAD, BIAS, ROPE, Derived(write=_refuse_uneven)),
        Experts(COMMON | {"mlp_dim": "intermediate_size"}, SOFTMAX),
    )
    defaults: ClassVar = {"num_experts": 64, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01}


def shared_dim(config: Json, experts: Json, key: str = SHARED) -> Json:
    """The field of shared experts, which config.json counts by `key`."""
    count = config.get(key) or 0
    return {"shared_dim": count * experts["mlp_dim"] or None}


def shared_count(model: Any, architecture: str, key: str = SHARED) -> Json:
    """Their count. Raises UserError where there are none, or their width is no multiple of an
    expert's."""
    experts = model.experts
    if experts.shared_dim is None or experts.shared_dim % experts.mlp_dim:
        raise UserError(
            f"model.experts.shared_dim: {architecture} has shared experts of "
            f"model.experts.mlp_dim or several times that; change it to export"
        )
    return {key: experts.shared_dim // experts.mlp_dim}


def refuse_unbiased(model: Any, architecture: str, _: str) -> Json:
    """Raises UserError for a router without the bias that an architecture has."""
    if model.experts.bias_rate is None:
        raise UserError(f"model.experts.bias_rate: {architecture} has a bias; set it to export")
    return {}


def biased(key: str = SHARED) -> Derived:
    """Pair of the router's bias and of shared experts, which config.json counts by `key`."""

    def read(config: Json, fields: Json, where: str) -> Json:
        own = fields["experts"]
        return {"experts": own | {"bias_rate": NEW_BIAS_RATE} | shared_dim(config, own, key)}

    def write(model: Any, architecture: str, family: str) -> Json:
        return refuse_unbiased(model, architecture, family) | shared_count(model, architecture, key)

    return Derived(read, write)


def _refuse_window(config: Json, fields: Json, where: str) -> Json:
    window, num_layers = config["sliding_window"], fields["num_layers"]
    first_local = num_layers if window is None else config.get("max_window_layers", 62)
    types = config.get("layer_types") or []
    if "sliding_attention" in types or (not types and num_layers > first_local):
        raise UserError(
            f"{where}: sliding_window is not computed for {config['architectures'][0]}; set it "
            f"to null if rows are not longer than it"
        )
    return {}


DOTS_KEYS = {
    "num_experts": "n_routed_experts", "experts_per_token": "num_experts_per_tok",
    "mlp_dim": "moe_intermediate_size", "num_groups": "n_group",
    "groups_per_token": "topk_group", "scale": "routed_scaling_factor",
}  # fmt: skip
NO_WINDOW = Derived(
    _refuse_window,
    lambda model, *_: {"sliding_window": None, "max_window_layers": model.num_layers},
)


SHARED_EXPERTS = {
    f"layers.shared_{name}": f"{BLOCK}.shared_experts.{name}_proj.weight"
    for name in ("gate", "up", "down")
}
SIGMOID = {"score": "sigmoid", "capacity_factor": None, "shared_gate": "none", "best_of_group": 2}
SIGMOID_EXPERTS = (Experts(DOTS_KEYS, SIGMOID), biased())


NO_FURTHER = only_written(num_nextn_predict_layers=0)
"""Of layers that predict a further token, which are not kept."""


class SigmoidHf(MoeHf):
    """Table of the families whose experts are DeepSeek-V3's."""

    weights = WEIGHTS | EXPERTS | SHARED_EXPERTS | {
        "layers.router_bias": f"{BLOCK}.gate.e_score_correction_bias",
    }  # fmt: skip


class Dots1Hf(SigmoidHf):
    """Both directions of dots.llm1's Hugging Face form."""

    name = "dots.llm1"
    model_types: ClassVar = {"Dots1ForCausalLM": "dots1"}
    pairs = (*(ACT, HEAD, BIAS, ROPE, FIRST_DENSE, NO_WINDOW), *SIGMOID_EXPERTS)
    defaults: ClassVar = {
        "moe_intermediate_size": 1408, "intermediate_size": 10_944, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "sliding_window": 4096, "num_key_value_heads": 32,
    }  # fmt: skip


class Glm4MoeHf(SigmoidHf):
    """Both directions of GLM-4.5's Hugging Face form."""

    name = "GLM-4.5"
    model_types: ClassVar = {"Glm4MoeForCausalLM": "glm4_moe"}
    pairs = (
        *(ACT, HEAD, FIRST_DENSE, *SIGMOID_EXPERTS, NO_FURTHER),
        Words("bias", "attention_bias", {"qkv": True, "none": False}),
        Words("qk_norm", "use_qk_norm", {"head": True, "none": False}),
        PARTIAL_ROPE,
    )
    defaults: ClassVar = {
        "moe_intermediate_size": 1408, "intermediate_size": 10_944, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "num_key_value_heads": 8, "num_experts_per_tok": 8,
        "n_routed_experts": 128, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
        "norm_topk_prob": True,
    }  # fmt: skip
