"""Decoders with experts in Hugging Face: config.json and weight names.

On disk every expert has names of its own, `{}` in the tables; transformers stacks them when it
loads. A field that an architecture cannot express is refused, never dropped.
"""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf import llama as llama_hf
from lmwright.models.hf.llama import GATED_ACT, activation, head_dim, required
from lmwright.models.hf.rope import rope_config, rope_fields

NEW_BIAS_RATE = 0.001
"""DeepSeek-V3's, for going on with a model whose config.json does not say it."""
ALIASES = {"num_local_experts": "num_experts"}
"""Keys by which transformers' releases write the same."""
COMMON = {ours: theirs for ours, theirs in llama_hf.FIELDS.items() if ours != "mlp_dim"}
BLOCK = "model.layers.{i}.mlp"
EXPERTS = {
    "layers.router": f"{BLOCK}.gate.weight",
    **{
        f"layers.expert_{name}": f"{BLOCK}.experts.{{}}.{name}_proj.weight"
        for name in ("gate", "up", "down")
    },
}


class _MoeHf:
    """What the families' tables have in common."""

    architecture: str
    model_type: str
    weights = llama_hf.WEIGHTS | EXPERTS
    keys: ClassVar[dict[str, str]]
    """Fields of `model.experts` to keys."""
    own_keys: ClassVar[dict[str, str]] = {}
    """The model's other fields to keys."""
    defaults: ClassVar[dict[str, Any]]
    """What transformers fills in where config.json is silent."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return (self.architecture,)

    def config(self, model: Any) -> dict[str, Any]:
        """config.json of a model, tokenizer ids left out."""
        config = {theirs: getattr(model, ours) for ours, theirs in COMMON.items()}
        config |= {theirs: getattr(model.experts, ours) for ours, theirs in self.keys.items()}
        config |= rope_config(model.rope_theta, model.rope_scaling, model.seq_len)
        return config | {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_act": GATED_ACT[model.mlp],
            "tie_word_embeddings": model.head == "tied",
            "attention_bias": getattr(model, "bias", "none") == "attention",
            "initializer_range": model.embed_std,
            **self.own_config(model),
        }

    def fields(self, config: dict[str, Any], where: str) -> dict[str, Any]:
        """Fields of the model for a config.json at `where`. Raises UserError for anything that
        this family does not compute."""
        said = {ALIASES.get(k, k): v for k, v in config.items() if v is not None}
        said = self.defaults | head_dim(config) | said
        if config.get("num_key_value_heads", ...) is None or "num_key_value_heads" not in said:
            said["num_key_value_heads"] = config.get("num_attention_heads")
        said["sliding_window"] = config.get("sliding_window", self.defaults.get("sliding_window"))
        values = required(said, {}, COMMON | self.own_keys, where)
        experts = required(said, {}, self.keys, where)
        fields = {
            **values,
            **rope_fields(config, where),
            "mlp": activation(said.get("hidden_act"), GATED_ACT, where),
            "head": "tied" if said.get("tie_word_embeddings", False) else "untied",
        }
        if "attention_bias" in self.defaults:
            fields["bias"] = "attention" if said["attention_bias"] else "none"
        return fields | self.own_fields(said, experts, values["num_layers"], where)

    def own_config(self, model: Any) -> dict[str, Any]:
        """The architecture's other keys. Raises UserError for what it cannot say."""
        raise NotImplementedError

    def own_fields(
        self, said: dict[str, Any], experts: dict[str, Any], num_layers: int, where: str
    ) -> dict[str, Any]:
        """The family's other fields, `experts` among them."""
        raise NotImplementedError


def _insist(model: Any, architecture: str, **wanted: Any) -> None:
    for name, value in wanted.items():
        found = getattr(model.experts, name)
        if found != value:
            raise UserError(
                f"model.experts.{name}: {architecture} has {value!r} there, not {found!r}; "
                f"change it to export"
            )


