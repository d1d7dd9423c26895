"""Adapters to and from PEFT, by the same table of names and the arrows that serve models.

    our tree: layers.q.a [L, D, R]     model.layers.0.self_attn.q_proj lora_A [R, D], ...
              layers.q.b [L, R, N, H]                                  lora_B [N * H, R], ...

A rank that differs between layers over there is padded with zeros here, which stay zero.

Over a base of which only the text is taken, PEFT's names are those in the whole:
    model.layers.0...    model.language_model.layers.0...
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lmwright.core.contract import HfModel
from lmwright.core.leaves import LEAST
from lmwright.core.param import Tree, nest, walk
from lmwright.errors import UserError
from lmwright.formats import peft_experts
from lmwright.formats.hf_layout import Slot, slots
from lmwright.formats.peft_experts import name_in_class
from lmwright.formats.peft_folder import PeftFolder, PeftModule, make_config, read_folder
from lmwright.formats.peft_head import (
    config_of_saved,
    read_saved,
    saved_weights,
    saves_head,
    task_type,
)
from lmwright.formats.peft_names import by_parameters, dropped_in_peft
from lmwright.formats.peft_start import as_plain
from lmwright.formats.safetensors import some
from lmwright.formats.ternary import has_ternary
from lmwright.models.over import OverEncoder
from lmwright.models.text_part import TEXT_PARTS
from lmwright.program.lora import Module, ResolvedAdapter, module_spec


def module_slots(model: HfModel) -> dict[str, Slot]:
    """The slot of every matrix of a model, by the name PEFT gives its module. Raises UserError for
    a model with ternary weights."""
    if has_ternary(model):
        raise UserError(
            f"a {model.kind!r} model rounds an adapter with its base, which PEFT adds behind the "
            "rounding; export the run itself, with the adapter merged"
        )
    return {
        slot.name.removesuffix(".weight"): slot
        for slot in slots(model)
        if slot.param.is_matrix and slot.name.endswith(".weight")
    }


def to_peft(
    model: HfModel,
    adapter: ResolvedAdapter,
    weights: Tree,
    base: str,
    whole: Mapping[str, str] | None = None,
) -> PeftFolder:
    """The adapter as PEFT keeps it, of the `model` with a head that it trains whole; `base` is the
    name or folder of the base model, and `whole` what its module names begin with where it holds
    more than the text (`TextPart.modules`)."""
    stacks = in_stacks(model, adapter)
    if whole and adapter.variant != "dora" and any(map(_is_of_experts, adapter.modules)):
        stacks = stacks or "halves"  # in models that hold more than text, PEFT asks for these
    leaves = {path: np.asarray(leaf, np.float32) for path, leaf in walk(weights)}
    modules, alphas, beginnings = {}, {}, {**model.hf.modules, **(whole or {})}
    for name, slot in module_slots(model).items():
        if slot.path not in adapter.by_path:
            continue
        module = adapter.by_path[slot.path]
        a = leaves[f"{slot.path}.a"][slot.at].reshape(-1, module.rank).T
        b = leaves[f"{slot.path}.b"][slot.at].reshape(module.rank, -1).T
        magnitude = None
        if adapter.variant == "dora":
            magnitude = leaves[f"{slot.path}.magnitude"][slot.at].reshape(-1)
        name = _replaced(name, beginnings)
        modules[name] = PeftModule(a, b, module.scale, magnitude, module.param.inputs == ("vocab",))
        alphas[name] = module.alpha
    sqrt = any(m.scale != m.alpha / m.rank for m in adapter.modules)
    if sqrt and any(map(_is_of_experts, adapter.modules)):
        # PEFT joins the gate and up of experts into one of twice the rank and alpha, which keeps
        # alpha over rank and not alpha over its root
        sqrt, alphas = False, {name: m.scale * m.rank for name, m in modules.items()}
    alone = modules
    if stacks:
        alone, alphas = peft_experts.as_parameters(modules, alphas, stacks)
    config = make_config(alone, base, alphas, use_rslora=sqrt, lora_dropout=adapter.dropout)
    config |= {"task_type": task_type(model), "fan_in_fan_out": bool(model.hf.inputs_first)}
    if stacks:  # whose inputs PEFT cannot drop
        config |= {"target_parameters": peft_experts.targets_of(alone), "lora_dropout": 0.0}
        alone = {name: each for name, each in alone.items() if name in modules}
    # of what is not the text, modules have the same last words
    names = sorted(alone) if whole else _short(alone, module_slots(model))
    config["target_modules"] = names or None
    saved = saved_weights(model, adapter.whole, leaves)
    config |= config_of_saved([_replaced(name, model.hf.modules) for name in saved])
    if (head := _tied_head(model)) and f"{_table(model)}.weight" in saved:
        config["ensure_weight_tying"] = True  # as PEFT keeps a table and a head that stay one
        saved[f"{head}.weight"] = saved[f"{_table(model)}.weight"]
    saved = {_replaced(name, beginnings): weight for name, weight in saved.items()}
    made = PeftFolder(config, modules, saved=saved, stacked=stacks)
    if not stacks and adapter.variant != "dora" and (lost := dropped_in_peft(made, model)):
        return by_parameters(made, alphas, lost)
    return made


def in_stacks(model: HfModel, adapter: ResolvedAdapter) -> str | None:
    """Order of gate and up in an adapter on experts that PEFT keeps in one tensor for all of a
    layer; None for others."""
    order = model.hf.stacked_experts or model.hf.peft_experts
    return order if any(map(_is_of_experts, adapter.modules)) else None


def _is_of_experts(module: Module) -> bool:
    return "experts" in module.param.axes


def _replaced(name: str, beginnings: Mapping[str, str]) -> str:
    """The name with another beginning, if it has one of these and not the longer one already; `{i}`
    is the number of a layer."""
    for before, after in beginnings.items():
        if found := re.match(re.escape(before).replace(r"\{i\}", r"(\d+)"), name):
            made = after.replace("{i}", "".join(found.groups()))
            longer = made.startswith(found[0]) and name.startswith(made)
            return name if longer else made + name[found.end() :]
    return name


def read_for(model: HfModel, folder: str | Path) -> PeftFolder:
    """`read_folder` of an adapter for a model."""
    return read_folder(folder, model.hf.stacked_experts == "turns")


def in_files(adapter: PeftFolder, model: HfModel) -> PeftFolder:
    """The adapter with the names that its modules have in files of the text model alone."""
    own = {theirs: ours for ours, theirs in model.hf.modules.items()}
    beginnings = own | {a: b for part in TEXT_PARTS.values() for a, b in part.prefixes.items()}
    named = lambda each: {_replaced(n, beginnings): v for n, v in each.items()}  # noqa: E731
    modules = named(adapter.modules)
    if adapter.config.get("target_parameters"):  # whose names are those of transformers' class
        files = {name_in_class(name): name for name in module_slots(model)}
        modules = {files.get(name, name): module for name, module in modules.items()}
    return replace(
        adapter,
        modules=modules,
        whole=named(adapter.whole),
        saved=named(adapter.saved),
    )


def _short(chosen: Iterable[str], known: Iterable[str]) -> list[str]:
    """Module names shortened to their last word where that means no other module of the model."""
    last = lambda name: name.rpartition(".")[2]  # noqa: E731
    others = {last(name) for name in set(known) - set(chosen)}
    return sorted({name if last(name) in others else last(name) for name in chosen})


def read_adapter(
    folder: str | Path,
    model: HfModel,
    adapter: ResolvedAdapter,
    base: Callable[[], Tree] | None = None,
) -> Tree:
    """float32 host weights of `adapter` from a PEFT folder; `base` loads the base weights;
    it is called only for formats that need them, such as PiSSA.

    Raises UserError for a folder of another base, with more targets, or with more rank.
    """
    loaded = _head_once(in_files(read_for(model, folder), model), model, str(folder))
    known = _known_slots(loaded, model, str(folder))
    loaded = _on_base(loaded, model, base, str(folder))
    paths = {known[name].path for name in loaded.modules}
    if extra := sorted(paths - adapter.by_path.keys()):
        raise UserError(
            f"{folder}: has factors for {some(extra)}, which lora.targets leaves out; add them"
        )
    specs = {m.path: module_spec(m, adapter.variant) for m in adapter.modules}
    made = {
        path: {name: np.zeros(param.shape, np.float32) for name, param in spec.items()}
        for path, spec in specs.items()
    }
    for name, theirs in loaded.modules.items():
        slot = known[name]
        module = adapter.by_path[slot.path]
        _refuse(folder, name, module, theirs, adapter.variant)
        _place(made[slot.path], slot, module, theirs)
    if missing := sorted(adapter.by_path.keys() - paths):
        raise UserError(
            f"{folder}: has no factors for {some(missing)}; leave them out of lora.targets"
        )
    saved = read_saved(loaded, model, adapter.whole, str(folder))
    return nest([*made.items(), *saved.items()])


def _known_slots(adapter: PeftFolder, model: HfModel, where: str) -> dict[str, Slot]:
    """The slots of `module_slots`. Raises UserError where the adapter has a module that is not
    among them."""
    known = module_slots(model)
    if strange := [name for name in adapter.modules if name not in known]:
        raise UserError(f"{where}: the model has no {some(strange)}; it belongs to another base")
    return known


def _on_base(
    loaded: PeftFolder, model: HfModel, base: Callable[[], Tree] | None, where: str
) -> PeftFolder:
    """The adapter as plain LoRA on this base. Raises UserError where it is kept with weights of
    another one."""
    if loaded.start is None and not loaded.whole:
        return loaded
    if base is None:
        raise UserError(
            f"{where}: can only be read together with its base, and the base of this run is "
            "random; set train.init_from"
        )
    known, leaves = module_slots(model), dict(walk(base()))
    weight_of = lambda name: known[name].to_layout(leaves[known[name].path])  # noqa: E731
    for name, weight in loaded.whole.items():
        same = name in known and weight.shape == known[name].shape
        if not same or not np.array_equal(weight, weight_of(name).astype(np.float32)):
            raise UserError(
                f"{where}: holds a whole {name} that is not the base's; merge it with lmwright "
                f"adapters merge, and train from the result"
            )
    return as_plain(loaded, weight_of)


def _refuse(folder: Any, name: str, module: Module, theirs: PeftModule, variant: str) -> None:
    fan_in, fan_out = module.param.matrix_shape
    if (theirs.a.shape[1], theirs.b.shape[0]) != (fan_in, fan_out):
        raise UserError(
            f"{folder}: {name} is {theirs.a.shape[1]} -> {theirs.b.shape[0]} there and {fan_in} "
            f"-> {fan_out} in the model; it belongs to another base"
        )
    if theirs.rank > module.rank:
        raise UserError(f"{folder}: {name} has rank {theirs.rank}; set lora.rank to at least that")
    if (theirs.magnitude is not None) != (variant == "dora"):
        kind = "dora" if theirs.magnitude is not None else "lora"
        raise UserError(f'{folder}: {name} is the other variant; set lora.variant = "{kind}"')


def _place(arrays: dict[str, np.ndarray], slot: Slot, module: Module, theirs: PeftModule) -> None:
    """Puts one module's factors into the stacked arrays; a scale other than ours goes into `b`."""
    at = slot.at or ...
    a, b = np.zeros((theirs.a.shape[1], module.rank)), np.zeros((module.rank, theirs.b.shape[0]))
    a[:, : theirs.rank] = theirs.a.T
    b[: theirs.rank] = theirs.b.T * (theirs.scale / module.scale)
    arrays["a"][at] = a.reshape(arrays["a"][at].shape)
    arrays["b"][at] = b.reshape(arrays["b"][at].shape)
    if theirs.magnitude is not None:
        arrays["magnitude"][at] = theirs.magnitude.reshape(arrays["magnitude"][at].shape)


