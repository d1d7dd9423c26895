"""LoRA as a kind of training: the adapters are the trainees, the model's weights are frozen.

The base is kept as `lora.base` says and is in no checkpoint, which holds its hash.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lmwright.core.leaves import Int4
from lmwright.core.param import Param, Tree, init_weights, nest, walk
from lmwright.core.sharding import (
    WEIGHTS,
    axes_of,
    lenient_shardings,
    partition,
    weight_shardings,
)
from lmwright.errors import UserError
from lmwright.program.lora import (
    LISTED,
    WHOLE,
    ResolvedAdapter,
    base_spec,
    bind,
    init_adapter,
    merged,
    module_spec,
    resolved,
    scale_spec,
    scaled,
    section_of,
    storages,
    stored,
)
from lmwright.program.targets import frozen_spec
from lmwright.program.trainee import Held, Training

Parts = Mapping[str, Mapping[str, Array]]


@dataclass(frozen=True)
class LoraTraining(Training[ResolvedAdapter]):
    """Adapters beside a frozen base."""

    flops_per_weight: ClassVar[int] = 4  # the adapters' own are a few percent
    freezes: ClassVar[bool] = True

    @cached_property
    def trainees(self) -> tuple[ResolvedAdapter, ...]:
        """The adapters of the run."""
        return resolved(self.run)

    @property
    def listed(self) -> str:
        """The list of adapters, if the run has one."""
        return LISTED if section_of(self.run).adapters else ""

    @cached_property
    def _spec(self) -> Tree:
        return frozen_spec(self.run)

    @cached_property
    def _params(self) -> dict[str, Param]:
        return {m.path: m.param for adapter in self.trainees for m in adapter.modules}

    def held(self) -> list[Held]:
        """The base as it is stored, and the weights of each adapter."""
        base, kinds = base_spec(self.run), storages(self.run)
        leaves, held = dict(walk(base)), []
        for path, param in walk(self._spec):
            parts = jax.tree.leaves(_stored_shape(leaves[path], kinds[path]))
            stored = sum(leaf.size * _bytes(leaf.dtype) for leaf in parts)
            held.append(Held(path, param, stored / param.size, trained=False))
        rows = sum(adapter.rows for adapter in self.trainees)
        for adapter in self.trainees:
            share = adapter.rows / rows
            for module in adapter.modules:
                spec = module_spec(module, adapter.variant) | scale_spec(self.run, module)
                for name, param in spec.items():
                    path = f"{adapter.name}.{module.path}.{name}"
                    held.append(Held(path, param, share=share, adds_to=module.path))
            whole = walk(adapter.whole)
            held += [Held(f"{adapter.name}.{path}", param, share=share) for path, param in whole]
        return held

    def refuse(self, mesh: Mesh, active: Sequence[ResolvedAdapter]) -> None:
        """Raises UserError for what adapters of experts, and several adapters, cannot do yet."""
        experts = any("experts" in param.axes for _, param in walk(self._spec))
        if section_of(self.run).base == "mxfp4" and not experts:
            raise UserError(
                "lora.base: mxfp4 holds the matrices of experts, and this model has none; use "
                '"int4"'
            )
        if len(active) > 1 and mesh.shape["stage"] > 1:
            raise UserError(
                "mesh.stage: several adapters at once cannot be split into stages; use mesh.fsdp"
            )
        modules = [module for adapter in active for module in adapter.modules]
        if any("experts" in module.param.axes for module in modules):
            self._refuse_on_experts(mesh, active)

    def _refuse_on_experts(self, mesh: Mesh, active: Sequence[ResolvedAdapter]) -> None:
        several, out = len(active) > 1, "leave experts out of lora.targets"
        if section_of(self.run).variant == "dora" and (several or mesh.size > 1):
            raise UserError(
                'lora.variant: "dora" on experts is for one device and one adapter; '
                f'{out}, or use "lora"'
            )
        if several and any(adapter.dropout for adapter in active):
            raise UserError(
                f"lora.dropout: has no effect with several adapters on experts; {out}, or set 0"
            )
        if several and self.run.qat is not None:
            raise UserError(f"qat: cannot round several adapters with their experts; {out}")

    def abstract_frozen(self, mesh: Mesh) -> Tree:
        """The base: integers are sharded as their weights; a few scales may stay whole."""
        weight_shardings(self._spec, mesh)  # refuses what does not divide, by its name
        kinds, spec = storages(self.run), base_spec(self.run)
        shapes = nest((path, _stored_shape(leaf, kinds[path])) for path, leaf in walk(spec))
        held = dict(walk(lenient_shardings(spec, mesh)))
        for path, leaf in walk(spec):
            if isinstance(leaf, Int4) and "experts" in leaf.scale.batch:
                held[path] = replace(held[path], scale=_scale_sharding(leaf.scale, mesh))
        return jax.tree.map(
            lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
            shapes,
            nest(held.items()),
        )

    def make_frozen(self, key: Array) -> Tree:
        """Randomly initialized base weights."""
        return stored(self.run, init_weights(self._spec, key))

    def shardings(self, trainee: ResolvedAdapter, mesh: Mesh) -> Tree:
        """Shardings by the axes of each factor; a dimension that does not divide stays whole."""
        return lenient_shardings(trainee.spec, mesh)

    def init(self, trainee: ResolvedAdapter, frozen: Tree, key: Array) -> Tree:
        """Factors that leave the model as it is, and fresh weights."""
        return init_adapter(trainee, frozen, key)

    def parts(self, trainee: ResolvedAdapter, weights: Tree) -> Parts:
        """The factors by path, with the scale in `b`, and what is trained whole."""
        return scaled(trainee, weights)

    def stack(self, parts: Sequence[Parts], order: Sequence[int]) -> Parts:
        """Factors with a leading axis, ranks padded with zeros, whose gradients are zero, and what
        is trained whole."""
        stacked = {
            path: {WHOLE: jnp.stack([parts[i][path][WHOLE] for i in order])}
            for path, part in parts[0].items()
            if WHOLE in part
        }
        for path, param in self._params.items():
            if path not in parts[0]:  # of an adapter that does not train any more
                continue
            width = max(part[path]["a"].shape[-1] for part in parts)
            padded = [_padded(part[path], len(param.batch), width) for part in parts]
            names = padded[0]
            stacked[path] = {name: jnp.stack([padded[i][name] for i in order]) for name in names}
        return stacked

    def bind(
        self, frozen: Tree, parts: Parts, key: Array | None = None, dropout: Any = None
    ) -> Tree:
        """The base with `Lora` leaves at the adapter's targets."""
        return bind(self._params, frozen, parts, key, dropout)

    def scale_updates(self, updates: Tree) -> Tree:
        """The optimizer's updates, those of every second factor times `lora.b_rate_ratio` (LoRA+,
        https://arxiv.org/abs/2402.12354)."""
        ratio = section_of(self.run).b_rate_ratio
        return updates if ratio == 1 else _faster_b(updates, ratio)

    def merged(self, trainee: ResolvedAdapter, frozen: Tree, weights: Tree) -> Tree:
        """The base, widened to float32, with one adapter added."""
        return jax.jit(partial(merged, trainee))(frozen, weights)


