"""LoRA: adapters of a run, their weights as Params, and how they join the frozen base.

    run.lora --resolved--> ResolvedAdapter --spec--> {path: {"a": Param, "b": Param, ...}}
    base, weights of one adapter --bind--> tree whose targets are `Lora` leaves

An adapter's weights are a tree of Params like a model's, so that init, sharding, optimizers and
checkpoints treat them as any others. What the objective begins afresh (`new_weights`, the head of a
classifier) and what `lora.whole` names are no part of the base: each adapter trains them whole, as
PEFT's `modules_to_save`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.config.run import Run
from lmwright.core.leaves import Lora, Storage, column_norms, merge
from lmwright.core.param import Param, Tree, at, init_weights, nest, path_key, walk
from lmwright.core.quantize import quantize, stored_spec
from lmwright.errors import UserError
from lmwright.models.counts import part_of
from lmwright.program.lora_section import SMALL, Adapter, LowRank
from lmwright.program.targets import by_target, choose, frozen_spec, whole_names
from lmwright.program.trainee import Trainee, num_steps, spec_of

NARROW = ("attention", "mlp", "experts")  # what integers hold; a router stays as it is
WHOLE = "whole"
SCALE = "scale"  # of integers that a run with [qat] trains beside the factors
LISTED = "lora.adapters"


@dataclass(frozen=True)
class Module:
    """One targeted matrix: the rank of its sum and what it is scaled by."""

    path: str
    param: Param
    rank: int
    alpha: float
    scale: float


@dataclass(frozen=True, eq=False, kw_only=True)
class ResolvedAdapter(Trainee):
    """One adapter of a run with everything that follows from the run; its spec has, for each
    target, `a`, `b` and, for DoRA, `magnitude`, and `whole`."""

    modules: tuple[Module, ...]
    variant: str
    whole: Tree
    """Weights that it trains whole, as Params."""

    @cached_property
    def by_path(self) -> dict[str, Module]:
        return {module.path: module for module in self.modules}


def section_of(run: Run) -> LowRank:
    """The section [lora] of a run that has one."""
    assert run.lora is not None
    return run.lora


def resolved(run: Run) -> tuple[ResolvedAdapter, ...]:
    """The adapters of a run, in order. Raises UserError for targets, ranks, rows or settings of
    `train` that do not fit."""
    lora = section_of(run)
    lora.refuse(run)  # one made in Python may be unchecked
    rows = lora.rows_of(run.train.global_batch_size)
    return tuple(_resolved(run, adapter, rows[adapter.name]) for adapter in lora.listed)


def only(run: Run, active: Sequence[Trainee]) -> Run:
    """A run of these adapters alone, each with the rows that it has in `run`."""
    lora, rows = section_of(run), {adapter.name: adapter.rows for adapter in active}
    left = [
        replace(adapter, rows=rows[adapter.name])
        for adapter in lora.adapters
        if adapter.name in rows
    ]
    train = replace(run.train, global_batch_size=sum(rows.values()))
    return replace(run, lora=replace(lora, adapters=tuple(left)), train=train)


def _resolved(run: Run, adapter: Adapter, rows: int) -> ResolvedAdapter:
    lora, optim = section_of(run), run.optim
    optim = replace(
        optim,
        learning_rate=adapter.learning_rate or optim.learning_rate,
        schedule=adapter.schedule or optim.schedule,
    )
    modules, whole = _modules(run, adapter), whole_spec(run)
    return ResolvedAdapter(
        name=adapter.name,
        spec=nest((m.path, module_spec(m, lora.variant) | scale_spec(run, m)) for m in modules)
        | whole,
        data=adapter.data or run.data.dir,
        rows=rows,
        steps=adapter.steps or num_steps(run),
        optim=optim,
        modules=modules,
        variant=lora.variant,
        whole=whole,
        head_flops=_head_flops(run, whole),
        dropout=lora.dropout_of(adapter),
        patience=adapter.patience,
        init_from=adapter.init_from,
    )


def _modules(run: Run, adapter: Adapter) -> tuple[Module, ...]:
    lora = section_of(run)
    refuse_ternary(run, adapter)
    targets = choose(run.model, frozen_spec(run), lora.targets)
    ranks = by_target(targets, adapter.rank or lora.rank, lora.ranks, "lora.ranks")
    alphas = by_target(targets, adapter.alpha or lora.alpha, lora.alphas, "lora.alphas")
    modules = []
    sizes = {t.path: min(t.param.matrix_shape) for t in targets}
    _refuse_large(ranks, sizes, "lora.rank" if adapter.rank is None else _place(lora, adapter))
    for target in targets:
        rank, alpha = ranks[target.path], alphas[target.path]
        if lora.variant == "dora" and "vocab" in target.param.axes:
            raise UserError(
                f'lora.variant: "dora" does not work on {target.path}; target the layers'
            )
        scale = alpha / (rank if lora.scaling == "rank" else rank**0.5)
        modules.append(Module(target.path, target.param, rank, alpha, scale))
    return tuple(modules)


def _place(lora: LowRank, adapter: Adapter) -> str:
    """The field with an adapter's own rank."""
    return f"lora.adapters.{[each.name for each in lora.adapters].index(adapter.name)}.rank"


