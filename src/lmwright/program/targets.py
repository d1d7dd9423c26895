"""Targets: which weights of a model an adapter changes, by what their axes mean or by name.

attention, mlp, experts, all     from the arrows, but for matrices that PEFT refuses
q_proj, self_attn.q_proj         module names as PEFT gives them
q, layers.q                      our own paths, or how they end
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lmwright.config.run import Run
from lmwright.core.contract import HfModel, Objective
from lmwright.core.param import Param, Tree, walk
from lmwright.core.stack import LAYERS
from lmwright.errors import UserError
from lmwright.models.counts import part_of

GROUPS = ("all", "attention", "mlp", "experts")


@dataclass(frozen=True)
class Target:
    """A matrix of the model and what it may be called."""

    path: str
    param: Param
    names: tuple[str, ...]

    def answers(self, word: str) -> bool:
        """True if a name in a run file or of PEFT means this matrix."""
        return word in self.names or any(name.endswith(f".{word}") for name in self.names)


def targets_of(model: HfModel, spec: Tree) -> tuple[Target, ...]:
    """Every matrix of a run's `spec` that can take an adapter. An embedding that is also the head
    cannot: tools disagree about what its adapter would mean."""
    matrices = [(path, param) for path, param in walk(spec) if param.is_matrix]
    has_head = any("vocab" in param.outputs for _, param in matrices)
    targets = []
    for path, param in matrices:
        if ("vocab" in param.inputs and not has_head) or "distances" in param.inputs:
            continue
        groups = () if path.rpartition(".")[2] in model.hf.peft_refuses else _groups(param)
        targets.append(Target(path, param, (path, *_module(model, path), *groups)))
    return tuple(targets)


def _module(model: HfModel, path: str) -> Iterable[str]:
    stack, _, leaf = path.rpartition(".")  # one name for a weight of all kinds of layers
    template = model.hf.weights.get(f"{LAYERS}.{leaf}" if stack else path)
    if isinstance(template, str):
        name = template.removesuffix(".weight").removesuffix(".bias")
        yield from dict.fromkeys((name, model.hf.modules.get(name, name)))


def _groups(param: Param) -> Iterable[str]:
    part = part_of(param)
    if part in ("attention", "mlp", "experts") and "layers" in param.batch:
        yield "all"
        yield part


def frozen_spec(run: Run) -> Tree:
    """The weights of the base of a run of adapters, as Params."""
    spec, whole = _parted(run.model, run.objective, _words(run))
    return {k: tree for k, tree in spec.items() if k not in whole}


def whole_names(run: Run) -> frozenset[str]:
    """Names of weights that each adapter trains whole: those that the objective begins afresh, and
    those of `lora.whole`. Raises UserError for a word there that means none."""
    return _parted(run.model, run.objective, _words(run))[1]


def _words(run: Run) -> tuple[str, ...]:
    return () if run.lora is None else tuple(run.lora.whole)


@lru_cache(64)  # a plan asks for every mesh that it tries
def _parted(
    model: HfModel, objective: Objective, words: tuple[str, ...]
) -> tuple[Tree, frozenset[str]]:
    """The weights of a run, as Params, and the names of those that each adapter trains whole."""
    spec = objective.spec(model)
    known = [
        Target(name, param, (name, *_module(model, name)))
        for name, param in spec.items()
        if isinstance(param, Param) and name not in objective.new_weights
    ]
    whole = set(objective.new_weights)
    for word in words:
        answering = [target for target in known if target.answers(word)]
        if not answering:
            raise UserError(f"lora.whole: {word!r} matches no weight; {_listed(known)}")
        # PEFT trains modules: a norm with its bias
        modules = tuple(f"{name}." for target in answering for name in target.names[1:])
        inside = [t for t in known if any(f"{n}.".startswith(modules) for n in t.names[1:])]
        whole |= {target.path for target in (*answering, *inside)}
    return spec, frozenset(whole)


def choose(
    model: HfModel, spec: Tree, words: Iterable[str], where: str = "lora.targets"
) -> list[Target]:
    """The targets that any of the words means. Raises UserError, listing what there is, for a
    word that means none."""
    known = targets_of(model, spec)
    chosen: dict[str, Target] = {}
    for word in words:
        answering = [target for target in known if target.answers(word)]
        if not answering:
            raise UserError(f"{where}: {word!r} matches no weight; {_listed(known)}")
        chosen |= {target.path: target for target in answering}
    if not chosen:
        raise UserError(f"{where}: is empty; {_listed(known)}")
    return [target for target in known if target.path in chosen]


def _listed(known: Iterable[Target]) -> str:
    known = list(known)
    names = [group for group in GROUPS if any(target.answers(group) for target in known)]
    for target in known:
        names += [name.rpartition(".")[2] for name in target.names if name not in GROUPS]
    return f"there are: {', '.join(dict.fromkeys(names))}"


def by_target(
    targets: Iterable[Target], default: Any, words: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """A value for each target's path: the last word that means it, or the default. Raises
    UserError for a word that means none of them."""
    targets = list(targets)
    values = {target.path: default for target in targets}
    for word, value in words.items():
        paths = [target.path for target in targets if target.answers(word)]
        if not paths:
            raise UserError(f"{where}.{word}: matches no target of this run; {_listed(targets)}")
        values |= dict.fromkeys(paths, value)
    return values
