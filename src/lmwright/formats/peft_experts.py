"""Factors of experts in PEFT, which adapts the tensors that hold all of a layer
(`target_parameters`), under the names of each expert: those that PEFT made, of any family, and ours
for gpt-oss, Gemma 4, Granite 4 and Nemotron-H.

    X.mlp.experts.gate_up_proj   A [E R, D]   B [2 F, R E], gpt-oss: rows of gate and up in turn
    X.experts.gate_up_proj       A [E R, D]   B [2 F, R E], others: those of the gate, those of up
    X.experts.up_proj            A [E R, D]   B [F, R E], where experts have no gate
    X.experts.down_proj          A [E R, F]   B [D, R E]

Gate and up of an expert share its A there; here each has one of its own. Written, the two stand
behind each other in twice the rank:

    A = [A of gate; A of up]      rows of B: [B of gate, 0], [0, B of up], ...

Both belong to one module: with factors of both, those of the first are below `base_layer`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from lmwright.errors import UserError
from lmwright.formats.stacked_experts import OWN, PARTS, SOURCES

INSIDE = ".base_layer"
GATE_UP, DOWN = PARTS
UP = "up_proj"  # of experts without a gate
PARTS_OF = {**PARTS, UP: ("up",)}
EXPERTS = re.compile(r"(?P<layer>.*\.experts)\.(gate_up_proj|up_proj|down_proj)")
OLD = {"w1": "gate", "w3": "up", "w2": "down"}
"""Parts of an expert by the names of Mixtral and LFM2."""
PART = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"} | OLD
MIXTRAL, MIXTRAL_IN_CLASS = ".block_sparse_moe.gate", ".mlp.gate"  # its router
ROUTERS = (
    *(".mlp.gate", ".feed_forward.gate", ".mixer.gate", ".mlp.router", ".block_sparse_moe.router"),
    MIXTRAL,
)
EXPERT = re.compile(rf"(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<part>{'|'.join(PART)})")
"""Module of an expert alone."""

Factors = dict[str, np.ndarray]
Group = dict[tuple[str, int], Any]


def named(parts: Mapping[str, Factors], targets: Sequence[str], where: str) -> dict[str, Factors]:
    """Factors by module, those of experts by the parameter that they adapt. Raises UserError for
    experts of which `target_parameters` does not tell it."""
    found = {}
    for name, part in parts.items():
        stem = name.removesuffix(INSIDE)
        if targets and stem.endswith(".experts"):
            found[f"{stem}.{_parameter(name, parts, targets, where)}"] = part
        else:
            found[name] = part
    return found


def _parameter(name: str, parts: Mapping[str, Factors], targets: Sequence[str], where: str) -> str:
    stem, ends = name.removesuffix(INSIDE), tuple(f".{target}" for target in targets)
    told = [each for each in PARTS_OF if f".{stem}.{each}".endswith(ends)]
    if f"{stem}{INSIDE}" in parts:
        return DOWN if name == stem else UP if UP in told else GATE_UP
    if len(told) != 1:
        raise UserError(
            f"{where}: target_parameters does not say which parameter of {stem} its factors are "
            "for; save the adapter again"
        )
    return told[0]


def parameter_of(name: str) -> str:
    """The parameter in transformers' class that a module's factors are for."""
    match = EXPERT.fullmatch(name)
    if match is None:
        return f"{name_in_class(name)}.weight"
    layer = match["layer"]
    if match["part"] in OLD:  # Mixtral's have another name there
        layer = layer.replace(".block_sparse_moe.", ".mlp.")
    return f"{layer}.{DOWN if PART[match['part']] == 'down' else GATE_UP}"


def name_in_class(name: str) -> str:
    """Name of a module, of an expert as a part of its parameter in transformers' class."""
    match = EXPERT.fullmatch(name)
    if match is None:
        return name.replace(MIXTRAL, MIXTRAL_IN_CLASS) if name.endswith(MIXTRAL) else name
    layer = parameter_of(name).rpartition(".")[0]
    return f"{layer}.{match['expert']}.{PART[match['part']]}_proj"


def is_router(name: str) -> bool:
    """True for the module of a router, which is no linear layer in transformers."""
    return name.endswith(ROUTERS)


def is_stacked(name: str) -> bool:
    """True for the name of a parameter that holds all experts of a layer."""
    return EXPERTS.fullmatch(name) is not None


