"""Adapters combined into one, as `peft.add_weighted_adapter` does (PEFT's merging guide).

    linear        factors added, each weighted by the root of its share: fast, inexact
    cat           ranks side by side: exact, and as wide as all together
    svd           the sum of the products, cut to a rank again
    ties          small values dropped, signs put to the vote (https://arxiv.org/abs/2306.01708)
    dare-linear   values dropped at random, the others scaled up
    dare-ties     both (https://arxiv.org/abs/2311.03099)

The `-svd` forms of the last three do it to the products instead of the factors. All is linear
algebra on the host, in float32.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np

from lmwright.errors import UserError
from lmwright.formats.peft_experts import parameter_of
from lmwright.formats.peft_folder import PeftFolder, PeftModule, make_config
from lmwright.formats.peft_names import by_parameters
from lmwright.formats.safetensors import some

Method = Literal[
    "linear", "cat", "svd", "ties", "dare-linear", "dare-ties", "ties-svd", "dare-linear-svd",
    "dare-ties-svd",
]  # fmt: skip
METHODS: tuple[str, ...] = Method.__args__
SPARSE = ("ties", "dare")

Mix = Callable[[Sequence[np.ndarray], Sequence[float]], np.ndarray]


@dataclass(frozen=True)
class Combination:
    """Settings of the combination of adapters."""

    method: Method = "svd"
    density: float = 1.0
    """Fraction of values that ties and dare keep."""
    rank: int | None = None
    """Rank after an svd; the largest of the adapters if unset."""
    sign: Literal["total", "frequency"] = "total"
    """Way in which ties votes on signs: by sums, or by counts."""
    seed: int = 0
    """Seed of what dare drops."""


def combine(
    adapters: Sequence[PeftFolder], weights: Sequence[float], combination: Combination
) -> PeftFolder:
    """One adapter made of several on the same base. A module that some lack is made of the others.

    Raises UserError for weights, ranks or settings that do not fit the method.
    """
    _check(adapters, weights, combination)
    rng = np.random.default_rng(combination.seed)
    names = dict.fromkeys(name for adapter in adapters for name in adapter.modules)
    modules = {}
    for name in names:
        having = [
            (adapter.modules[name], weight)
            for adapter, weight in zip(adapters, weights, strict=True)
            if name in adapter.modules
        ]
        modules[name] = _combined(
            name, [m for m, _ in having], [w for _, w in having], combination, rng
        )
    # the scale is in the factors, so that alpha is the rank
    alphas = {name: float(module.rank) for name, module in modules.items()}
    base = adapters[0].config.get("base_model_name_or_path") or ""
    config = make_config(modules, base, alphas, **_common_keys(adapters))
    made = PeftFolder(config, modules, _whole(adapters))
    endings = tuple(f".{t}" for a in adapters for t in a.config.get("target_parameters") or ())
    lost = [name for name in modules if f".{parameter_of(name)}".endswith(endings)]
    return by_parameters(made, alphas, lost) if lost else made


def _common_keys(adapters: Sequence[PeftFolder]) -> dict[str, Any]:
    """Keys of adapter_config.json that the combination keeps: the task, by which PEFT chooses its
    class, and the targets, which may name only the text model beside a vision tower."""
    common: dict[str, Any] = {}
    task, *others = (adapter.config.get("task_type") for adapter in adapters)
    if all(other == task for other in others):
        common["task_type"] = task
    targets = [adapter.config.get("target_modules") for adapter in adapters]
    if all(map(_is_list_of_names, targets)):
        common["target_modules"] = sorted(set(chain.from_iterable(targets)))
    return common


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _whole(adapters: Sequence[PeftFolder]) -> dict[str, np.ndarray]:
    """Weights of the base that the adapters are saved with. Raises UserError where they differ
    between adapters."""
    weights: dict[str, np.ndarray] = {}
    for adapter in adapters:
        for name, weight in adapter.whole.items():
            if not np.array_equal(weights.setdefault(name, weight), weight):
                raise UserError(f"the adapters have different {name}; their bases differ")
    return weights


def _check(
    adapters: Sequence[PeftFolder], weights: Sequence[float], combination: Combination
) -> None:
    if any(adapter.stacked for adapter in adapters):
        raise UserError(
            "adapters: factors of target_parameters, of gpt-oss's experts, are not combined; merge "
            "one after the other into the base with lmwright adapters merge"
        )
    if combination.method not in METHODS:
        raise UserError(f"method: {combination.method!r} is not one of {', '.join(METHODS)}")
    if len(adapters) != len(weights) or not adapters:
        raise UserError(
            f"weights: {len(weights)} for {len(adapters)} adapters; give one per adapter"
        )
    if not np.isfinite(weights).all():
        raise UserError(f"weights: {', '.join(map(str, weights))} must be finite numbers")
    if not 0 <= combination.density <= 1 or (
        combination.density == 0 and combination.method.startswith("dare")
    ):
        raise UserError(f"density: {combination.density} is not a fraction between 0 and 1")
    if combination.density != 1 and not combination.method.startswith(SPARSE):
        raise UserError(f"density: has no effect on {combination.method!r}; remove it")
    if combination.rank is not None and not combination.method.endswith("svd"):
        raise UserError(f"rank: has no effect on {combination.method!r}; remove it or use an svd")
    if combination.sign != "total" and "ties" not in combination.method:
        raise UserError(f"sign: has no effect on {combination.method!r}; remove it")
    if combination.seed and not combination.method.startswith("dare"):
        raise UserError(f"seed: has no effect on {combination.method!r}; remove it")
    if starts := sorted({adapter.start for adapter in adapters if adapter.start}):
        raise UserError(
            f"adapters that began as {' or '.join(starts)} can be added only together with their "
            "base; save them again with PEFT's path_initial_model_for_weight_conversion, or merge "
            "each"
        )
    if any(m.magnitude is not None for adapter in adapters for m in adapter.modules.values()):
        raise UserError("DoRA adapters cannot be added; merge each into the base instead")
    for adapter in adapters:
        if adapter.saved:
            raise UserError(
                f"adapters with weights of their own ({some(sorted(adapter.saved))}) cannot be "
                "added; merge each into the base instead"
            )
    bases = {adapter.config.get("base_model_name_or_path") for adapter in adapters}
    if len(bases) > 1:
        raise UserError(f"the adapters are for several bases: {', '.join(map(str, bases))}")


def _combined(
    name: str,
    modules: Sequence[PeftModule],
    weights: Sequence[float],
    combination: Combination,
    rng: np.random.Generator,
) -> PeftModule:
    shapes = {(m.a.shape[1], m.b.shape[0]) for m in modules}
    if len(shapes) > 1:
        raise UserError(f"{name}: has different dimensions in another adapter; their bases differ")
    table = modules[0].is_table
    if combination.method == "cat":
        a = np.concatenate([m.a * w * m.scale for m, w in zip(modules, weights, strict=True)])
        return PeftModule(a, np.concatenate([m.b for m in modules], axis=1), 1.0, None, table)
    mix = _mixer(combination, rng)
    if combination.method.endswith("svd"):
        rank = combination.rank or max(m.rank for m in modules)
        a, b = _cut(mix([m.delta for m in modules], weights), rank)
        return PeftModule(a, b, 1.0, None, table)
    if len({m.rank for m in modules}) > 1:
        cure = {"linear": "cat or svd"}.get(combination.method, f"{combination.method}-svd")
        raise UserError(f"{name}: {combination.method!r} needs adapters of one rank; use {cure}")
    shares = [w * m.scale for m, w in zip(modules, weights, strict=True)]
    roots = [math.sqrt(abs(share)) for share in shares]
    a = mix(
        [m.a for m in modules], [math.copysign(r, s) for r, s in zip(roots, shares, strict=True)]
    )
    return PeftModule(a, mix([m.b for m in modules], roots), 1.0, None, table)


def _cut(delta: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    u, s, vh = np.linalg.svd(delta, full_matrices=False)
    return vh[:rank], u[:, :rank] * s[:rank]


def _mixer(combination: Combination, rng: np.random.Generator) -> Mix:
    method = combination.method.removesuffix("-svd")
    if method in ("linear", "svd"):
        return weighted_sum
    drop = partial(keep_random, density=combination.density, rng=rng)
    if method == "dare-linear":
        return lambda values, weights: weighted_sum([drop(v) for v in values], weights)
    prune = drop if method == "dare-ties" else partial(keep_largest, density=combination.density)
    return lambda values, weights: elected([prune(v) for v in values], weights, combination.sign)


def weighted_sum(values: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Sum of arrays times their weights."""
    return sum(np.float32(w) * v for v, w in zip(values, weights, strict=True))


def keep_largest(values: np.ndarray, density: float) -> np.ndarray:
    """The `share` of values with the largest magnitudes, zeros elsewhere."""
    if density >= 1:
        return values
    out = np.zeros(values.size, values.dtype)
    top = np.argsort(-np.abs(values), axis=None, kind="stable")[: int(density * values.size)]
    out[top] = values.reshape(-1)[top]
    return out.reshape(values.shape)


def keep_random(values: np.ndarray, density: float, rng: np.random.Generator) -> np.ndarray:
    """Keeps each value with the probability `density`, divided by it; zeros elsewhere."""
    if density >= 1:
        return values
    return np.where(rng.random(values.shape) < density, values / np.float32(density), 0)


def elected(values: Sequence[np.ndarray], weights: Sequence[float], sign: str) -> np.ndarray:
    """Weighted mean of the values that have the sign of the majority."""
    stacked = np.stack(values)
    votes = stacked.sum(0) if sign == "total" else np.sign(stacked).sum(0)
    agree = np.sign(stacked) == np.where(votes >= 0, 1, -1)
    shares = np.asarray(weights, np.float32).reshape(-1, *[1] * (stacked.ndim - 1))
    return (stacked * shares * agree).sum(0) / np.maximum(agree.sum(0), 1)
