"""verify: are two models the same? Any two of run directory, Hugging Face folder, GGUF file, hub
name.

tensors    by Hugging Face name, in float32: how many are equal, how far the others are apart
logits     on fixed prompts, float32
tokenizer  the same ids for texts on which tokenizers differ
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmwright.core.param import count_params
from lmwright.data.json_text import json_value
from lmwright.data.tokens.probe import PROBE
from lmwright.errors import UserError
from lmwright.formats.gguf_falcon import folded
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.proof import (
    ALIKE,
    OF_TRAINING,
    TOLERANCE,
    Agreement,
    agreement,
    differences,
    logits,
    proof_tokens,
    sentence,
)
from lmwright.formats.reference import too_large
from lmwright.formats.safetensors import some
from lmwright.guard.terminal import visible


@dataclass(frozen=True)
class TensorDiff:
    """Tensors of two models by name."""

    compared: int
    equal: int
    """Compared tensors of which every value is the same in float32."""
    worst: str | None
    """Name of the tensor with the largest difference, if any differs."""
    max_abs_diff: float
    max_relative: float
    """Largest difference over the tensor's own largest value."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    other_shape: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison of two models."""

    a: str
    b: str
    same: bool
    tolerance: float
    """Tolerance of the logits, over the largest; of tensors, where logits cannot be had."""
    config: dict[str, tuple[Any, Any]]
    """Fields of the model that differ."""
    tensors: TensorDiff
    logits: Agreement | None
    why_no_logits: str | None
    tokenizer: str

    def lines(self) -> list[str]:
        """The comparison as text."""
        t = self.tensors
        lines = [f"config: {name} is {x!r} and {y!r}" for name, (x, y) in self.config.items()]
        lines.append(f"tensors: {t.equal} of {t.compared} equal")
        if t.worst:
            lines[-1] += f"; {t.worst} differs most, by {t.max_abs_diff:.2e} ({t.max_relative:.1e})"
        for what, names in (
            ("only in the first", t.only_a),
            ("only in the second", t.only_b),
            ("of another shape", t.other_shape),
        ):
            if names:
                lines.append(f"{what}: {some(names)}")
        distance = sentence(self.logits) if self.logits else f"not compared, {self.why_no_logits}"
        lines += [f"logits: {distance}", f"tokenizer: {self.tokenizer}"]
        return [*lines, f"the same within {self.tolerance:g}" if self.same else "NOT the same"]


def verify(a: str | Path, b: str | Path, *, tolerance: float = TOLERANCE) -> Verdict:
    """Compares two models; they are the same where they have the same fields, their logits
    differ by at most `tolerance` of the largest and their tokenizers, where both have one, give
    the same ids."""
    if not tolerance >= 0:  # NaN, too
        raise UserError(f"tolerance: {tolerance} must be at least 0")
    first, second = load_model(a), load_model(b)
    first.check(), second.check()
    # a GGUF file of a Falcon-H1 has its multipliers in the weights
    (x, of_x), (y, of_y) = (folded(each.model, each.tensors) for each in (first, second))
    tensors, config = compare(of_x, of_y), other_fields(x, y)
    tokenizer, tokenizers_agree = _tokenizers(first, second)
    distance, why = _logits(first, second)
    if distance is not None:
        close = distance.max_abs_diff <= tolerance * max(distance.max_abs_logit, 1.0)
    else:
        apart = tensors.only_a or tensors.only_b or tensors.other_shape
        close = not apart and tensors.max_relative <= tolerance
    same = bool(close and tokenizers_agree and not config)
    return Verdict(str(a), str(b), same, tolerance, config, tensors, distance, why, tokenizer)


def other_fields(a: Any, b: Any) -> dict[str, tuple[Any, Any]]:
    """Fields in which two models differ, but for those about training alone."""
    fields = differences(a, b).items()
    return {name: both for name, both in fields if _matters(name, *both)}


def _matters(name: str, x: Any, y: Any) -> bool:
    """True if two values of a field are of models that compute otherwise."""
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        return any(_matters(key, x.get(key), y.get(key)) for key in {**x, **y})
    return x != y and not name.endswith(OF_TRAINING) and not (name == "kind" and {x, y} in ALIKE)


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> TensorDiff:
    """Tensors of one name against each other, one pair in memory at a time."""
    both = [name for name in a if name in b]
    equal, worst, worst_diff, worst_share, shapes = 0, None, 0.0, 0.0, []
    for name in both:
        x, y = (np.asarray(each[name]).astype(np.float32) for each in (a, b))
        if x.shape != y.shape:
            shapes.append(name)
            continue
        diff = float(np.abs(x - y).max(initial=0.0))
        if not diff > 0.0 and np.array_equal(x, y):
            equal += 1
            continue
        share = diff / max(float(np.abs(x).max(initial=0.0)), 1e-30)
        if worst is None or not share <= worst_share:
            worst, worst_diff, worst_share = name, diff, share
    return TensorDiff(
        compared=len(both),
        equal=equal,
        worst=worst,
        max_abs_diff=worst_diff,
        max_relative=worst_share,
        only_a=tuple(sorted(set(a) - set(b))),
        only_b=tuple(sorted(set(b) - set(a))),
        other_shape=tuple(shapes),
    )


def _logits(a: LoadedModel, b: LoadedModel) -> tuple[Agreement | None, str | None]:
    for each in (a, b):
        if why := too_large(count_params(each.model.spec())):
            return None, why
    tokenizer = a.tokenizer if a.tokenizer_dir else b.tokenizer if b.tokenizer_dir else None
    small = a.model if a.model.vocab_size <= b.model.vocab_size else b.model
    tokens = proof_tokens(small, tokenizer)
    tokens = tokens[:, : min(a.model.seq_len, b.model.seq_len)] % small.vocab_size
    # rows beyond the smaller vocabulary are padding
    x, y = (logits(each.model, each.load(), tokens) for each in (a, b))
    return agreement(x[..., : small.vocab_size], y[..., : small.vocab_size]), None


def _tokenizers(a: LoadedModel, b: LoadedModel) -> tuple[str, bool]:
    lacking = [str(each.path) for each in (a, b) if each.tokenizer_dir is None]
    if lacking:
        return f"not compared, {' and '.join(lacking)} has none", True
    x, y = (each.tokenizer.encode_batch(PROBE) for each in (a, b))
    wrong = sum(i != j for i, j in zip(x, y, strict=True))
    if wrong:
        return f"other ids for {wrong} of {len(PROBE)} texts", False
    return f"the same ids for {len(PROBE)} texts", True


def verify_command(a: str, b: str, *, tolerance: float = TOLERANCE, as_json: bool = False) -> int:
    """Prints what differs; returns 0 if nothing does within `tolerance`, else 1."""
    verdict = verify(a, b, tolerance=tolerance)
    if as_json:
        print(json.dumps(json_value(asdict(verdict)), indent=2))
    else:
        print(visible("\n".join(verdict.lines())))
    return 0 if verdict.same else 1