def of_each(
    name: str, part: Factors, rank: int, where: str, turns: bool
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(module, A [R, inputs], B [outputs, R]) of each expert, from the factors of parameter `name`,
    of which rows of gate and up are in turn or one behind the other.
    Raises UserError where their shapes are not of one rank."""
    stem = name.rpartition(".")[0]
    a, b = part.get("a"), part.get("b")
    if a is None or b is None or a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise UserError(f"{where}: {name} lacks a factor or its ranks differ; save it again")
    parts = _parts(name)
    if len(a) % rank or len(b) % len(parts):
        raise UserError(
            f"{where}: {name} has {len(a)} rows of factors, which is not a multiple of its rank "
            f"{rank}; save it again"
        )
    inner, outer = a.reshape(-1, rank, a.shape[1]), b.reshape(len(b), rank, -1)
    for expert, each in enumerate(inner):
        for part_name, rows in zip(parts, _apart(name, outer, turns), strict=True):
            yield f"{stem}.{expert}.{part_name}_proj", each, rows[..., expert]


def in_turn(name: str) -> bool:
    """True for a parameter of gpt-oss, whose rows of gate and up are in turn."""
    return ".mlp.experts." in name


def _apart(name: str, rows: np.ndarray, turns: bool) -> np.ndarray:
    """[parts, outputs, ...] of the rows [parts outputs, ...] of a parameter."""
    count = len(_parts(name))
    if turns:
        return rows.reshape(-1, count, *rows.shape[1:]).swapaxes(0, 1)
    return rows.reshape(count, -1, *rows.shape[1:])


def _together(apart: np.ndarray, turns: bool) -> np.ndarray:
    """The rows of a parameter of what `_apart` gives."""
    parts = apart.swapaxes(0, 1) if turns else apart
    return parts.reshape(-1, *apart.shape[2:])


class Stack(NamedTuple):
    """Factors of a parameter, with their scale in `b`."""

    a: np.ndarray
    """[E R, inputs]."""
    b: np.ndarray
    """[outputs, R E]."""


def stacked(modules: Mapping[str, Any], order: str) -> dict[str, Stack]:
    """Factors by parameter, of the modules of experts, whose gate and up are in this order
    (`Table.stacked_experts`)."""
    groups = _groups(modules, order)
    return {name: _stack(name, group, order == "turns") for name, group in groups.items()}


def _groups(modules: Mapping[str, Any], order: str) -> dict[str, Group]:
    """The modules of experts by parameter, and in it by part and expert."""
    groups: dict[str, Group] = {}
    for name, module in modules.items():
        if match := OWN.fullmatch(f"{name}.weight"):
            part = match["part"]
            source = UP if order == "plain" and part == "up" else SOURCES[part][0]
            group = groups.setdefault(f"{match['layer']}.{source}", {})
            group[part, int(match["expert"])] = module
    return groups


def _parts(name: str) -> tuple[str, ...]:
    """The parts of an expert in a parameter."""
    return PARTS_OF[name.rpartition(".")[2]]


def _stack(name: str, group: Group, turns: bool) -> Stack:
    parts = _parts(name)
    there = [part for part in parts if (part, 0) in group]
    experts = range(len(group) // len(there))
    first = [np.stack([group[part, e].a for e in experts]) for part in there]  # [E, R, inputs]
    a = np.concatenate(first, axis=1)
    outputs = len(group[there[0], 0].b)
    b = np.zeros((len(parts), outputs, a.shape[1], len(experts)), np.float32)
    start = 0
    for part, factors in zip(there, first, strict=True):
        rank = factors.shape[1]
        for e in experts:
            module = group[part, e]
            b[parts.index(part), :, start : start + rank, e] = module.scale * module.b
        start += rank
    return Stack(a.reshape(-1, a.shape[2]), _together(b, turns).reshape(outputs * len(parts), -1))


def as_parameters(
    modules: Mapping[str, Any], alphas: Mapping[str, float], order: str
) -> tuple[dict[str, Any], dict[str, float]]:
    """Modules and their alphas for adapter_config.json, with the experts of a layer as its
    parameters: one expert stands for all, and the scale is one."""
    alone, rest = {}, {}
    for name, each in modules.items():
        if not OWN.fullmatch(f"{name}.weight"):
            key = parameter_of(name) if is_router(name) else name
            alone[key], rest[key] = each, alphas[name]
    for name, group in _groups(modules, order).items():
        first = [group[part, 0] for part in _parts(name) if (part, 0) in group]
        alone[name] = replace(first[0], a=np.concatenate([each.a for each in first]), scale=1.0)
        rest[name] = float(alone[name].rank)
    return alone, rest


def targets_of(names: Iterable[str]) -> list[str]:
    """`target_parameters` of the parameters among these names."""
    words = {name: -3 if in_turn(name) else -2 for name in names if is_stacked(name)}
    words |= {name: -3 for name in names if name.endswith(".weight")}
    return sorted({".".join(name.split(".")[start:]) for name, start in words.items()})


def keys_of(name: str, all_names: Mapping[str, Any]) -> str:
    """The module below which the factors of a parameter are kept."""
    layer, _, source = name.rpartition(".")
    both = source != DOWN and f"{layer}.{DOWN}" in all_names
    return f"{layer}{INSIDE}" if both else layer