def merge_into(model: HfModel, w: Tree, adapter: PeftFolder, where: str) -> tuple[Any, Tree]:
    """(model, float32 host weights) with an adapter of PEFT's merged. The model is the given one,
    but for a tied head that the adapter tells from the table. Raises UserError where the adapter
    is for another base."""
    adapter = in_files(adapter, model)
    leaves = {path: np.array(leaf, np.float32) for path, leaf in walk(w)}
    _replace_whole(leaves, model, adapter.whole, where)
    model = _untied(leaves, model, adapter)
    if not saves_head(model):  # whose head is in `w`
        _replace_saved(leaves, model, adapter.saved, where)
    known = _known_slots(adapter, model, where)
    adapter = as_plain(adapter, lambda name: known[name].to_layout(leaves[known[name].path]))
    for name, module in adapter.modules.items():
        slot = known[name]
        leaf = leaves[slot.path]
        theirs = slot.to_layout(leaf)
        delta = module.delta.T if module.is_table else module.delta
        if theirs.shape != delta.shape:
            raise UserError(
                f"{where}: {name} changes a matrix {list(delta.shape)}, the model's is "
                f"{list(theirs.shape)}; it belongs to another base"
            )
        merged = theirs + delta
        if module.magnitude is not None:
            norm = np.maximum(np.linalg.norm(merged, axis=1, keepdims=True), LEAST**0.5)
            merged *= module.magnitude.reshape(-1, 1) / norm
        leaf[slot.at or ...] = slot.from_layout(merged)
    return model, nest(leaves.items())


