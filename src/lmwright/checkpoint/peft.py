"""Adapters to and from PEFT, by the same table of names and the arrows that serve models.

    our tree: layers.q.a [L, D, R]     model.layers.0.self_attn.q_proj lora_A [R, D], ...
              layers.q.b [L, R, N, H]                                  lora_B [N * H, R], ...

A rank that differs between layers over there is padded with zeros here, which stay zero.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from lmwright.adapters.lora import Module, ResolvedAdapter, module_spec, nest
from lmwright.checkpoint.layout import Slot, slots
from lmwright.checkpoint.peft_folder import PeftFolder, PeftModule, make_config, read_folder
from lmwright.checkpoint.safetensors import some
from lmwright.core.param import Tree, walk
from lmwright.errors import UserError


def module_slots(model: Any) -> dict[str, Slot]:
    """The slot of every matrix of a model, by the name PEFT gives its module."""
    return {
        slot.name.removesuffix(".weight"): slot
        for slot in slots(model)
        if slot.param.is_matrix and slot.name.endswith(".weight")
    }


def to_peft(model: Any, adapter: ResolvedAdapter, weights: Tree, base: str) -> PeftFolder:
    """The adapter as PEFT keeps it; `base` is the name or folder of the base model."""
    leaves = {path: np.asarray(leaf, np.float32) for path, leaf in walk(weights)}
    modules, alphas = {}, {}
    for name, slot in module_slots(model).items():
        if slot.path not in adapter.by_path:
            continue
        module = adapter.by_path[slot.path]
        at = lambda kind, s=slot: _layer(leaves[f"{s.path}.{kind}"], s)  # noqa: E731
        magnitude = at("magnitude").reshape(-1) if adapter.variant == "dora" else None
        a = at("a").reshape(-1, module.rank).T
        b = at("b").reshape(module.rank, -1).T
        table = module.param.inputs == ("vocab",)
        modules[name] = PeftModule(a, b, module.scale, magnitude, table)
        alphas[name] = module.alpha
    sqrt = any(m.scale != m.alpha / m.rank for m in adapter.modules)
    if sqrt and any("experts" in module.param.axes for module in adapter.modules):
        # PEFT joins the gate and up of experts into one of twice the rank and alpha, which keeps
        # alpha over rank and not alpha over its root
        sqrt, alphas = False, {name: m.scale * m.rank for name, m in modules.items()}
    config = make_config(modules, base, alphas, use_rslora=sqrt, lora_dropout=adapter.dropout)
    config["target_modules"] = _short(modules, module_slots(model))
    return PeftFolder(config, modules)


def _short(chosen: Iterable[str], known: Iterable[str]) -> list[str]:
    """Module names by their last word where it means no other module of the model."""
    last = lambda name: name.rpartition(".")[2]  # noqa: E731
    others = {last(name) for name in set(known) - set(chosen)}
    return sorted({name if last(name) in others else last(name) for name in chosen})


def _layer(leaf: np.ndarray, slot: Slot) -> np.ndarray:
    return leaf[slot.at] if slot.at else leaf


def read_adapter(folder: str | Path, model: Any, adapter: ResolvedAdapter) -> Tree:
    """float32 host weights of `adapter` from a PEFT folder.

    Raises UserError where the folder is for another base, has targets that the adapter lacks,
    or more rank than it.
    """
    found = read_folder(folder)
    known = module_slots(model)
    if strange := [name for name in found.modules if name not in known]:
        raise UserError(f"{folder}: the model has no {some(strange)}; it is for another base")
    paths = {known[name].path for name in found.modules}
    if extra := sorted(paths - adapter.by_path.keys()):
        raise UserError(
            f"{folder}: has factors for {some(extra)}, which lora.targets leaves out; add them"
        )
    specs = {m.path: module_spec(m, adapter.variant) for m in adapter.modules}
    made = {
        path: {name: np.zeros(param.shape, np.float32) for name, param in spec.items()}
        for path, spec in specs.items()
    }
    for name, theirs in found.modules.items():
        slot = known[name]
        module = adapter.by_path[slot.path]
        _refuse(folder, name, module, theirs, adapter.variant)
        _place(made[slot.path], slot, module, theirs)
    if missing := sorted(adapter.by_path.keys() - paths):
        raise UserError(
            f"{folder}: has no factors for {some(missing)}; leave them out of lora.targets"
        )
    return nest(made.items())


def _refuse(folder: Any, name: str, module: Module, theirs: PeftModule, variant: str) -> None:
    fan_in, fan_out = module.param.matrix_shape
    if (theirs.a.shape[1], theirs.b.shape[0]) != (fan_in, fan_out):
        raise UserError(
            f"{folder}: {name} is {theirs.a.shape[1]} -> {theirs.b.shape[0]} there and {fan_in} "
            f"-> {fan_out} in the model; it is for another base"
        )
    if theirs.rank > module.rank:
        raise UserError(f"{folder}: {name} has rank {theirs.rank}; set lora.rank to at least that")
    if (theirs.magnitude is not None) != (variant == "dora"):
        kind = "dora" if theirs.magnitude is not None else "lora"
        raise UserError(f'{folder}: {name} is of the other variant; set lora.variant = "{kind}"')


def _place(made: dict[str, np.ndarray], slot: Slot, module: Module, theirs: PeftModule) -> None:
    """One module's factors into the stacked arrays; a scale other than ours goes into `b`."""
    at = slot.at or ...
    a, b = np.zeros((theirs.a.shape[1], module.rank)), np.zeros((module.rank, theirs.b.shape[0]))
    a[:, : theirs.rank] = theirs.a.T
    b[: theirs.rank] = theirs.b.T * (theirs.scale / module.scale)
    made["a"][at] = a.reshape(made["a"][at].shape)
    made["b"][at] = b.reshape(made["b"][at].shape)
    if theirs.magnitude is not None:
        made["magnitude"][at] = theirs.magnitude.reshape(made["magnitude"][at].shape)


def merge_into(model: Any, w: Tree, found: PeftFolder, where: str) -> Tree:
    """float32 host weights of a model with an adapter of PEFT's in them. Raises UserError where
    it is for another base."""
    known = module_slots(model)
    if strange := [name for name in found.modules if name not in known]:
        raise UserError(f"{where}: the model has no {some(strange)}; it is for another base")
    leaves = {path: np.array(leaf, np.float32) for path, leaf in walk(w)}
    for name, module in found.modules.items():
        slot = known[name]
        leaf = leaves[slot.path]
        theirs = slot.to_layout(leaf)
        delta = module.delta.T if module.is_table else module.delta
        if theirs.shape != delta.shape:
            raise UserError(
                f"{where}: {name} changes a matrix {list(delta.shape)}, the model's is "
                f"{list(theirs.shape)}; it is for another base"
            )
        merged = theirs + delta
        if module.magnitude is not None:
            norm = np.linalg.norm(merged, axis=1, keepdims=True)
            merged *= module.magnitude[:, None] / norm
        leaf[slot.at or ...] = slot.from_layout(merged)
    return nest(leaves.items())
