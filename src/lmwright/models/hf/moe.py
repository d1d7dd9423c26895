"""Decoders with experts in Hugging Face.

On disk every expert has names of its own, `{}` in the tables; transformers stacks them when it
loads.
"""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.table import (
    ACT,
    BIAS,
    HEAD,
    KEYS,
    WEIGHTS,
    Derived,
    Json,
    Table,
    Words,
    required,
)

NEW_BIAS_RATE = 0.001
"""DeepSeek-V3's, for going on with a model whose config.json does not say it."""
ALIASES = {"num_local_experts": "num_experts"}
"""Keys by which transformers' releases write the same."""
NO_PLAIN = {ours: theirs for ours, theirs in KEYS.items() if ours != "mlp_dim"}
BLOCK = "model.layers.{i}.mlp"
EXPERTS = {
    "layers.router": f"{BLOCK}.gate.weight",
    **{
        f"layers.expert_{name}": f"{BLOCK}.experts.{{}}.{name}_proj.weight"
        for name in ("gate", "up", "down")
    },
}
COMMON = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "balance_loss": "router_aux_loss_coef",
}
"""Keys of most of them."""
SHARES = Words("shares", "norm_topk_prob", {"chosen": True, "all": False})
SOFTMAX = {"score": "softmax", "scale": 1.0, "num_groups": 1, "shared_dim": None,
           "bias_rate": None, "capacity_factor": None}  # fmt: skip


def _read_listed(config: Json, fields: Json, where: str) -> Json:
    step, plain = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = range(fields["num_layers"])
    return {"dense_layers": [i for i in layers if i in plain or (i + 1) % step]}


def _read_first(config: Json, fields: Json, where: str) -> Json:
    count = min(config.get("first_k_dense_replace", 0), fields["num_layers"])
    return {"dense_layers": list(range(count))}


def _write_first(model: Any, architecture: str) -> Json:
    if model.dense_layers != tuple(range(len(model.dense_layers))):
        raise UserError(
            f"model.dense_layers: {architecture} has dense layers only at the beginning, "
            f"not {list(model.dense_layers)}; change it to export"
        )
    return {"first_k_dense_replace": len(model.dense_layers)}


LISTED_DENSE = Derived(
    _read_listed,
    lambda model, _: {"decoder_sparse_step": 1, "mlp_only_layers": list(model.dense_layers)},
)
FIRST_DENSE = Derived(_read_first, _write_first)
USED_WINDOW = Derived(
    lambda config, *_: {
        "window": config["sliding_window"] if config.get("use_sliding_window") else None
    },
    lambda model, _: {"use_sliding_window": bool(model.window), "sliding_window": model.window},
)


class _MoeHf(Table):
    """Table whose model has a section of experts, with keys and words of its own."""

    weights = WEIGHTS | EXPERTS
    words: ClassVar[tuple[Words, ...]] = (ACT, HEAD, BIAS)
    expert_keys: ClassVar[dict[str, str]]
    """Fields of `model.experts` to keys."""
    expert_words: ClassVar[tuple[Words, ...]] = (SHARES,)
    expected: ClassVar[Json] = SOFTMAX
    """Fields of `model.experts` that the architecture cannot say otherwise."""

    def config(self, model: Any) -> Json:
        """config.json of a model, tokenizer ids left out. Raises UserError for what it cannot
        say."""
        architecture, experts = self.architecture(model), model.experts
        for name, value in self.expected.items():
            if (other := getattr(experts, name)) != value:
                raise UserError(
                    f"model.experts.{name}: {architecture} has {value!r} there, not {other!r}; "
                    f"change it to export"
                )
        config = {theirs: getattr(experts, ours) for ours, theirs in self.expert_keys.items()}
        config |= {pair.theirs: pair.write(experts, self.name) for pair in self.expert_words}
        return config | super().config(model)

    def fields(self, config: Json, where: str) -> Json:
        """Fields of the model for a config.json at `where`. Raises UserError for anything that
        this family does not compute."""
        known = {k: v for k, v in config.items() if v is not None or k == "sliding_window"}
        if config.get("num_key_value_heads", ...) is None:  # which is not to be silent
            known["num_key_value_heads"] = config.get("num_attention_heads")
        return super().fields({ALIASES.get(k, k): v for k, v in known.items()}, where)

    def own_fields(self, config: Json, fields: Json, where: str) -> Json:
        """Fields of `model.experts`."""
        words = {pair.ours: pair.read(config, where) for pair in self.expert_words}
        return {"experts": required(config, self.expert_keys, where) | words}


