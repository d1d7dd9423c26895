"""Names by which PEFT finds the factors of an adapter on a model with experts, whose modules in
transformers 5 hold the experts of a layer in one tensor.

By `target_modules`, PEFT 0.21 takes the factors of single experts for those of the tensors: in
families that it knows, and where gate, up and down have some of one rank and scale, or down alone.
A dense layer or shared expert has modules of the same last names; PEFT takes these for experts, and
drops their factors. Where it would lose any, the config names parameters:

    ...mlp.experts.3.up_proj        mlp.experts.gate_up_proj          the ranks of gate and up added
    ...mlp.shared_experts.up_proj   mlp.shared_experts.up_proj.weight

Tensors of the file keep the names of single experts. PEFT then asks for all three parts of an
expert: one without factors gets factors of rank 1 that are zero, which are not read back.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lmwright.core.contract import HfModel
from lmwright.core.stack import LAYERS
from lmwright.formats.hf_layout import slots
from lmwright.formats.peft_experts import EXPERT, OLD, PART, is_router, parameter_of
from lmwright.formats.peft_folder import PeftFolder, PeftModule, make_config
from lmwright.models.over import OverEncoder

NOT_FOUND = ("lfm2_moe", "phimoe", "qwen2_moe", "qwen3_5_moe_text")
"""Each `model_type` whose single experts PEFT does not find by `target_modules`."""

OF_RANKS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern")
ALL = {"gate", "up", "down"}

Modules = Mapping[str, PeftModule]


def lost_in_peft(adapter: PeftFolder, model: HfModel | None = None) -> list[str]:
    """Names of the modules whose factors PEFT drops, or for which it refuses the folder. Without a
    model, only experts that have factors are known."""
    dropped = dropped_in_peft(adapter, model)
    if model is None:
        return dropped
    hf = _own(model).hf
    refused = (hf.weights[f"{LAYERS}.{name}"] for name in hf.peft_refuses)
    ends = [re.escape(name.partition("{i}")[2].removesuffix(".weight")) for name in refused]
    found = re.compile("|".join(f"{end}$" for end in ends).replace(r"\{\}", r"\d+") or "^$")
    return [name for name in adapter.modules if found.search(name)] + dropped


def dropped_in_peft(adapter: PeftFolder, model: HfModel | None = None) -> list[str]:
    """Names of the modules whose factors PEFT drops, which `target_parameters` would save."""
    if adapter.config.get("target_parameters"):  # by which it finds them
        return []
    experts = [name for name in adapter.modules if EXPERT.fullmatch(name)]
    names = {*adapter.modules}
    if model is not None:
        hf = _own(model).hf
        stacks = hf.stacked_experts or hf.peft_experts
        if stacks or next(iter(hf.model_types.values())) in NOT_FOUND:
            return [name for name in adapter.modules if name in experts or is_router(name)]
        names |= {slot.name.removesuffix(".weight") for slot in slots(model)}
    words = {_last(name) for name in names if EXPERT.fullmatch(name)}
    beside = [name for name in adapter.modules if _last(name) in words and name not in experts]
    routers = [name for name in adapter.modules if is_router(name)] if words else []
    lost = [group for group in (experts, routers) if not _is_found(adapter, group)]
    return [*(name for group in lost for name in group), *beside]


def _own(model: Any) -> Any:
    return model.encoder if isinstance(model, OverEncoder) else model


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_found(adapter: PeftFolder, names: Sequence[str]) -> bool:
    """True for experts, or routers, that PEFT takes for parameters by `target_modules` alone: of
    these it drops no inputs, has no DoRA, and does not see other ranks and alphas."""
    config, modules = adapter.config, [adapter.modules[name] for name in names]
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    usual = {(each.rank, each.scale, each.magnitude is None) for each in modules}
    parts = {PART[_last(name)] for name in names if EXPERT.fullmatch(name)}
    plain = usual <= {(rank, alpha / rank, True)} and parts in (set(), {"down"}, ALL)
    return not names or (plain and not config.get("lora_dropout"))


def by_parameters(
    adapter: PeftFolder, alphas: Mapping[str, float], lost: Sequence[str]
) -> PeftFolder:
    """The adapter with a config that names experts and the modules `lost` by their parameters, and
    with all parts of experts."""
    experts = {name: each for name, each in adapter.modules.items() if EXPERT.fullmatch(name)}
    if len({each.scale for each in experts.values()}) > 1:  # gate and up have one in PEFT
        experts = {
            n: replace(each, b=each.scale * each.b, scale=1.0) for n, each in experts.items()
        }
    modules = adapter.modules | experts | _missing_parts(experts)
    told: dict[str, int] = {}
    own: dict[str, float] = {}
    for name, module in modules.items():
        match = EXPERT.fullmatch(name)
        if match and match["expert"] != "0":
            continue  # as the first
        key = parameter_of(name) if match or name in lost else name
        told[key] = told.get(key, 0) + module.rank
        own[key] = module.scale * told[key] if match else alphas[name]
    stand_ins = {key: PeftModule(np.empty((rank, 0)), np.empty((0, rank)), 1.0)
                 for key, rank in told.items()}  # fmt: skip
    made = make_config(stand_ins, "", own)
    words = {_last(name) for name in modules.keys() & told.keys()}
    targets = [each for each in adapter.config["target_modules"] if _last(each) in words]
    config = adapter.config | {key: made[key] for key in OF_RANKS}
    config |= {"target_modules": targets or None, "lora_dropout": 0.0}
    config["target_parameters"] = sorted(told.keys() - modules.keys())
    return replace(adapter, config=config, modules=modules)


def _missing_parts(experts: Modules) -> dict[str, PeftModule]:
    """Factors of zeros for the gate or up that lacks its other, and for the down that they lack."""
    made = {}
    for name, module in experts.items():
        match = EXPERT.fullmatch(name)
        assert match
        stem, part = name.removesuffix(match["part"]), PART[match["part"]]
        if part == "down":
            continue
        words = {PART[word]: word for word in PART if (word in OLD) == (match["part"] in OLD)}
        sizes = {part: (module.a.shape[1], len(module.b)) for part in ("gate", "up")}
        sizes["down"] = sizes["gate"][::-1]
        for other, (inputs, outputs) in sizes.items():
            if (missing := f"{stem}{words[other]}") not in experts:
                zeros = np.zeros((1, inputs), np.float32), np.zeros((outputs, 1), np.float32)
                made[missing] = PeftModule(*zeros, module.scale)
    return made
