"""Quantization-aware training as kinds of training: the weights of the optimizer are floats, and
`bind` gives the model leaves that compute rounded.

    full    w                      --> Rounded(w)
    LoRA    frozen base, a, b, s   --> Rounded(Lora(base, a, b), s): the adapter is rounded with its
                                       base, so that the merged model is the trained one
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh

from lmwright.core.leaves import Lora, Rounded
from lmwright.core.param import Param, Tree, nest, walk
from lmwright.core.rounded import first_scale, stored, widened
from lmwright.errors import UserError
from lmwright.models.counts import is_layer_matrix
from lmwright.program.lora import SCALE, ResolvedAdapter
from lmwright.program.lora_training import LoraTraining
from lmwright.program.qat_section import Qat
from lmwright.program.targets import frozen_spec
from lmwright.program.trainee import FullTraining, Trainee, spec_of


def section_of(run: Any) -> Qat:
    """The section [qat] of a run that has one."""
    assert run.qat is not None
    return run.qat


def rounded_params(run: Any, spec: Tree) -> dict[str, Param]:
    """The weights that compute rounded, by path. Raises UserError for a model or a group size that
    does not allow it."""
    section_of(run).refuse_model(run.model)
    params = dict(walk(spec))
    if not set(params) <= {path for path, _ in walk(run.model.spec())}:
        raise UserError(
            f"qat: objective.kind = {run.objective.kind!r} has weights beside the model's, which "
            "no file holds in few bits; use 'clm' or 'sft'"
        )
    return {path: param for path, param in params.items() if is_layer_matrix(param)}


def leaf(qat: Qat, param: Param, latent: Any, scale: Any = None) -> Rounded:
    """A weight as a leaf that computes rounded."""
    sides = {"inputs": len(param.inputs), "outputs": len(param.outputs)}
    return Rounded(latent, scale, qat.weights, qat.group, qat.activations, **sides)


def rounded(qat: Qat, params: Mapping[str, Param], w: Tree) -> Tree:
    """Weights with leaves at the paths of `params`, of arrays there."""
    leaves = ((p, leaf(qat, params[p], a) if p in params else a) for p, a in walk(w))
    return nest(leaves)


def values_of(bound: Tree) -> Tree:
    """float32 values of weights with leaves that compute rounded; traceable."""
    return nest((p, widened(a) if isinstance(a, Rounded) else a) for p, a in walk(bound))


def codes_of(bound: Tree) -> dict[str, tuple[Array, Array]]:
    """int8 codes and float32 scales of the leaves that compute rounded; traceable."""
    return {p: stored(a) for p, a in walk(bound) if isinstance(a, Rounded)}


@dataclass(frozen=True)
class QatTraining(FullTraining):
    """All weights are trained, those of the layers' matrices computing rounded."""

    @cached_property
    def _rounded(self) -> dict[str, Param]:
        return rounded_params(self.run, spec_of(self.run))

    @cached_property
    def trainees(self) -> tuple[Trainee, ...]:
        """The model."""
        _ = self._rounded  # refuses before anything is made
        return super().trainees

    def bind(self, frozen: Tree, parts: Any, key: Array | None = None, dropout: Any = None) -> Tree:
        """The weights with leaves that compute rounded."""
        return rounded(section_of(self.run), self._rounded, parts)

    def merged(self, trainee: Trainee, frozen: Tree, weights: Tree) -> Tree:
        """float32 values that the model computes with."""
        return jax.jit(lambda w: values_of(self.bind({}, w)))(weights)

    def codes(
        self, trainee: Trainee, frozen: Tree, weights: Tree
    ) -> dict[str, tuple[Array, Array]]:
        """Integers and scales of the rounded weights, by path."""
        return jax.jit(lambda w: codes_of(self.bind({}, w)))(weights)


@dataclass(frozen=True)
class LowRankQatTraining(LoraTraining):
    """Adapters that are rounded with their base (LR-QAT, https://arxiv.org/abs/2406.06385)."""

    @cached_property
    def trainees(self) -> tuple[ResolvedAdapter, ...]:
        """The adapter of the run, whose modules have trained scales."""
        section_of(self.run).refuse(self.run)
        found, known = super().trainees, self._rounded
        outside = [module.path for module in found[0].modules if module.path not in known]
        if outside:
            raise UserError(f"lora.targets: {outside[0]} is not rounded by [qat]; leave it out")
        return found

    @cached_property
    def _rounded(self) -> dict[str, Param]:
        return rounded_params(self.run, frozen_spec(self.run))

    def refuse(self, mesh: Mesh, active: Sequence[ResolvedAdapter]) -> None:
        """Raises UserError for what several adapters cannot do yet. One is a single matrix with its
        base before a product meets it, also that of an expert on another device."""
        if len(active) > 1:
            super().refuse(mesh, active)

    def init(self, trainee: ResolvedAdapter, frozen: Tree, key: Array) -> Tree:
        """Factors that leave the model as it is, and the scales of its weights."""
        made, bases = dict(walk(super().init(trainee, frozen, key))), dict(walk(frozen))
        for module in trainee.modules:
            empty = leaf(section_of(self.run), module.param, None)
            made[f"{module.path}.{SCALE}"] = first_scale(bases[module.path], empty)
        return nest(made.items())

    def bind(self, frozen: Tree, parts: Any, key: Array | None = None, dropout: Any = None) -> Tree:
        """The base with leaves that are rounded with the adapter in them."""
        bound, qat, leaves = super().bind(frozen, parts, key, dropout), section_of(self.run), []
        for path, a in walk(bound):
            scale = parts[path][SCALE] if isinstance(a, Lora) else None
            param = self._rounded.get(path)
            leaves.append((path, a if param is None else leaf(qat, param, a, scale)))
        return nest(leaves)

    def merged(self, trainee: ResolvedAdapter, frozen: Tree, weights: Tree) -> Tree:
        """float32 values that the model computes with."""
        return self._of(values_of, trainee, frozen, weights)

    def codes(
        self, trainee: ResolvedAdapter, frozen: Tree, weights: Tree
    ) -> dict[str, tuple[Array, Array]]:
        """Integers and scales of the rounded weights, by path."""
        return self._of(codes_of, trainee, frozen, weights)

    def _of(self, made: Any, trainee: ResolvedAdapter, frozen: Tree, weights: Tree) -> Any:
        def run(frozen: Tree, weights: Tree) -> Any:
            return made(self.bind(frozen, self.parts(trainee, weights)))

        return jax.jit(run)(frozen, weights)
