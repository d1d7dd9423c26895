"""Values of each question of a benchmark, from what the harness writes of it.

    {"samples": {task: [{"doc_hash", "prompt_hash", "arguments", "resps", "target", "acc", ...}]}}

Beside the harness's own figures there is the number of bits per byte of the right answer: with few
questions, or a small model, it says more than the share of right answers.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmwright.errors import UserError

BITS = "bits_per_byte"

Question = tuple[str, int]
"""Hash of a question, and which of those that are equal."""


def read_answers(path: Path) -> dict[str, Any]:
    """The file that `eval --tasks --out` wrote. Raises UserError for any other."""
    try:
        details = json.loads(path.read_text(encoding="utf-8"))
        for samples in details["samples"].values():
            for sample in samples:
                _ = sample["doc_hash"], sample["prompt_hash"], sample["filter"], sample["metrics"]
    except FileNotFoundError:
        raise UserError(f"{path}: is not there") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(
            f"{path}: no answers to benchmarks; `lmwright eval MODEL --tasks ... --out FILE` "
            "writes them"
        ) from None
    return dict(details)


def questions_of(samples: list[dict[str, Any]]) -> dict[Question, list[dict[str, Any]]]:
    """Samples by their questions: one of each filter of the answers."""
    seen: dict[tuple[str, str], int] = {}
    found: dict[Question, list[dict[str, Any]]] = {}
    for sample in samples:
        key = str(sample["doc_hash"]), str(sample["filter"])
        count = seen[key] = seen.get(key, -1) + 1
        found.setdefault((key[0], count), []).append(sample)
    return found


def values_of(samples: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """(metric, value) of one question, where the value is a number."""
    for sample in samples:
        for metric in sample["metrics"]:
            value = sample.get(metric)
            if isinstance(value, bool | int | float):
                yield metric_name(metric, str(sample["filter"])), float(value)
    if (bits := right_bits(samples[0])) is not None:
        yield BITS, bits


def is_mean(details: Mapping[str, Any], task: str, name: str, values: Sequence[float]) -> bool:
    """True for a figure of a task that is the mean of its questions' values: perplexities and
    correlations are not."""
    if name == BITS:
        return True
    of_task = details.get("results", {}).get(task, {})
    figures = {metric_name(*key.split(",", 1)): of_task[key] for key in of_task if "," in key}
    figure = figures.get(name)
    mean = sum(values) / len(values)
    return isinstance(figure, int | float) and math.isclose(figure, mean, abs_tol=1e-6)


def metric_name(metric: str, filter_name: str) -> str:
    """A figure's name, with that of the filter that cut the answers where a task has several."""
    return metric if filter_name == "none" else f"{metric} ({filter_name})"


def right_bits(sample: Mapping[str, Any]) -> float | None:
    """Bits per byte of the right answer; None where answers are written instead of chosen."""
    answers, scored = sample.get("arguments") or (), sample.get("resps") or ()
    texts = [str(each[1]) for each in answers if len(each) == 2]
    target = sample.get("target")
    right: Any = 0 if len(texts) == 1 and len(answers) == 1 else target
    if isinstance(right, str):
        same = [i for i, text in enumerate(texts) if text.strip() == right.strip()]
        right = same[0] if same else None
    if type(right) is not int or not 0 <= right < min(len(texts), len(scored)):
        return None
    try:
        nats, size = float(scored[right][0][0]), len(texts[right].encode())
    except (TypeError, ValueError, LookupError):
        return None
    return -nats / math.log(2) / size if size else None