def _refuse_large(ranks: Mapping[str, int], sizes: Mapping[str, int], field: str) -> None:
    """Raises UserError for ranks above the smaller dimension of their matrices, by path; `field`
    says the rank of all."""
    narrow = {path: size for path, size in sizes.items() if ranks[path] > size}
    if not narrow:
        return
    path, size = next(iter(narrow.items()))
    cure = f"use at most {min(narrow.values())}"
    if len(narrow) < len(sizes):
        own = {path.rpartition(".")[2]: size for path, size in narrow.items()}
        alone = " and ".join(f"lora.ranks.{name} = {size}" for name, size in own.items())
        cure = f"set {alone}, or {cure} for all"
    raise UserError(
        f"{field}: {ranks[path]} is more than the {size} dimensions of {path}, so it saves "
        f"nothing; {cure}"
    )


def refuse_ternary(run: Run, adapter: Adapter) -> None:
    """Raises UserError for settings that a model with ternary weights has no use for: its adapters
    are rounded with their base."""
    lora = section_of(run)
    if not any(param.ternary for _, param in walk(frozen_spec(run))):
        return
    if lora.base in SMALL:
        raise UserError(
            f"lora.base: {lora.base} would round the weights of a {run.model.kind!r} model before "
            'they are made ternary; use "bf16" or "fp32"'
        )
    if lora.dropout_of(adapter):
        raise UserError(
            f"lora.dropout: an adapter of a {run.model.kind!r} model is rounded with its base and "
            "has no inputs of its own; leave it out"
        )


def whole_spec(run: Run) -> Tree:
    """The weights that each adapter trains whole, as Params."""
    whole = whole_names(run)
    return {k: tree for k, tree in spec_of(run).items() if k in whole}


def _head_flops(run: Run, whole: Tree) -> int:
    """FLOPs of a token for the gradient of a head in `lora.whole`, or of a table that is it."""
    tied = getattr(run.model, "head", "") == "tied" and not run.objective.new_weights
    matrices = [param for _, param in walk(whole) if param.is_matrix]
    return 2 * sum(p.size for p in matrices if "vocab" in (p.axes if tied else p.outputs))


def module_spec(module: Module, variant: str) -> dict[str, Param]:
    """Params of one target's adapter, derived from its arrow."""
    param, rank = module.param, module.rank
    nb, ni = len(param.batch), len(param.inputs)
    batch, inputs, outputs = (" ".join(n) for n in (param.batch, param.inputs, param.outputs))
    shape = param.shape
    stacked, inner, outer = shape[:nb], shape[nb : nb + ni], shape[nb + ni :]
    # variance of PEFT's uniform start, so that rates carry over; a table starts the other way
    table = "vocab" in param.inputs
    first: dict[str, Any] = {"fill": 0.0} if table else {"std": (3 * param.matrix_shape[0]) ** -0.5}
    second: dict[str, Any] = {"std": 1.0} if table else {"fill": 0.0}
    spec = {
        "a": Param(f"[{batch}] {inputs} -> rank", (*stacked, *inner, rank), **first),
        "b": Param(f"[{batch}] rank -> {outputs}", (*stacked, rank, *outer), **second),
    }
    if variant == "dora":
        spec["magnitude"] = Param(f"[{batch}] {outputs}", (*stacked, *outer), fill=1.0)
    return spec