def _tied_head(model: HfModel) -> str | None:
    """Name of the module that makes logits with the table; None where a head is of its own, or is
    no module (DeBERTa's, which has the table itself)."""
    if isinstance(model, OverEncoder) or getattr(model, "head", "") != "tied":
        return None
    name = model.hf.weights.get("head")
    return name.removesuffix(".weight") if isinstance(name, str) else None


def _table(model: HfModel) -> str:
    return next(n for n, s in module_slots(model).items() if s.param.inputs == ("vocab",))


def _replace_whole(
    leaves: Mapping[str, np.ndarray], model: HfModel, whole: Mapping[str, np.ndarray], where: str
) -> None:
    """Puts weights that were kept whole in the place of the base's; a tied head is the table."""
    known, head = module_slots(model), _tied_head(model)
    for name, weight in whole.items():
        slot = known.get(_table(model) if name == head else name)
        if slot is None or slot.shape != weight.shape:
            there = list(slot.shape) if slot else "not there"
            raise UserError(
                f"{where}: holds a whole {name} {list(weight.shape)}, the model's is {there}; "
                f"{_cure(slot, weight)}"
            )
        leaves[slot.path][slot.at or ...] = slot.from_layout(weight)


def _replace_saved(
    leaves: Mapping[str, np.ndarray], model: HfModel, saved: Mapping[str, np.ndarray], where: str
) -> None:
    """Puts weights that were trained whole in the place of the base's."""
    known, head = {slot.name: slot for slot in slots(model)}, _tied_head(model)
    for name, weight in saved.items():
        slot = known.get(name)
        if slot is None and name == f"{head}.weight":
            continue  # the same as the table
        if slot is None:
            raise UserError(
                f"{where}: has a {name} in modules_to_save, which the model lacks; it belongs to "
                "another base"
            )
        if slot.shape != weight.shape:
            raise UserError(
                f"{where}: {name} of modules_to_save is {list(weight.shape)}, the model's is "
                f"{list(slot.shape)}; {_cure(slot, weight)}"
            )
        leaves[slot.path][slot.at or ...] = slot.from_layout(weight)