SOFTMAX = {"score": "softmax", "scale": 1.0, "num_groups": 1, "shared_dim": None,
           "bias_rate": None, "capacity_factor": None}  # fmt: skip


class MixtralHf(_MoeHf):
    """Both directions of Mixtral's Hugging Face form."""

    architecture, model_type = "MixtralForCausalLM", "mixtral"
    weights = llama_hf.WEIGHTS | {
        "layers.router": "model.layers.{i}.block_sparse_moe.gate.weight",
        **{
            f"layers.expert_{ours}": f"model.layers.{{i}}.block_sparse_moe.experts.{{}}.{w}.weight"
            for ours, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    }
    keys: ClassVar = {
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "mlp_dim": "intermediate_size",
        "balance_loss": "router_aux_loss_coef",
    }
    defaults: ClassVar = {
        "num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001,
        "num_key_value_heads": 8,
    }  # fmt: skip

    def own_config(self, model: Any) -> dict[str, Any]:
        """The window."""
        _insist(model, self.architecture, shares="chosen", **SOFTMAX)
        return {"sliding_window": model.window, "num_local_experts": model.experts.num_experts}

    def own_fields(
        self, said: dict[str, Any], experts: dict[str, Any], num_layers: int, where: str
    ) -> dict[str, Any]:
        """The window and the experts."""
        theta = said.get("rope_theta") or (said.get("rope_parameters") or {}).get("rope_theta")
        fields = {} if theta else {"rope_theta": 1_000_000.0}
        return fields | {"window": said["sliding_window"], "experts": experts}


class Qwen3MoeHf(_MoeHf):
    """Both directions of Qwen 3 MoE's Hugging Face form."""

    architecture, model_type = "Qwen3MoeForCausalLM", "qwen3_moe"
    keys: ClassVar = {
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "mlp_dim": "moe_intermediate_size",
        "balance_loss": "router_aux_loss_coef",
    }
    own_keys: ClassVar = {"mlp_dim": "intermediate_size"}
    defaults: ClassVar = {
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "intermediate_size": 6144, "router_aux_loss_coef": 0.001, "attention_bias": False,
        "num_key_value_heads": 4, "sliding_window": 4096,
    }  # fmt: skip

    def own_config(self, model: Any) -> dict[str, Any]:
        """The plain layers, the shares and the window."""
        _insist(model, self.architecture, **SOFTMAX)
        return {
            "intermediate_size": model.mlp_dim,
            "norm_topk_prob": model.experts.shares == "chosen",
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(model.dense_layers),
            "use_sliding_window": model.window is not None,
            "sliding_window": model.window,
        }

    def own_fields(
        self, said: dict[str, Any], experts: dict[str, Any], num_layers: int, where: str
    ) -> dict[str, Any]:
        """The plain layers, the shares and the window."""
        step, plain = said.get("decoder_sparse_step", 1), said.get("mlp_only_layers") or []
        dense = [i for i in range(num_layers) if i in plain or (i + 1) % step]
        window = said["sliding_window"] if said.get("use_sliding_window") else None
        shares = "chosen" if said.get("norm_topk_prob", False) else "all"
        return {
            "dense_layers": dense,
            "window": window,
            "experts": experts | {"shares": shares},
        }


class OlmoeHf(_MoeHf):
    """Both directions of OLMoE's Hugging Face form."""

    architecture, model_type = "OlmoeForCausalLM", "olmoe"
    keys: ClassVar = {
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "mlp_dim": "intermediate_size",
        "balance_loss": "router_aux_loss_coef",
    }
    defaults: ClassVar = {
        "num_experts": 64, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01,
        "attention_bias": False,
    }  # fmt: skip

    def own_config(self, model: Any) -> dict[str, Any]:
        """The shares and the limit. Raises UserError for heads of another width than theirs."""
        _insist(model, self.architecture, **SOFTMAX)
        if model.num_heads * model.head_dim != model.embed_dim:
            raise UserError(
                f"model.head_dim: {self.architecture} has model.embed_dim / model.num_heads = "
                f"{model.embed_dim / model.num_heads:g}, not {model.head_dim}; change it to export"
            )
        shares = model.experts.shares == "chosen"
        return {"norm_topk_prob": shares, "clip_qkv": model.qkv_limit}

    def own_fields(
        self, said: dict[str, Any], experts: dict[str, Any], num_layers: int, where: str
    ) -> dict[str, Any]:
        """The shares and the limit."""
        shares = "chosen" if said.get("norm_topk_prob", False) else "all"
        return {"qkv_limit": said.get("clip_qkv"), "experts": experts | {"shares": shares}}


class Dots1Hf(_MoeHf):
    """Both directions of dots.llm1's Hugging Face form."""

    architecture, model_type = "Dots1ForCausalLM", "dots1"
    weights = (
        llama_hf.WEIGHTS
        | EXPERTS
        | {"layers.router_bias": f"{BLOCK}.gate.e_score_correction_bias"}
        | {
            f"layers.shared_{name}": f"{BLOCK}.shared_experts.{name}_proj.weight"
            for name in ("gate", "up", "down")
        }
    )
    keys: ClassVar = {
        "num_experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "mlp_dim": "moe_intermediate_size",
        "num_groups": "n_group",
        "groups_per_token": "topk_group",
        "scale": "routed_scaling_factor",
    }
    own_keys: ClassVar = {"mlp_dim": "intermediate_size"}
    defaults: ClassVar = {
        "moe_intermediate_size": 1408, "intermediate_size": 10_944, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "attention_bias": False, "sliding_window": 4096,
        "num_key_value_heads": 32,
    }  # fmt: skip

    def own_config(self, model: Any) -> dict[str, Any]:
        """The plain layers, the shared experts and the shares. Raises UserError for plain layers
        that are not the first ones, and shared experts that are no multiple of an expert."""
        experts, first = model.experts, len(model.dense_layers)
        _insist(model, self.architecture, score="sigmoid", capacity_factor=None)
        if model.dense_layers != tuple(range(first)):
            raise UserError(
                f"model.dense_layers: {self.architecture} has dense layers only at the beginning, "
                f"not {list(model.dense_layers)}; change it to export"
            )
        if experts.bias_rate is None or (experts.shared_dim or 1) % experts.mlp_dim:
            name = "bias_rate" if experts.bias_rate is None else "shared_dim"
            raise UserError(
                f"model.experts.{name}: {self.architecture} has a bias and shared experts of "
                f"model.experts.mlp_dim or several times that; change it to export"
            )
        return {
            "intermediate_size": model.mlp_dim,
            "n_shared_experts": experts.shared_dim // experts.mlp_dim,
            "norm_topk_prob": experts.shares == "chosen",
            "first_k_dense_replace": first,
            "sliding_window": None,
            "max_window_layers": model.num_layers,
        }

    def own_fields(
        self, said: dict[str, Any], experts: dict[str, Any], num_layers: int, where: str
    ) -> dict[str, Any]:
        """The plain layers, the shared experts and the shares. Raises UserError for windows."""
        window = said["sliding_window"]
        first_local = num_layers if window is None else said.get("max_window_layers", 62)
        types = said.get("layer_types") or []
        if "sliding_attention" in types or (not types and num_layers > first_local):
            raise UserError(
                f"{where}: sliding_window is not computed for {self.architecture}; set it to null "
                f"if rows are not longer than it"
            )
        shared = (said.get("n_shared_experts") or 0) * experts["mlp_dim"]
        experts |= {
            "score": "sigmoid",
            "shares": "chosen" if said.get("norm_topk_prob", False) else "all",
            "shared_dim": shared or None,
            "bias_rate": NEW_BIAS_RATE,
        }
        first = min(said.get("first_k_dense_replace", 0), num_layers)
        return {"dense_layers": list(range(first)), "experts": experts}
