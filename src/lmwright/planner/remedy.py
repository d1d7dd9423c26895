"""Remedy: the change to a run by which the analytic model gains most."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmwright.planner.advice import MEMORY, TIE_SHARE, Advice, bound_of
from lmwright.planner.analytic.candidates import Candidate, candidates
from lmwright.planner.analytic.quick import Quick


def advise(quick: Quick, by_kind: Mapping[str, float], by_part: Mapping[str, float]) -> Advice:
    """Advice for a run that fits: the resource that bounds it, and the fastest other configuration
    on this machine."""
    advice = bound_of(by_kind, by_part)
    best = next(iter(candidates(quick.run, quick.machine)), None)
    gain = quick.step_s / best.quick.step_s if best and best.quick.fits else 0.0
    if gain < 1 + TIE_SHARE:
        return replace(advice, overrides=())
    return replace(advice, **_change(quick, best), gain=gain)


def _change(quick: Quick, best: Candidate) -> dict[str, Any]:
    machine = best.quick.machine
    return {
        "overrides": best.overrides,
        "changes_training": best.changes_training,
        "harm": best.harm_text,
        "on": None if machine.name == quick.machine.name else machine.name,
        "step_s": best.quick.step_s,
        "close": best.quick.is_close,
    }


def too_large(
    parts: Mapping[str, float], limit_bytes: float, quick: Quick, best: Candidate | None
) -> Advice:
    """Advice for a run that does not fit, with the configuration that does, possibly on another
    machine."""
    part, whole = max(parts, key=parts.get), sum(parts.values())
    advice = Advice(
        bound=MEMORY, share=whole / limit_bytes, part=part, part_share=parts[part] / whole
    )
    return advice if best is None else replace(advice, **_change(quick, best))
