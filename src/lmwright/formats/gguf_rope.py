"""Rotations in GGUF's metadata, read as llama.cpp reads them (load_hparams in llama-model.cpp).

rope.scaling.type             linear where it is silent
rope.scaling.factor           or the rope.scale_linear of 2023; 0 and 1 scale nothing
rope.scaling.attn_factor      on top of what yarn makes of the factor
rope_freqs.weight             a tensor of factors: Llama 3.1's scaling, and 1e30 for the pairs of a
                              Gemma 4's global layers that are not rotated
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lmwright.errors import UserError
from lmwright.models.hf.window import TYPES

ROPE_FACTORS = "rope_freqs.weight"
READ = {
    "freq_base", "dimension_count", "scale_linear", "scaling.type", "scaling.factor",
    "scaling.original_context_length", "scaling.attn_factor", "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow", "scaling.finetuned",
}  # fmt: skip
# which llama.cpp obeys, or not, by architecture and version: only what changes nothing is taken
NEUTRAL = {
    "scaling.yarn_ext_factor": (1.0, -1.0),
    "scaling.yarn_attn_factor": (1.0,),
    "scaling.yarn_log_multiplier": (0.0,),
    "scaling.alpha": (0.0,),
}
GLOBAL = TYPES["global"]
NOT_ROTATED = 1e30
LOCAL_THETA = ("rope_local_base_freq", "local_rope_theta")  # in config.json
LOCAL_BASE = "freq_base_swa"  # of layers with a window, where an architecture tells them apart


def decimal(value: Any) -> Any:
    """A float32 as the shortest decimal that means it: 1e-05, not 9.999999747378752e-06."""
    if isinstance(value, float):
        return float(np.format_float_positional(np.float32(value), unique=True, trim="0"))
    return value


def scale_rope(config: dict[str, Any], meta: Mapping[str, Any], name: str, where: str) -> None:
    """Copies the RoPE settings in the metadata of architecture `name` to config.json. Raises
    UserError for an unknown key, or one that asks for an unsupported RoPE variant."""
    prefix = f"{name}.rope."
    settings = {k.removeprefix(prefix): v for k, v in meta.items() if k.startswith(prefix)}
    _refuse_unknown(settings, config, name, where)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    rope |= {key: config[key] for key in ("partial_rotary_factor",) if key in config}
    kind, factor = settings.get("scaling.type", "linear"), _factor(settings, where)
    if kind not in ("none", "linear", "yarn"):
        raise UserError(
            f"{where}: rope scaling {kind!r} is not supported; download another conversion of the "
            "model"
        )
    attention = _number(settings, "scaling.attn_factor", 1.0, where)
    if kind == "yarn" and factor != 1.0:
        rope |= {"rope_type": "yarn", "factor": factor}
        for theirs in ("beta_fast", "beta_slow"):
            if (key := f"scaling.yarn_{theirs}") in settings:
                rope[theirs] = _number(settings, key, 0.0, where)
        if original := settings.get("scaling.original_context_length"):
            rope["original_max_position_embeddings"] = original
        if attention != 1.0:
            rope["attention_factor"] = attention * (1 + 0.1 * math.log(factor))
    elif attention != 1.0:
        raise UserError(
            f"{where}: {prefix}scaling.attn_factor = {attention} is not computed beside rope "
            f"scaling {kind!r}; download another conversion of the model"
        )
    elif kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    config["rope_parameters"] = rope


def _refuse_unknown(
    settings: Mapping[str, Any], config: dict[str, Any], name: str, where: str
) -> None:
    partial = config.get("partial_rotary_factor", 1.0)
    local = next((name for name in LOCAL_THETA if name in config), None)
    for key, value in sorted(settings.items()):
        if key == LOCAL_BASE and local:
            config[local] = _number(settings, key, 0.0, where)
        elif key == "dimension_count" and value == config["head_dim"] * partial:
            continue
        elif key == "dimension_count":
            raise UserError(
                f"{where}: {name}.rope.{key} = {value!r} of heads of {config['head_dim']} is not "
                f"computed for this architecture"
            )
        elif key == "dimension_sections" and "partial_rotary_factor" in config:
            continue  # of positions in images; a text has one
        elif key not in READ and value not in NEUTRAL.get(key, ()):
            raise UserError(
                f"{where}: {name}.rope.{key} = {value!r} is not computed here; without it, this "
                "would be a different model"
            )


def _factor(settings: Mapping[str, Any], where: str) -> float:
    key = "scaling.factor" if "scaling.factor" in settings else "scale_linear"
    return _number(settings, key, 0.0, where) or 1.0


def _number(settings: Mapping[str, Any], key: str, default: float, where: str) -> float:
    value = decimal(settings.get(key, default))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise UserError(f"{where}: rope.{key} = {value!r} is not a number; download it again")
    return float(value)


def rotated_dims(config: Mapping[str, Any]) -> int:
    """Dims of a head that are rotated."""
    rope = config.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return int(config["head_dim"] * share)


def llama3_rope(config: dict[str, Any], factors: np.ndarray, where: str) -> None:
    """Puts into config.json the llama3 scaling that gave these factors [head_dim / 2]. Raises
    UserError if none did.

    GGUF keeps the factors alone, so the released models' parameters are tried, then those that a
    line through the pairs between the two borders gives.
    """
    theta, head_dim = config["rope_theta"], config["head_dim"]
    for rope in [*_released(), *_solved(factors, theta, head_dim)]:
        guess = llama3_factors(rope, theta, head_dim)
        if guess.shape == factors.shape and np.allclose(guess, factors, rtol=1e-5):
            config["rope_scaling"] = rope
            config["rope_parameters"] = rope | {"rope_theta": theta}
            return
    raise UserError(
        f"{where}: its {ROPE_FACTORS} are not those of a llama3 rope scaling; download another "
        "conversion of the model"
    )


def _released() -> Iterator[dict[str, Any]]:
    for factor in (8.0, 32.0, 4.0, 16.0, 2.0):
        for original in (8192, 4096, 2048):
            yield _llama3(factor, 1.0, 4.0, original)


def _llama3(factor: float, low: float, high: float, original: int) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _solved(factors: np.ndarray, theta: float, head_dim: int) -> Iterator[dict[str, Any]]:
    """The scaling by its formula. Between the borders, how much of a frequency is kept grows in a
    straight line with it: two pairs there give both borders, in tokens. Any length will do for the
    original one, as only its ratios to the borders count; it is taken to be a power of two."""
    factor = decimal(float(factors.max(initial=1.0)))
    between = (factors > 1.0001) & (factors < 0.9999 * factor)
    if factors.shape != (head_dim // 2,) or between.sum() < 2:
        return
    frequency = theta ** (-np.arange(0, head_dim, 2)[between] / head_dim) / (2 * math.pi)
    kept = (1 / factors[between].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    slope, start = np.polyfit(frequency, kept, 1)
    if slope <= 0 or start >= 0:
        return
    longest, shortest = -slope / start, slope / (1 - start)
    original = 2 ** round(math.log2(longest))
    low, high = (float(f"{original / tokens:.6g}") for tokens in (longest, shortest))
    yield _llama3(factor, low, high, original)


def llama3_factors(rope: Mapping[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """float32 [head_dim / 2] by which frequencies are divided (Llama 3.1)."""
    out = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        out.append(1 / ((1 - smooth) / factor + smooth))
    return np.asarray(out, np.float32)


def rope_factors(config: Mapping[str, Any]) -> np.ndarray | None:
    """The factors that a file has beside its metadata, float32 [pairs]; None without any. Raises
    UserError for those that no reader finds the scaling in."""
    rope = config.get("rope_parameters") or {}
    if "global_head_dim" in config:
        return proportional_factors(config)
    if rope.get("rope_type") == "llama3":
        factors = llama3_factors(rope, config["rope_theta"], config["head_dim"])
        try:
            llama3_rope(dict(config), factors, "")
        except UserError:
            raise UserError(
                "model.rope_scaling: too few pairs of a head lie between the borders of this "
                "'llama3' for its values to be found again in a GGUF file, which keeps only one "
                "factor for each pair; export to a Hugging Face folder instead"
            ) from None
        return factors
    return None


def proportional_factors(config: Mapping[str, Any]) -> np.ndarray:
    """float32 [global_head_dim / 2] by which llama.cpp divides the rotations of global layers.
    Raises UserError for scaling that these do not express."""
    rope, pairs = config["rope_parameters"][GLOBAL], config["global_head_dim"] // 2
    if rope["rope_type"] not in ("default", "proportional"):
        raise UserError(
            f"model.rope_scaling: GGUF has no {rope['rope_type']!r} for Gemma 4; export to a "
            "Hugging Face folder instead"
        )
    rotated = int(rope.get("partial_rotary_factor", 1.0) * pairs)
    values = np.full(pairs, NOT_ROTATED, np.float32)
    values[:rotated] = rope.get("factor") or 1.0
    return values


def proportional_rope(config: dict[str, Any], values: np.ndarray, where: str) -> None:
    """Puts into config.json the rotations of Gemma 4's global layers with these factors. Raises
    UserError for others than `proportional_factors` gives."""
    rotated = int((values < NOT_ROTATED / 10).sum())
    factor, pairs = float(values[0]), config["global_head_dim"] // 2
    if not rotated or np.any(values[:rotated] != factor) or len(values) != pairs:
        raise UserError(f"{where}: its factors of rotations are not those of a Gemma 4")
    if rotated < pairs or factor != 1.0:
        config["rope_parameters"][GLOBAL] |= {
            "rope_type": "proportional",
            "partial_rotary_factor": rotated / pairs,
            **({"factor": factor} if factor != 1.0 else {}),
        }