def _stored_shape(leaf: Any, storage: str) -> Any:
    if storage in ("fp32", "bf16"):
        return _struct(leaf, jnp.float32 if storage == "fp32" else jnp.bfloat16)
    scale = jnp.float32 if storage == "int8" else jnp.bfloat16
    values = _struct(leaf.values, jnp.int8 if storage == "int8" else jnp.int4)
    return replace(leaf, values=values, scale=_struct(leaf.scale, scale))


def _scale_sharding(param: Param, mesh: Mesh) -> NamedSharding:
    """Sharding of the scales of experts; where their blocks do not divide, outputs are cut in place
    of inputs: an eighth of the bytes would be whole on each of many devices."""
    parts = [axes_of(entry) for entry in partition(param.axes, WEIGHTS)]
    ways = lambda axes: math.prod(mesh.shape[axis] for axis in axes)  # noqa: E731
    for i, axes in enumerate(parts[:-1]):
        if param.shape[i] % ways(axes):
            parts[i] = ()
            if param.shape[-1] % ways(both := parts[-1] + axes) == 0:
                parts[-1] = both
    if param.shape[-1] % ways(parts[-1]):
        parts[-1] = ()
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in parts)))


def _bytes(dtype: Any) -> float:
    return 0.5 if dtype == jnp.int4 else jnp.dtype(dtype).itemsize


def _struct(param: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(param.shape, dtype)


def _padded(part: Mapping[str, Array], axis: int, width: int) -> dict[str, Array]:
    """`a` [..., R] and `b` [..., R at `axis`, ...] with zeros up to rank `width`."""
    a, b = part["a"], part["b"]
    missing = width - a.shape[-1]
    wider = {
        "a": jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, missing)]),
        "b": jnp.pad(b, [(0, missing if i == axis else 0) for i in range(b.ndim)]),
    }
    return dict(part) | wider if missing else dict(part)


def _faster_b(updates: Tree, ratio: float) -> Tree:
    return {
        name: _faster_b(tree, ratio)
        if isinstance(tree, Mapping)
        else tree * (ratio if name == "b" else 1)
        for name, tree in updates.items()
    }