class MixtralHf(_MoeHf):
    """Both directions of Mixtral's Hugging Face form."""

    name = "Mixtral"
    model_types: ClassVar = {"MixtralForCausalLM": "mixtral"}
    weights = WEIGHTS | {
        "layers.router": "model.layers.{i}.block_sparse_moe.gate.weight",
        **{
            f"layers.expert_{ours}": f"model.layers.{{i}}.block_sparse_moe.experts.{{}}.{w}.weight"
            for ours, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    }
    words = (ACT, HEAD)
    keys = NO_PLAIN
    optional: ClassVar = {"window": "sliding_window"}
    expert_keys = COMMON | {"mlp_dim": "intermediate_size"}
    expert_words = ()
    expected = SOFTMAX | {"shares": "chosen"}
    defaults: ClassVar = {
        "num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001,
        "num_key_value_heads": 8,
    }  # fmt: skip

    def own_config(self, model: Any, config: Json) -> Json:
        """The second key of a number, and that there are no biases."""
        return {"num_local_experts": model.experts.num_experts, "attention_bias": False}

    def own_fields(self, config: Json, fields: Json, where: str) -> Json:
        """Experts, and the theta that is usual here."""
        theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
        own = {} if theta else {"rope_theta": 1_000_000.0}
        return own | super().own_fields(config, fields, where)


class Qwen3MoeHf(_MoeHf):
    """Both directions of Qwen 3 MoE's Hugging Face form."""

    name = "Qwen 3 MoE"
    model_types: ClassVar = {"Qwen3MoeForCausalLM": "qwen3_moe"}
    derived = (LISTED_DENSE, USED_WINDOW)
    expert_keys = COMMON | {"mlp_dim": "moe_intermediate_size"}
    defaults: ClassVar = {
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "intermediate_size": 6144, "router_aux_loss_coef": 0.001, "num_key_value_heads": 4,
        "sliding_window": 4096,
    }  # fmt: skip


class OlmoeHf(_MoeHf):
    """Both directions of OLMoE's Hugging Face form."""

    name = "OLMoE"
    model_types: ClassVar = {"OlmoeForCausalLM": "olmoe"}
    keys = NO_PLAIN
    optional: ClassVar = {"qkv_limit": "clip_qkv"}
    expert_keys = COMMON | {"mlp_dim": "intermediate_size"}
    defaults: ClassVar = {"num_experts": 64, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01}

    def own_config(self, model: Any, config: Json) -> Json:
        """Nothing. Raises UserError for heads of another width than theirs."""
        if model.num_heads * model.head_dim != model.embed_dim:
            raise UserError(
                f"model.head_dim: {self.architecture(model)} has model.embed_dim / "
                f"model.num_heads = {model.embed_dim / model.num_heads:g}, not {model.head_dim}; "
                f"change it to export"
            )
        return {}


class Dots1Hf(_MoeHf):
    """Both directions of dots.llm1's Hugging Face form."""

    name = "dots.llm1"
    model_types: ClassVar = {"Dots1ForCausalLM": "dots1"}
    derived = (FIRST_DENSE,)
    weights = (
        WEIGHTS
        | EXPERTS
        | {"layers.router_bias": f"{BLOCK}.gate.e_score_correction_bias"}
        | {
            f"layers.shared_{name}": f"{BLOCK}.shared_experts.{name}_proj.weight"
            for name in ("gate", "up", "down")
        }
    )
    expert_keys: ClassVar = {
        "num_experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "mlp_dim": "moe_intermediate_size",
        "num_groups": "n_group",
        "groups_per_token": "topk_group",
        "scale": "routed_scaling_factor",
    }
    expected: ClassVar = {"score": "sigmoid", "capacity_factor": None}
    defaults: ClassVar = {
        "moe_intermediate_size": 1408, "intermediate_size": 10_944, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "sliding_window": 4096, "num_key_value_heads": 32,
    }  # fmt: skip

    def own_config(self, model: Any, config: Json) -> Json:
        """The shared experts. Raises UserError where they are no multiple of an expert."""
        experts, architecture = model.experts, self.architecture(model)
        if experts.bias_rate is None or (experts.shared_dim or 1) % experts.mlp_dim:
            name = "bias_rate" if experts.bias_rate is None else "shared_dim"
            raise UserError(
                f"model.experts.{name}: {architecture} has a bias and shared experts of "
                f"model.experts.mlp_dim or several times that; change it to export"
            )
        return {
            "n_shared_experts": experts.shared_dim // experts.mlp_dim,
            "sliding_window": None,
            "max_window_layers": model.num_layers,
        }

    def own_fields(self, config: Json, fields: Json, where: str) -> Json:
        """Experts. Raises UserError for windows."""
        window, num_layers = config["sliding_window"], fields["num_layers"]
        first_local = num_layers if window is None else config.get("max_window_layers", 62)
        types = config.get("layer_types") or []
        if "sliding_attention" in types or (not types and num_layers > first_local):
            raise UserError(
                f"{where}: sliding_window is not computed for {config['architectures'][0]}; set it "
                f"to null if rows are not longer than it"
            )
        experts = super().own_fields(config, fields, where)["experts"]
        experts |= {"score": "sigmoid", "bias_rate": NEW_BIAS_RATE}
        experts["shared_dim"] = (config.get("n_shared_experts") or 0) * experts["mlp_dim"] or None
        return {"experts": experts}
