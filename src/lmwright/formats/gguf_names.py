"""Names of models in GGUF: architectures, metadata and tensors, both ways.

A GGUF file is read as if it were a Hugging Face folder: its metadata become a config.json, its
tensors get their Hugging Face names and layout, and everything else follows from those. Names of
tensors are gguf's own table; here is what it leaves unsaid.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from lmwright.data.tokens.gguf_header import gguf_package
from lmwright.errors import UserError
from lmwright.formats import (
    gguf_afmoe,
    gguf_cohere,
    gguf_deepseek,
    gguf_ernie,
    gguf_exaone4,
    gguf_falcon,
    gguf_further,
    gguf_gemma4,
    gguf_hybrid,
    gguf_layer_norms,
    gguf_lfm2,
    gguf_llama4,
    gguf_mamba,
    gguf_mamba2,
    gguf_mellum,
    gguf_mistral3,
    gguf_nemotron,
)
from lmwright.formats.gguf_archs import (
    ARCHS,
    DIFFUSION,
    LARGEST_GEMMA,
    OLMO3,
    OWN_HEAD,
    SAME,
    TOLD,
    VARIANTS,
    Arch,
)
from lmwright.formats.gguf_gemma4 import PATTERN
from lmwright.formats.gguf_own import of_one
from lmwright.formats.gguf_rope import decimal, rotated_dims, scale_rope
from lmwright.models.hf.table import head_dim
from lmwright.models.hf.window import TYPES

EXPERT = re.compile(r"\.(experts|norms)\.(\d+)\.")

# metadata key below the architecture's name -> config.json
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
BIASED = ("attn_q.bias", "attn_qkv.bias", "attn_output.bias")
SHIFT = "diffusion.shift_logits"  # whether an output predicts the next token
FLOAT_KEYS = {
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "attn_logit_softcapping",
    "final_logit_softcapping", "attention.layer_norm_epsilon", "rope.freq_base_swa",
    "embedding_scale", "attention.scale", "residual_scale", "logit_scale",
    "expert_weights_scale", gguf_layer_norms.LIMIT,
}  # fmt: skip

THEIR_NAMES = {
    "_layernorm.norms.": "_layernorm.",
    ".attn_sub_norm.": ".inner_attn_ln.", ".ffn_sub_norm.": ".ffn_layernorm.",
    **{f".block_sparse_moe.experts.{part}_proj.": f".mlp.experts.{part}_proj."
       for part in ("gate", "up", "down")},
}  # fmt: skip
"""Parts of transformers' names, and those in the gguf package's table."""


def arch_of(meta: Mapping[str, Any], tensors: Collection[str], where: str) -> tuple[str, Arch]:
    """GGUF's name of the architecture of a file with these metadata and names of tensors, and the
    Arch. Raises UserError for others."""
    from lmwright.config.errors import nearest

    name = str(meta.get("general.architecture", "?"))
    if name not in ARCHS:
        cure = nearest(name, list(ARCHS), what="these are read")
        raise UserError(f"{where}: GGUF architecture {name!r} is not supported; {cure}")
    if name in TOLD and TOLD[name][1](meta, tensors):
        return name, TOLD[name][0]
    variant, key = VARIANTS.get(name, (ARCHS[name], ""))
    return name, variant if meta.get(f"{name}.{key}") else ARCHS[name]


def gguf_arch_of(config: Mapping[str, Any]) -> tuple[str, Arch]:
    """(GGUF's name, Arch) of the architecture of a config.json. Raises UserError where none is."""
    architecture = config["architectures"][0]
    for name, (variant, _) in VARIANTS.items():
        if architecture == variant.hf:
            return name, variant
    for name, (told, _) in TOLD.items():
        if architecture == told.hf:
            return name, told
    if (name := SAME.get(architecture)) is not None:
        return name, ARCHS[name]
    for name, arch in sorted(ARCHS.items(), key=lambda item: not item[1].mark):
        if arch.hf == architecture and (not arch.mark or arch.mark in config):
            return name, arch
    others = {arch.hf for arch, _ in (*VARIANTS.values(), *TOLD.values())} | {*SAME}
    there = sorted({arch.hf for arch in ARCHS.values()} | others)
    raise UserError(f"{architecture}: has no GGUF form here; these have: {', '.join(there)}")


def config_of(meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> Any:
    """config.json of metadata and the tensors' shapes by name (GGUF's names, numpy order)."""
    name, arch = arch_of(meta, shapes, where)
    config: dict[str, Any] = {"architectures": [arch.hf], "model_type": arch.model_type}
    of_layers = gguf_further.without(meta, name)
    meta = _plain(of_layers, name, arch)
    for key, theirs in (KEYS | arch.keys).items():
        if (value := meta.get(f"{name}.{key}")) is not None:
            config[arch.renamed.get(theirs, theirs)] = decimal(value)
    for key in ("intermediate_size", "num_key_value_heads", "num_attention_heads"):
        if isinstance(config.get(key), list):
            config[key] = _same(config[key], f"{where}: {key}")
    heads = config.get("num_attention_heads") or 1
    config.setdefault("num_key_value_heads", heads)
    # llama.cpp's own rule where the key is silent
    config.setdefault("head_dim", config.get("hidden_size", 0) // heads)
    if arch.keys.get("attention.scale"):
        config.setdefault("attention_multiplier", (config["head_dim"] or 1) ** -0.5)
    if "token_embd.weight" in shapes:
        config["vocab_size"] = shapes["token_embd.weight"][0]
    config.setdefault("rope_theta", 10_000.0)
    config["tie_word_embeddings"] = "output.weight" not in shapes
    config["attention_bias"] = any(name.endswith(BIASED) for name in shapes)
    config["mlp_bias"] = "blk.0.ffn_down.bias" in shapes
    config |= arch.fixed
    if name == gguf_gemma4.NAME:
        return config | gguf_gemma4.config_of(of_layers, shapes, config, where)
    if arch.partial and (rotated := meta.get(f"{name}.rope.dimension_count")):
        config["partial_rotary_factor"] = rotated / (config["head_dim"] or 1)
    if arch.hybrid:
        config |= gguf_hybrid.config_of(meta, config, name)
    if arch.short_convs:
        config |= gguf_lfm2.config_of(of_layers, name)
    if arch.mamba:
        config |= gguf_mamba.config_of(of_layers, name)
    if arch.deepseek:
        config |= gguf_deepseek.config_of(meta, shapes, config, name, where)
    if arch.mark == DIFFUSION:
        shifts = meta.get(SHIFT, name == "dream")  # where it is silent, llama.cpp's own rule
        config[arch.mark] = {"predicts": "next" if shifts else "own"}
    config |= _layers(meta, shapes, config, name, arch, where)
    if name in gguf_nemotron.NAMES:
        config |= gguf_nemotron.config_of(of_layers, name)
    config |= gguf_mamba2.config_of(meta) if name == gguf_mamba2.NAME else {}
    config |= gguf_falcon.config_of(shapes) if name == gguf_falcon.NAME else {}
    if name in LARGEST_GEMMA:
        largest = config.get("num_hidden_layers") == LARGEST_GEMMA[name]
        width = config.get("hidden_size", 0) // heads
        config["query_pre_attn_scalar"] = width if largest else config["head_dim"]
    plain = gguf_mistral3.plain if name == gguf_mistral3.NAME else gguf_deepseek.plain
    meta, weights = plain(meta, name)
    scale_rope(config, meta, name, where)
    if config["rope_parameters"]["rope_type"] == "yarn":
        for rope in (config["rope_parameters"], config["rope_scaling"]):
            rope |= weights
    if arch.exact_yarn and "rope_scaling" in config:
        config["rope_parameters"]["truncate"] = config["rope_scaling"]["truncate"] = False
    if name == gguf_mellum.NAME:
        config["rope_parameters"] = gguf_mellum.by_reach(config["rope_parameters"])
    return config | {own: config[key] for key, own in arch.rope_keys.items() if key in config}


def _layers(
    meta: Mapping[str, Any], shapes: Mapping[str, Any], config: Mapping[str, Any], name: str,
    arch: Arch, where: str,
) -> dict[str, Any]:  # fmt: skip
    """Keys of config.json that say what layers have, or in what they differ."""
    if arch is OLMO3 and isinstance(of := meta.get(f"{name}.{PATTERN}"), list):
        return {"layer_types": [TYPES["local" if is_local else "global"] for is_local in of]}
    if name == gguf_exaone4.NAME:
        return gguf_exaone4.config_of(config)
    if name == gguf_exaone4.MOE:
        return gguf_exaone4.moe_config_of(meta, config, where)
    if name == gguf_ernie.NAME:
        return gguf_ernie.config_of(config)
    if name in gguf_cohere.NAMES:
        return gguf_cohere.config_of(meta, config, name)
    if name in gguf_layer_norms.NAMES:
        return gguf_layer_norms.config_of(meta, shapes, config, name, where)
    if name == gguf_llama4.NAME:
        return gguf_llama4.config_of(config)
    if name == gguf_afmoe.NAME:
        return gguf_afmoe.config_of(meta, config, where)
    return gguf_mellum.config_of(meta, config, where) if name == gguf_mellum.NAME else {}


def _plain(meta: Mapping[str, Any], name: str, arch: Arch) -> Mapping[str, Any]:
    """The metadata with one value in the place of those that layers have each for itself."""
    if name == gguf_gemma4.NAME:
        return gguf_gemma4.plain(meta)
    if name in gguf_nemotron.NAMES:
        return gguf_lfm2.plain(meta, name, gguf_nemotron.WIDTHS)
    return gguf_lfm2.plain(meta, name) if arch.short_convs or arch.mamba else meta


def _same(values: list[Any], what: str) -> Any:
    if len(set(values)) != 1:
        raise UserError(f"{what} differs from layer to layer, which is not supported")
    return values[0]


def metadata_of(config: Mapping[str, Any], where: str) -> tuple[str, Arch, dict[str, Any]]:
    """GGUF's name of the architecture, the Arch, and the keys below that name. Raises UserError
    for a model that GGUF cannot express."""
    name, arch = gguf_arch_of(config)
    if name == "bitnet" and config["hidden_act"] != "silu":
        raise UserError(
            f"{where}: llama.cpp computes BitNet with SwiGLU, and model.mlp = 'relu2glu' would come"
            " out wrong; export a folder (--dtype ternary), or train with mlp = 'swiglu'"
        )
    for key, value in arch.fixed.items():
        if config.get(key, value) != value:
            raise UserError(f"{where}: GGUF cannot say {key} = {config[key]!r} for {name!r}")
    _refuse_tied(config, name, where)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)  # Gemma 3's are by the type of layer
    usual = head_dim(config) if arch.partial else {}
    config = {"rope_theta": rope.get("rope_theta")} | usual | dict(config)
    meta: dict[str, Any] = {}
    for key, theirs in (KEYS | arch.keys).items():
        value = config.get(arch.renamed.get(theirs, theirs))
        if key == "attention.sliding_window" and not arch.window:
            continue  # what is lost is found when the file is read again
        if value is not None:
            kind = type(value) if isinstance(value, str | bool) else int
            meta[key] = (float if key in FLOAT_KEYS else kind)(value)
    if "attention.key_length" in meta:
        meta["attention.value_length"] = meta["attention.key_length"]
        meta["rope.dimension_count"] = rotated_dims(config)
    if name == gguf_gemma4.NAME:
        return name, arch, meta | gguf_gemma4.metadata(config, where)
    if arch.hybrid:
        meta |= gguf_hybrid.metadata(config, where)
    if arch.short_convs:
        meta |= gguf_lfm2.metadata(config, where)
    if arch.mamba:
        meta |= gguf_mamba.metadata(config, where)
    if arch.deepseek:
        meta |= gguf_deepseek.metadata(config, name, where)
    meta |= of_one(config, rope, name, where)
    heads, kv_heads = (config.get(f"num_{of}_heads") for of in ("attention", "key_value"))
    if name in ("olmoe", "dots1") and kv_heads != heads:
        raise UserError(f"{where}: llama.cpp's {name} has as many kv heads as heads")
    _refuse_act(config, name, arch, where)
    if not arch.biases and (config.get("attention_bias") or config.get("mlp_bias")):
        raise UserError(f"{where}: llama.cpp's {name} has no biases; export to a folder instead")
    if arch.mark == DIFFUSION or arch.encoder:
        meta["attention.causal"] = False
    if arch.encoder or arch.even:
        _refuse_uneven(config, name, where)
    return name, arch, meta | _scaling(rope, name, arch, where)


def _scaling(rope: Mapping[str, Any], name: str, arch: Arch, where: str) -> dict[str, Any]:
    """Keys that scale rotations. Raises UserError for what llama.cpp does not compute."""
    kind = rope.get("rope_type", "default")
    if kind == "llama3" and not arch.factors:
        raise UserError(
            f"{where}: llama.cpp's {name} does not compute the rope scaling 'llama3'; export to a "
            "Hugging Face folder instead"
        )
    if kind != "default" and not arch.scales:
        raise UserError(
            f"{where}: llama.cpp's {name} has no rope scaling such as {kind!r}; export to a "
            "Hugging Face folder instead"
        )
    if kind in ("default", "llama3"):
        return {}
    if kind not in ("linear", "yarn"):
        raise UserError(
            f"{where}: GGUF has no rope scaling {kind!r}; export to a Hugging Face folder instead"
        )
    meta = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if original := rope.get("original_max_position_embeddings"):
        meta["rope.scaling.original_context_length"] = int(original)
    return meta


def _refuse_tied(config: Mapping[str, Any], name: str, where: str) -> None:
    """Raises UserError for a table that is also the head, where llama.cpp asks for a head."""
    if name in OWN_HEAD and config.get("tie_word_embeddings"):
        raise UserError(
            f"{where}: llama.cpp's {name} has no head that is the embedding table; export to a "
            'folder instead, or train with model.head = "untied"'
        )


def _refuse_act(config: Mapping[str, Any], name: str, arch: Arch, where: str) -> None:
    act = config.get(arch.renamed.get("hidden_act", "hidden_act"))
    if arch.acts and (act or arch.acts[0]) not in arch.acts:
        raise UserError(f"{where}: GGUF's {name} is {' or '.join(arch.acts)}, not {act}")


def _refuse_uneven(config: Mapping[str, Any], name: str, where: str) -> None:
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if config.get("head_dim", 0) * heads not in (0, width):
        raise UserError(
            f"{where}: head_dim {config['head_dim']} times {heads} heads is not hidden_size "
            f"{width}, as in llama.cpp's {name}; export to a Hugging Face folder instead"
        )


class NameMap:
    """Hugging Face names of tensors in GGUF, by the gguf package's own table."""

    def __init__(self, arch: str, num_layers: int):
        gguf = gguf_package()
        known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
        key = known[gguf_mellum.TABLE if arch == gguf_mellum.NAME else arch]
        self._table = gguf.get_tensor_name_map(key, num_layers)

    def __call__(self, name: str) -> tuple[str, int | None]:
        """Returns (GGUF's name, number of the expert or head within it or None). Raises
        UserError."""
        expert = EXPERT.search(name)
        alone = name.endswith((".sinks", ".layer_scalar"))
        name = f"{name}.weight" if alone else gguf_hybrid.place_of(name)
        name = f"{name}.bias" if name.endswith(".expert_bias") else name
        bare = EXPERT.sub(r".\1.", name)
        for ours, theirs in THEIR_NAMES.items():
            bare = bare.replace(ours, theirs)
        bare = gguf_nemotron.place_of(bare)
        there = self._table.get_name(bare, try_suffixes=(".weight", ".bias"))
        there = there or self._table.get_name(
            bare.removeprefix("model."), try_suffixes=(".weight", ".bias")
        )
        if there is None and name.endswith(".e_score_correction_bias"):
            bias = self._table.get_name(bare.removesuffix("_bias"))
            there = bias and f"{bias}.bias"
        if there is None:
            raise UserError(f"{name}: has no place in this GGUF architecture")
        return there, None if expert is None else int(expert[2])