def _cure(slot: Slot | None, weight: np.ndarray) -> str:
    """Cure for a weight of another shape than the base's."""
    if slot is None or "vocab" not in slot.param.axes or slot.shape[1:] != weight.shape[1:]:
        return "it belongs to another base"
    return f"lmwright vocab BASE OUT --size {len(weight)} makes a base of that size"


def _head_once(adapter: PeftFolder, model: HfModel, where: str) -> PeftFolder:
    """The adapter without a head that was trained whole as one with the table. Raises UserError
    where only one of them was, or each on its own, and the model has one for both."""
    head = _tied_head(model)
    if head is None:
        return adapter
    table = _table(model)
    if not _same_saved(adapter, table, head):
        if own := sorted({f"{head}.weight", f"{table}.weight"} & adapter.saved.keys()):
            raise UserError(
                f"{where}: has {some(own)} of modules_to_save, so head and table are no longer the "
                "same; merge it with lmwright adapters merge, and train from the result"
            )
        return adapter
    saved, whole = dict(adapter.saved), dict(adapter.whole)
    saved.pop(f"{head}.weight", None)
    whole.pop(head, None)
    return replace(adapter, saved=saved, whole=whole)


def _same_saved(adapter: PeftFolder, table: str, head: str) -> bool:
    """True where head and table were trained whole as one: PEFT's `ensure_weight_tying` keeps both,
    the head in the place of the base's."""
    theirs = adapter.saved.get(f"{head}.weight", adapter.whole.get(head))
    whole = adapter.saved.get(f"{table}.weight")
    return theirs is not None and whole is not None and np.array_equal(theirs, whole)


def _untied(leaves: dict[str, np.ndarray], model: HfModel, adapter: PeftFolder) -> Any:
    """The model with head and embedding table untied where the adapter changes only one of them:
    PEFT leaves the other unchanged."""
    head = _tied_head(model)
    if head is None:
        return model
    table, known = _table(model), module_slots(model)
    changed = adapter.modules.keys() | {name.removesuffix(".weight") for name in adapter.saved}
    if not {head, table} & changed or _same_saved(adapter, table, head):
        return model
    weight = known[table].to_layout(leaves[known[table].path])
    model = replace(model, head="untied")
    slot = module_slots(model)[head]
    leaves[slot.path] = np.array(slot.from_layout(weight), np.float32)
    return model
