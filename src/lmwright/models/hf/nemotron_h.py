"""Nemotron-H in Hugging Face."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.mamba import CONVS, mamba_weights, read_limits
from lmwright.models.hf.moe import DOTS_KEYS, NEW_BIAS_RATE, NO_FURTHER, SIGMOID, Experts, MoeHf
from lmwright.models.hf.pairs import HEAD, NO_IDS, Derived, Fixed, Json, Pair
from lmwright.models.hf.table import KEYS, Table
from lmwright.models.hf.window import kinds_of, pattern_of
from lmwright.models.nemotron_h import LETTERS, MOE

LAYER = "backbone.layers.{i}"
MIXER = f"{LAYER}.mixer"
TYPES = {"mamba": "linear_attention", "full": "full_attention", "mlp": "mlp", "moe": "moe"}
OLDER = {"mamba": TYPES["mamba"], "attention": TYPES["full"]}
PATTERN = "hybrid_override_pattern"
NO_LEAST_STEP = {"time_step_min": 1e-9}
"""No token has a least step where the model was made, in vLLM and llama.cpp, and in the decoding of
transformers, whose prefill takes this key for one."""
NOT_SUPPORTED = "{key} is not supported"


def _said(config: Json) -> Any:
    """The types of the layers as config.json has them: words, or the letters of released files."""
    return config.get("layers_block_type") or config.get("layer_types") or config.get(PATTERN) or ""


def _types(config: Json, where: str) -> list[str]:
    """The type of each layer. Raises UserError for letters that mean none."""
    said: list[str] | str = _said(config)
    if isinstance(said, str):
        if not said or set(said) - {*LETTERS}:
            raise UserError(
                f"{where}: {PATTERN} {said!r} must have one of {' '.join(LETTERS)} for each layer; "
                "correct it"
            )
        said = [TYPES[LETTERS[each]] for each in said]
    if not isinstance(said, list) or not all(isinstance(each, str) for each in said):
        raise UserError(f"{where}: layers_block_type is not a list of types; download it again")
    return [OLDER.get(each, each) for each in said]


def _read_pattern(config: Json, fields: Json, where: str) -> Json:
    kinds = kinds_of(_types(config, where), TYPES, fields["num_layers"], where)
    return {"mixer_pattern": pattern_of(kinds)}


def _write_pattern(model: Any, *_: str) -> Json:
    letters = {kind: letter for letter, kind in LETTERS.items()}
    return {
        "layers_block_type": [TYPES[kind] for kind in model.kinds],
        PATTERN: "".join(letters[kind] for kind in model.kinds),
    }


class NemotronHHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "Nemotron-H"
    model_types: ClassVar = {"NemotronHForCausalLM": "nemotron_h"}
    weights: ClassVar = {
        "embed": "backbone.embeddings.weight",
        "norm": "backbone.norm_f.weight",
        "head": "lm_head.weight",
        "layers.attention_norm": f"{LAYER}.norm.weight",
        **{f"layers.{name}": f"{MIXER}.{name}_proj.weight" for name in ("q", "k", "v", "o")},
        **{f"layers.{name}": f"{MIXER}.{name}_proj.weight" for name in ("up", "down")},
        **mamba_weights(MIXER),
    }
    modules: ClassVar = {
        module: module.replace("backbone", "model")
        for module in (MIXER, *(name.rpartition(".")[0] for name in weights.values()))
        if module.startswith("backbone")
    }
    convs = CONVS
    own_head = True
    peft_refuses = ("mamba_out",)
    keys = KEYS | {
        "norm_eps": "layer_norm_epsilon", "mamba_num_heads": "mamba_num_heads",
        "mamba_head_dim": "mamba_head_dim", "mamba_state_dim": "ssm_state_size",
        "mamba_num_groups": "n_groups", "conv_tokens": "conv_kernel",
    }  # fmt: skip
    pairs: ClassVar[tuple[Pair, ...]] = (
        HEAD, NO_IDS, NO_FURTHER,
        Derived(_read_pattern, _write_pattern),
        Derived(read_limits),
        Derived(write=lambda model, *_: {"chunk_size": model.chunk_tokens} | NO_LEAST_STEP),
        Fixed("mlp_hidden_act", "relu2", same=(None,)),
        Fixed("mamba_hidden_act", "silu", same=(None,)),
        Fixed("use_conv_bias", True, same=(None,)),
        *(Fixed(key, False, NOT_SUPPORTED, same=(None,))
          for key in ("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias")),
        Fixed("sliding_window", None, NOT_SUPPORTED),
    )  # fmt: skip
    defaults: ClassVar = {
        "num_key_value_heads": 8, "head_dim": 128, "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 4096, "intermediate_size": 21_504, "mamba_num_heads": 128,
        "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
    }  # fmt: skip

    def fields(self, config: Json, where: str) -> Json:
        """Fields of the model for a config.json at `where`, where the types of the layers say how
        many there are. Raises UserError for anything that this family does not compute."""
        return super().fields(config | {"num_hidden_layers": len(_types(config, where))}, where)


def _read_experts(config: Json, fields: Json, where: str) -> Json:
    more = {
        "bias_rate": NEW_BIAS_RATE,
        "shared_dim": config["moe_shared_expert_intermediate_size"],
        "latent_dim": config.get("moe_latent_size"),
    }
    return {"experts": fields["experts"] | more}


def _write_experts(model: Any, architecture: str, _: str) -> Json:
    experts = model.experts
    for name in ("bias_rate", "shared_dim"):
        if getattr(experts, name) is None:
            raise UserError(f"model.experts.{name}: {architecture} has one; set it to export")
    return {
        "moe_shared_expert_intermediate_size": experts.shared_dim,
        "moe_latent_size": experts.latent_dim,
    }


class NemotronHMoeHf(MoeHf, NemotronHHf):
    """Both directions of the Hugging Face form with experts."""

    name = "Nemotron-H with experts"
    peft_experts = "plain"
    weights: ClassVar = NemotronHHf.weights | {
        "layers.router": f"{MIXER}.gate.weight",
        "layers.router_bias": f"{MIXER}.gate.e_score_correction_bias",
        **{f"layers.expert_{name}": f"{MIXER}.experts.{{}}.{name}_proj.weight"
           for name in ("up", "down")},
        **{f"layers.shared_{name}": f"{MIXER}.shared_experts.{name}_proj.weight"
           for name in ("up", "down")},
        "layers.latent_in": f"{MIXER}.fc1_latent_proj.weight",
        "layers.latent_out": f"{MIXER}.fc2_latent_proj.weight",
    }  # fmt: skip
    pairs: ClassVar[tuple[Pair, ...]] = (
        *NemotronHHf.pairs,
        Experts(DOTS_KEYS, SIGMOID, latents=True),
        Derived(_read_experts, _write_experts),
        Fixed("n_shared_experts", 1, NOT_SUPPORTED, same=(None,)),
    )
    defaults: ClassVar = NemotronHHf.defaults | {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688, "routed_scaling_factor": 1.0, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True,
    }  # fmt: skip

    @classmethod
    def is_of(cls, config: Json) -> bool:
        """True where a layer has experts."""
        said = _said(config)
        return isinstance(said, str | list) and (TYPES[MOE] in said or "E" in said)
