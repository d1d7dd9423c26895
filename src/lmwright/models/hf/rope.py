"""Rope parameters in Hugging Face's config.json, in the form of today and the one before.

"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, ...}
"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, ...}
"""

from typing import Any

from lmwright.errors import UserError
from lmwright.nn.rope import DynamicRope, LongRope, RopeScaling

SAME = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
        "low_freq_factor", "high_freq_factor", "short_factor", "long_factor")  # fmt: skip
NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
ORIGINAL = "original_max_position_embeddings"
BESIDE = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate", ORIGINAL,
    "finetuned",  # whether training went on with it: nothing that is computed
}  # fmt: skip


def rope_fields(config: dict[str, Any], where: str, partial: bool = False) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, as plain values, of a config.json at `where`; with
    `partial` also `rotary_fraction`. Raises UserError for what is not computed."""
    said = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(said, dict):
        raise UserError(f"{where}: rope_scaling is not an object; download it again")
    said = dict(said)
    theta = said.get("rope_theta") or config.get("rope_theta") or 10_000.0
    part = said.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    for name, value in (("rope_theta", theta), ("partial_rotary_factor", part)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{where}: {name} = {value!r} is not a number; correct it")
    if part != 1.0 and not partial:
        raise UserError(f"{where}: partial_rotary_factor is not computed for this architecture")
    scaling = _scaling(said, config, where)
    found = {"rope_theta": float(theta), "rope_scaling": scaling}
    if scaling and scaling["kind"] == "dynamic":  # there, the context length is the original one
        found["seq_len"] = int(scaling["original_seq_len"] * scaling["factor"])
    return found | ({"rotary_fraction": float(part)} if partial else {})


def _scaling(said: dict[str, Any], config: dict[str, Any], where: str) -> dict[str, Any] | None:
    kind = said.get("rope_type") or said.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # its first name
    said = {name: value for name, value in said.items() if value is not None}
    if kind == "default":
        return None
    if kind not in NEEDED:
        raise UserError(
            f"{where}: rope scaling {kind!r} is not supported; these are: {', '.join(NEEDED)}"
        )
    if unknown := sorted(set(said) - {*SAME, *BESIDE}):
        raise UserError(f"{where}: rope scaling has {', '.join(unknown)}, which is not computed")
    if missing := [name for name in NEEDED[kind] if name not in said]:
        raise UserError(f"{where}: rope scaling {kind!r} lacks {', '.join(missing)}; add them")
    found: dict[str, Any] = {"kind": kind} | {name: said[name] for name in SAME if name in said}
    if kind == "linear":
        return found
    context = config.get("max_position_embeddings") or 0
    original = context if kind == "dynamic" else config.get(ORIGINAL) or said.get(ORIGINAL)
    found["original_seq_len"] = original or context
    if kind in ("yarn", "longrope"):
        found.setdefault("factor", max(1.0, context / max(1, found["original_seq_len"])))
    if kind == "yarn" and not said.get("truncate", True):
        found["borders"] = "exact"
    return found


def rope_config(
    theta: float, scaling: RopeScaling | None, seq_len: int, fraction: float | None = None
) -> dict[str, Any]:
    """The keys of config.json that say the same, in both forms, and the context length."""
    said: dict[str, Any] = {"rope_type": scaling.kind if scaling else "default"}
    said |= {n: v for n in SAME if (v := getattr(scaling, n, None)) is not None}
    said = {n: list(v) if isinstance(v, tuple) else v for n, v in said.items()}
    config: dict[str, Any] = {"max_position_embeddings": seq_len, "rope_theta": theta}
    if fraction is not None:
        said["partial_rotary_factor"] = config["partial_rotary_factor"] = fraction
    if isinstance(scaling, DynamicRope):
        config["max_position_embeddings"] = scaling.original_seq_len  # what it is over there
    elif original := getattr(scaling, "original_seq_len", None):
        said[ORIGINAL] = original
    if getattr(scaling, "borders", "whole") == "exact":
        said["truncate"] = False
    if isinstance(scaling, LongRope):
        config[ORIGINAL] = scaling.original_seq_len
    config["rope_parameters"] = {**said, "rope_theta": theta}
    return config | ({"rope_scaling": {**said}} if scaling else {})
