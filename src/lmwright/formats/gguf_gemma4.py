"""Gemma 4 in GGUF, where local and global layers differ. As llama.cpp's convert_hf_to_gguf.py
writes it.

    attention.key_length, _swa      width of a head in global and in local layers
    attention.head_count_kv         a number, or one for each layer
    feed_forward_length             the same
    rope_freqs.weight               factors of pairs in global layers: 1e30 where none is rotated
    no attn_v in a global layer     its keys are its values
"""

from collections.abc import Mapping
from typing import Any

from lmwright.errors import UserError
from lmwright.formats.gguf_rope import LOCAL_BASE, decimal
from lmwright.models.hf.rope import SIDES
from lmwright.models.hf.window import TYPES
from lmwright.models.text_part import SHARED_LAYERS

NAME = "gemma4"
PATTERN = "attention.sliding_window_pattern"
KEYS = {
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "attention.shared_kv_layers": SHARED_LAYERS,
}
ROPE = {"freq_base", LOCAL_BASE, "dimension_count", "dimension_count_swa"}
CAP = "final_logit_softcapping"  # here and in config.json


def metadata(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys below the architecture's name. Raises UserError for experts, and where llama.cpp would
    look at the keys and values of other layers."""
    refuse_experts(config, where)
    local = [kind == TYPES["local"] for kind in config["layer_types"]]
    heads, wide = config["num_key_value_heads"], config["num_global_key_value_heads"]
    own = len(local) - config[SHARED_LAYERS]
    if own < len(local) and local[:own][-2:] != [True, False]:
        raise UserError(
            f"{where}: model.num_shared_layers: in llama.cpp a local layer and then a global one "
            "come before the shared ones; export to a Hugging Face folder instead"
        )
    size, times = config["intermediate_size"], 1 + config["use_double_wide_mlp"]
    # where it is silent, llama.cpp takes 30
    meta: dict[str, Any] = {PATTERN: local, CAP: float(config[CAP] or 0.0)}
    for key, width in (("", config["global_head_dim"]), ("_swa", config["head_dim"])):
        names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
        meta |= {f"{name}{key}": width for name in names}
    if wide not in (None, heads):
        meta["attention.head_count_kv"] = [heads if each else wide for each in local]
    if times > 1:
        meta["feed_forward_length"] = [size if i < own else size * times for i in range(len(local))]
    rope = config["rope_parameters"]
    bases = {"freq_base": rope[SIDES[0]], LOCAL_BASE: rope[SIDES[1]]}
    return meta | {f"rope.{key}": float(each["rope_theta"]) for key, each in bases.items()}


def refuse_experts(config: Mapping[str, Any], where: str) -> None:
    """Raises UserError for a Gemma 4 with experts."""
    if config.get("num_experts"):
        raise UserError(
            f"{where}: GGUF files of a Gemma 4 with experts are neither read nor written; use a "
            "Hugging Face folder, which llama.cpp's convert_hf_to_gguf.py takes"
        )


def plain(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata as other architectures have them: those of the first local layer."""
    name = f"{NAME}.{{}}".format
    local = meta.get(name(PATTERN)) or []
    first = local.index(True) if isinstance(local, list) and True in local else 0
    changed = {
        key: meta[key][first]
        for key in map(name, ("attention.head_count_kv", "feed_forward_length"))
        if isinstance(meta.get(key), list)
    }
    if (width := meta.get(name("attention.key_length_swa"))) is not None:
        changed[name("attention.key_length")] = width
    return {**meta, **changed}


def config_of(
    meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any],
    where: str,
) -> dict[str, Any]:  # fmt: skip
    """Keys of config.json that other architectures do not have. Raises UserError for rotations that
    are not computed."""
    said = {key.removeprefix(f"{NAME}."): decimal(value) for key, value in meta.items()}
    refuse_experts(config, where)
    local = said.get(PATTERN)
    if not isinstance(local, list):
        raise UserError(f"{where}: lacks {NAME}.{PATTERN}; download another conversion")
    unknown = sorted(key for key in said if key.startswith("rope.") and key[5:] not in ROPE)
    if unknown:
        raise UserError(f"{where}: {NAME}.{unknown[0]} is not computed here")
    own = len(local) - (config.get(SHARED_LAYERS) or 0)
    wide = [i for i, each in enumerate(local[:own]) if not each]
    widths = said.get("feed_forward_length")
    heads = said.get("attention.head_count_kv")
    return {
        "layer_types": [TYPES["local" if each else "global"] for each in local],
        "global_head_dim": said.get("attention.key_length"),
        "num_global_key_value_heads": heads[wide[0]] if isinstance(heads, list) and wide else None,
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in shapes for i in wide),
        CAP: said.get(CAP, 30.0) or None,
        "use_double_wide_mlp": isinstance(widths, list) and widths[-1] == 2 * widths[0],
        "vocab_size_per_layer_input": config.get("vocab_size"),
        "rope_parameters": {
            SIDES[0]: {"rope_type": "default", "rope_theta": said.get("rope.freq_base", 1e6)},
            SIDES[1]: {"rope_type": "default", "rope_theta": said.get(f"rope.{LOCAL_BASE}", 1e4)},
        },
    }


def is_unused(name: str, config: Mapping[str, Any]) -> bool:
    """True for keys and values, by GGUF's name, of a layer that shares those of another."""
    parts = name.split(".")
    own = config["num_hidden_layers"] - (config.get(SHARED_LAYERS) or 0)
    heads = ("attn_k", "attn_v", "attn_k_norm")
    return len(parts) == 4 and parts[0] == "blk" and int(parts[1]) >= own and parts[2] in heads
