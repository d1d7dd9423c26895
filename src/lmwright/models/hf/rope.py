"""Rope parameters in Hugging Face's config.json, in the form of today and the one before.

"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, ...}
"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, ...}
"""

import math
from collections.abc import Iterable
from typing import Any

from lmwright.errors import UserError
from lmwright.models.hf.pairs import Derived, Json, refuse_number
from lmwright.models.hf.window import TYPES
from lmwright.nn.rope import DynamicRope, LongRope, ProportionalRope, RopeScaling
from lmwright.nn.rope_scaling import yarn_length

SAME = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
        "low_freq_factor", "high_freq_factor", "short_factor", "long_factor")  # fmt: skip
NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
ORIGINAL = "original_max_position_embeddings"
BESIDE = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate", ORIGINAL,
    "finetuned",  # whether training went on with it: nothing that is computed
}  # fmt: skip


def rope_fields(config: Json, where: str, partial: bool = False) -> Json:
    """`rope_theta` and `rope_scaling`, as plain values, of a config.json at `where`; with
    `partial` also `rotary_fraction`. Raises UserError for what is not computed."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{where}: rope_scaling is not an object; download it again")
    rope = dict(rope)
    theta = first_given(rope.get("rope_theta"), config.get("rope_theta"), 10_000.0)
    told = rope.get("partial_rotary_factor"), config.get("partial_rotary_factor")
    part = first_given(*told, 1.0)
    for name, value in (("rope_theta", theta), ("partial_rotary_factor", part)):
        refuse_number(name, value, where)
    scaling = _scaling(rope, config, where)
    if scaling and scaling["kind"] == "proportional":  # which has the part in its own field
        scaling["fraction"], part = float(part), 1.0
    if part != 1.0 and not partial:
        raise UserError(f"{where}: partial_rotary_factor is not computed for this architecture")
    fields = {"rope_theta": float(theta), "rope_scaling": scaling}
    if scaling and scaling["kind"] == "dynamic":  # there, the context length is the original one
        fields["seq_len"] = int(scaling["original_seq_len"] * scaling["factor"])
    return fields | ({"rotary_fraction": float(part)} if partial else {})


def first_given(*values: Any) -> Any:
    """The first of several values that is there; 0 is one."""
    return next(value for value in values if value is not None)


def _scaling(rope: Json, config: Json, where: str) -> Json | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # its first name
    rope = {name: value for name, value in rope.items() if value is not None}
    if kind == "default":
        return None
    if kind not in NEEDED:
        raise UserError(
            f"{where}: rope scaling {kind!r} is not supported; these are: {', '.join(NEEDED)}"
        )
    if unknown := sorted(set(rope) - {*SAME, *BESIDE}):
        raise UserError(f"{where}: rope scaling has {', '.join(unknown)}, which is not computed")
    if missing := [name for name in NEEDED[kind] if name not in rope]:
        raise UserError(f"{where}: rope scaling {kind!r} lacks {', '.join(missing)}; add them")
    fields: Json = {"kind": kind} | {name: rope[name] for name in SAME if name in rope}
    if kind in ("linear", "proportional"):
        return fields
    context = config.get("max_position_embeddings") or 0
    original = context if kind == "dynamic" else config.get(ORIGINAL) or rope.get(ORIGINAL)
    fields["original_seq_len"] = original or context
    if kind in ("yarn", "longrope"):
        fields.setdefault("factor", max(1.0, context / max(1, fields["original_seq_len"])))
    if kind == "yarn" and not rope.get("truncate", True):
        fields["borders"] = "exact"
    if kind == "yarn" and _is_usual(fields):
        del fields["attention_factor"]
    return fields


def _is_usual(yarn: Json) -> bool:
    """True for an attention factor that YaRN has anyway."""
    said, factor = yarn.get("attention_factor"), yarn["factor"]
    if not (isinstance(said, int | float) and isinstance(factor, int | float) and factor > 0):
        return False
    return not yarn.get("mscale") and math.isclose(said, yarn_length(factor, 1.0))


def rope_config(
    theta: float, scaling: RopeScaling | None, seq_len: int, fraction: float | None = None
) -> Json:
    """The keys of config.json that say the same, in both forms, and the context length."""
    values: Json = {"rope_type": scaling.kind if scaling else "default"}
    values |= {n: v for n in SAME if (v := getattr(scaling, n, None)) is not None}
    values = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
    config: Json = {"max_position_embeddings": seq_len, "rope_theta": theta}
    if fraction is not None:
        values["partial_rotary_factor"] = config["partial_rotary_factor"] = fraction
    if isinstance(scaling, ProportionalRope):
        values["partial_rotary_factor"] = scaling.fraction
        if scaling.factor == 1.0:  # of which transformers warns
            del values["factor"]
    if isinstance(scaling, DynamicRope):
        config["max_position_embeddings"] = scaling.original_seq_len  # what it is over there
    elif original := getattr(scaling, "original_seq_len", None):
        values[ORIGINAL] = original
    if getattr(scaling, "borders", "whole") == "exact":
        values["truncate"] = False
    if isinstance(scaling, LongRope):
        config[ORIGINAL] = scaling.original_seq_len
    config["rope_parameters"] = {**values, "rope_theta": theta}
    return config | ({"rope_scaling": {**values}} if scaling else {})


ROPE = Derived(
    lambda config, _, where: rope_fields(config, where),
    lambda model, *_: rope_config(model.rope_theta, model.rope_scaling, model.seq_len),
)


def write_partial_rope(model: Any, *_: str) -> Json:
    """The keys of a model that rotates a part of each head."""
    return rope_config(model.rope_theta, model.rope_scaling, model.seq_len, model.rotary_fraction)


PARTIAL_ROPE = Derived(
    lambda config, _, where: rope_fields(config, where, partial=True), write_partial_rope
)


def usual_theta(theta: float) -> Derived:
    """The theta of a family where config.json does not say it, for a pair behind ROPE."""

    def read(config: Json, *_: Any) -> Json:
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        said = rope.get("rope_theta") or config.get("rope_theta")
        return {} if said else {"rope_theta": theta}

    return Derived(read)


SIDES = (TYPES["global"], TYPES["local"])


def sides_config(model: Any, thetas: Iterable[str], before: bool) -> Json:
    """Rotations by the reach of a layer; with `before` in the form before, too, whose keys are
    `thetas`."""
    config = rope_config(model.rope_theta, model.rope_scaling, model.seq_len)
    whole, theta = config["rope_parameters"], model.local_rope_theta
    local = whole if theta is None else {"rope_type": "default", "rope_theta": theta}
    config |= {"rope_parameters": dict(zip(SIDES, (whole, local), strict=True))}
    del config["rope_theta"]
    if before:
        return config | dict(zip(thetas, (model.rope_theta, theta), strict=True))
    config.pop("rope_scaling", None)
    return config


def sides_fields(config: Json, whole: Json, local: Json, where: str, joint: bool = False) -> Json:
    """Fields of the rotations of global and of local layers; with `joint` the latter have no theta
    where both rotate alike. Raises UserError for scaling of local layers."""
    context = {"max_position_embeddings": config["max_position_embeddings"]}
    fields, own = (
        rope_fields({**context, "rope_parameters": each}, where) for each in (whole, local)
    )
    if joint and own == fields:
        return {**fields, "local_rope_theta": None}
    if own["rope_scaling"] is not None:
        raise UserError(f"{where}: rope scaling of sliding_attention layers is not supported")
    return {**fields, "local_rope_theta": own["rope_theta"]}