def scale_spec(run: Run, module: Module) -> dict[str, Param]:
    """Param of the scales of one target's integers, in a run with [qat]."""
    if run.qat is None:
        return {}
    param, (inputs, _) = module.param, module.param.matrix_shape
    nb, ni = len(param.batch), len(param.inputs)
    axes = f"{param.inputs[0]} {' '.join(param.outputs)}"
    shape = (*param.shape[:nb], inputs // (run.qat.group or inputs), *param.shape[nb + ni :])
    return {SCALE: Param(f"[{' '.join(param.batch)}] {axes}", shape, fill=1.0)}


def init_adapter(adapter: ResolvedAdapter, base: Tree, key: Array) -> Tree:
    """Fresh float32 weights that leave the model as it is; traceable."""
    leaves, modules = dict(walk(base)), []
    for module in adapter.modules:
        spec = module_spec(module, adapter.variant)
        made = {
            name: param.make(path_key(key, f"{module.path}.{name}")) for name, param in spec.items()
        }
        if "magnitude" in made:
            made["magnitude"] = column_norms(_leaf(leaves[module.path], module.param, made))
        modules.append((module.path, made))
    # those of a run without adapters
    return nest(modules) | init_weights(adapter.whole, key)


def base_spec(run: Run) -> Tree:
    """The frozen weights as they are stored: Params, and leaves of Params."""
    return nest((path, stored_spec(param, storage)) for path, param, storage in _storages(run))


def stored(run: Run, w: Tree) -> Tree:
    """A model's weights as `lora.base` keeps them; traceable."""
    leaves = dict(walk(w))
    return nest((path, quantize(leaves[path], p, compute)) for path, p, compute in _storages(run))


def storages(run: Run) -> dict[str, Storage]:
    """Storage of each weight of the base: integers hold the matrices of the layers."""
    return {path: storage for path, _, storage in _storages(run)}


def _storages(run: Run) -> list[tuple[str, Param, Storage]]:
    kind = section_of(run).base
    small: Storage = "bf16" if kind in SMALL else kind

    def storage(param: Param) -> Storage:
        if param.balance_rate is not None:  # rounded, it would send tokens to other experts
            return "fp32"
        if kind == "mxfp4" and "experts" not in param.batch:
            return small
        return kind if param.is_matrix and part_of(param) in NARROW else small

    return [(path, param, storage(param)) for path, param in walk(frozen_spec(run))]


def scaled(adapter: ResolvedAdapter, weights: Tree) -> dict[str, dict[str, Array]]:
    """An adapter's arrays by path, with the scale in `b`; those that are trained whole as
    `whole`."""
    scaled = {path: {WHOLE: at(weights, path)} for path, _ in walk(adapter.whole)}
    for path, module in adapter.by_path.items():
        part = dict(at(weights, path))
        scaled[path] = part | {"b": part["b"] * module.scale}
    return scaled


def bind(
    params: Mapping[str, Param],
    base: Tree,
    parts: Mapping[str, Mapping[str, Array]],
    key: Array | None = None,
    dropout: Array | float | None = None,
) -> Tree:
    """The base with `Lora` leaves at the paths of `parts` (see `scaled`), and the weights that are
    whole in them.

    `params` are the targets' own. With typed keys [A], one for each of the microbatches that are
    computed at once, `dropout` of the inputs of `a` is dropped.
    """

    def join(path: str, leaf: Any) -> Any:
        if path not in parts:
            return leaf
        drop = {}
        if key is not None and dropout is not None:
            own = jax.vmap(lambda key: path_key(key, path))
            drop = _dropout(params[path], own(key), dropout)
        return _leaf(leaf, params[path], parts[path], **drop)

    whole = ((path, part[WHOLE]) for path, part in parts.items() if WHOLE in part)
    return nest((*((path, join(path, leaf)) for path, leaf in walk(base)), *whole))


def _leaf(base: Any, param: Param, part: Mapping[str, Array], **drop: Any) -> Lora:
    sides = {"inputs": len(param.inputs), "outputs": len(param.outputs)}
    return Lora(base, part["a"], part["b"], part.get("magnitude"), **drop, **sides)


def _dropout(param: Param, key: Array, rate: Array | float) -> dict[str, Array]:
    """Keys [A] and the rate of a leaf, or those of each layer of the stack."""
    if param.batch[:1] != ("layers",):
        return {"key": jax.random.key_data(key), "dropout": jnp.asarray(rate, jnp.float32)}
    layers = param.shape[0]
    keys = jax.vmap(partial(jax.random.split, num=layers), out_axes=1)(key)
    return {"key": jax.random.key_data(keys), "dropout": jnp.full(layers, rate, jnp.float32)}


def merged(adapter: ResolvedAdapter, base: Tree, weights: Tree) -> Tree:
    """float32 weights of the model with one adapter in them; traceable."""
    params = {module.path: module.param for module in adapter.modules}
    bound = bind(params, base, scaled(adapter, weights))
    return nest((path, merge(leaf)) for path, leaf in walk(bound))
