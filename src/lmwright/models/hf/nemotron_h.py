"""Nemotron-H in Hugging Face."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.granite4 import read_limits
from lmwright.models.hf.moe import NO_FURTHER
from lmwright.models.hf.pairs import HEAD, NO_IDS, Derived, Fixed, Json, Pair
from lmwright.models.hf.table import KEYS, Table
from lmwright.models.hf.window import kinds_of, pattern_of

LAYER = "backbone.layers.{i}"
MIXER = f"{LAYER}.mixer"
TYPES = {"mamba": "linear_attention", "full": "full_attention", "mlp": "mlp"}
OLDER = {"mamba": TYPES["mamba"], "attention": TYPES["full"]}
LETTERS = {"M": TYPES["mamba"], "*": TYPES["full"], "-": "mlp", "E": "moe"}
"""Of `hybrid_override_pattern`, which released files have."""
NO_LEAST_STEP = {"time_step_min": 1e-9}
"""No token has a least step where the model was made, in vLLM and llama.cpp, and in the decoding of
transformers, whose prefill takes this key for one."""
NOT_SUPPORTED = "{key} is not supported"


def _types(config: Json, where: str) -> list[str]:
    """The type of each layer. Raises UserError for letters that mean none, and for experts."""
    said = config.get("layers_block_type") or config.get("layer_types")
    if said is None:
        letters = config.get("hybrid_override_pattern") or ""
        if not isinstance(letters, str) or not letters or set(letters) - {*LETTERS}:
            raise UserError(
                f"{where}: hybrid_override_pattern {letters!r} must have one of "
                f"{' '.join(LETTERS)} for each layer; correct it"
            )
        said = [LETTERS[each] for each in letters]
    if not isinstance(said, list) or not all(isinstance(each, str) for each in said):
        raise UserError(f"{where}: layers_block_type is no list of types; download it again")
    said = [OLDER.get(each, each) for each in said]
    if "moe" in said:
        raise UserError(
            f"{where}: its layers with experts are not computed; Nemotron-H is read without them"
        )
    return said


def _read_pattern(config: Json, fields: Json, where: str) -> Json:
    kinds = kinds_of(_types(config, where), TYPES, fields["num_layers"], where)
    return {"mixer_pattern": pattern_of(kinds)}


def _write_pattern(model: Any, *_: str) -> Json:
    types = [TYPES[kind] for kind in model.kinds]
    letters = {theirs: letter for letter, theirs in LETTERS.items()}
    return {
        "layers_block_type": types,
        "hybrid_override_pattern": "".join(letters[each] for each in types),
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
        "layers.mamba_in": f"{MIXER}.in_proj.weight",
        "layers.conv": f"{MIXER}.conv1d.weight",
        "layers.conv_bias": f"{MIXER}.conv1d.bias",
        "layers.a_log": f"{MIXER}.A_log",
        "layers.dt_bias": f"{MIXER}.dt_bias",
        "layers.skip": f"{MIXER}.D",
        "layers.memory_norm": f"{MIXER}.norm.weight",
        "layers.mamba_out": f"{MIXER}.out_proj.weight",
    }
    modules: ClassVar = {
        module: module.replace("backbone", "model")
        for module in (MIXER, *(name.rpartition(".")[0] for name in weights.values()))
        if module.startswith("backbone")
    }
    convs = ("layers.conv",)
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
