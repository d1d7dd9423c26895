"""Layout: a run on a mesh that exists on paper only, and what one device holds of it.

    Run, sizes of the axes --on_paper--> Plan (abstract mesh) --Layout--> elements, bytes, ways

Everything is read off the arrows and the sharding tables, so that a new model, optimizer or
table entry is reckoned with as it is.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh

from lmwright.config.run import Run
from lmwright.core.mesh import mesh_shape, slices_of
from lmwright.core.param import Param, walk
from lmwright.core.ragged import LANES
from lmwright.core.sharding import ACTIVATIONS, WEIGHTS, axes_of, partition
from lmwright.errors import UserError
from lmwright.hardware.slices import GENERATIONS
from lmwright.kernels.tpu_row_attention import fits
from lmwright.models.counts import active_share, part_of
from lmwright.optim.build import state_slots
from lmwright.optim.kinds import Optim
from lmwright.planner.analytic.machine import Machine
from lmwright.program.plan import Plan, compute_of, refuse_impossible, seq_len_of

WEIGHT_BYTES = 4  # weights and their gradients are float32


@dataclass(frozen=True)
class Weight:
    """One Param of a model, with what is asked of it over and over."""

    path: str
    param: Param
    part: str
    """embedding, attention, mlp, norms, biases or head."""
    axes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    is_matrix: bool
    layers: int
    """1 outside the stack."""
    stacked: bool
    """Whether it is one of a stack of layers."""
    size: int
    """Elements, of all layers together."""
    fan_in: int
    fan_out: int
    active: float
    """How much of it each token meets."""

    @property
    def is_expert(self) -> bool:
        """True if tokens are sent to this weight, which `expert` shards and which is not
        gathered."""
        return "experts" in self.param.batch

    @property
    def per_token(self) -> float:
        """Products of one token with a matrix of a layer: with experts, those it is sent to."""
        return self.active * (self.size / self.layers / (self.fan_in * self.fan_out))

    @property
    def is_wide(self) -> bool:
        """True if `remat = "mlp"` recomputes the product of this weight, as `core.weight.dot` names
        it."""
        return self.outputs[-1:] == ("mlp",)

    @property
    def is_gate(self) -> bool:
        """True if `remat = "gate"` recomputes the product of this weight."""
        return self.path.endswith("gate")


@cache
def weights_of(model: Any) -> tuple[Weight, ...]:
    """The weights of a model, by path."""
    return tuple(_weight(model, path, param) for path, param in walk(model.spec()))


def _weight(model: Any, path: str, param: Param) -> Weight:
    stacked = param.batch[:1] == ("layers",)
    fan_in, fan_out = param.matrix_shape if param.is_matrix else (0, 0)
    return Weight(
        path=path,
        param=param,
        part=part_of(param),
        axes=param.axes,
        inputs=param.inputs,
        outputs=param.outputs,
        is_matrix=param.is_matrix,
        layers=param.shape[0] if stacked else 1,
        stacked=stacked,
        size=param.size,
        fan_in=fan_in,
        fan_out=fan_out,
        active=active_share(model, path, param),
    )


@cache
def weight_cuts(axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that cut each axis of a weight."""
    return tuple(axes_of(entry) for entry in partition(axes, WEIGHTS))


@cache
def activation_cuts(axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that cut each axis of an activation."""
    return tuple(axes_of(entry) for entry in partition(axes, ACTIVATIONS))


Sizes = tuple[tuple[str, int], ...]
"""Devices along each mesh axis, as something to remember answers by."""


def held_elements(sizes: Sizes, axes: tuple[str, ...], shape: tuple[int, ...]) -> float:
    """Elements that a device holds of an array with weights' axes; a dimension that does not
    divide stays whole."""
    along, held = dict(sizes), 1.0
    for size, cut in zip(shape, weight_cuts(axes), strict=True):
        ways = math.prod(along[a] for a in cut)
        held *= size if size % ways else size // ways
    return held


@lru_cache(4096)
def held_weights(sizes: Sizes, model: Any) -> float:
    """Elements of all weights on one device."""
    return sum(held_elements(sizes, w.axes, w.param.shape) for w in weights_of(model))


@lru_cache(4096)
def held_optimizer_bytes(sizes: Sizes, optim: Optim, model: Any) -> float:
    """Bytes of the optimizer's state on one device."""
    arrays = optimizer_arrays(optim, model)
    return sum(held_elements(sizes, axes, shape) * size for axes, shape, size in arrays)


@lru_cache(65536)
def split_ways(sizes: Sizes, axes: tuple[str, ...]) -> tuple[int, int]:
    """(devices that share the product of a token with a weight, devices from which it is
    gathered for that)."""
    along = dict(sizes)
    cuts = {a for cut in weight_cuts(axes) for a in cut}
    stays = (
        {"expert"} & set(weight_cuts(axes)[axes.index("experts")]) if "experts" in axes else set()
    )
    shared, gathered = cuts - TOKEN_AXES | stays, cuts & TOKEN_AXES - stays
    return math.prod(along[a] for a in shared), math.prod(along[a] for a in gathered)


TOKEN_AXES = frozenset(a for cut in activation_cuts(("batch", "seq")) for a in cut)
"""Mesh axes over which tokens are cut: a weight is whole for its product, whatever these axes
cut of it in between."""


@cache
def optimizer_arrays(optim: Optim, model: Any) -> tuple[tuple[tuple[str, ...], tuple, int], ...]:
    """(axes, shape, bytes of an element) of each array of the optimizer's state."""
    return tuple(
        (slot.param.axes, slot.param.shape, np.dtype(slot.dtype).itemsize)
        for _, slot in walk(state_slots(optim, model.spec()))
    )


def on_paper(run: Run, machine: Machine) -> Plan:
    """The plan of a run on devices that are not there. Raises UserError where the run cannot
    be laid out on them, or trains adapters, which this arithmetic does not know."""
    if run.lora is not None:
        raise UserError(
            "lora: --quick, --search and machines other than TPUs reckon with runs that train all "
            "weights; plan this one with --on a TPU slice alone"
        )
    slices = machine.num_groups if machine.platform == "tpu" else 1
    sizes = mesh_shape(run.mesh, machine.num_devices, slices)
    slices_of(sizes, slices)  # refuses what would cross them
    kind = GENERATIONS[machine.kind].device_kind if machine.platform == "tpu" else ""
    plan = Plan(
        run=run,
        mesh=AbstractMesh(tuple(sizes.values()), tuple(sizes)),
        compute=compute_of(run, machine.platform, machine.num_devices, kind),
        seq_len=seq_len_of(run),
    )
    refuse_impossible(plan)
    return plan


@dataclass(frozen=True)
class Layout:
    """Sizes of a run on one device, in elements, tokens and shards."""

    run: Run
    sizes: Mapping[str, int]
    """Devices along each mesh axis."""
    seq_len: int
    kernels: str = "tpu"

    @classmethod
    def of(cls, plan: Plan) -> "Layout":
        """The layout of a plan, whose mesh may be abstract."""
        return cls(plan.run, dict(plan.mesh.shape), plan.seq_len, plan.compute.kernels)

    @property
    def model(self) -> Any:
        return self.run.model

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        return weights_of(self.model)

    def _ways(self, mesh_axes: Iterable[str]) -> int:
        return math.prod(self.sizes[a] for a in mesh_axes)

    def ways(self, *axes: str) -> int:
        """Pieces into which the last of an activation's axes is cut, next to the others."""
        return self._ways(activation_cuts(axes)[-1])

    @cached_property
    def _sizes(self) -> Sizes:
        return tuple(self.sizes.items())

    @property
    def weight_elements(self) -> float:
        """Elements of all weights on one device."""
        return held_weights(self._sizes, self.model)

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of the optimizer state on one device."""
        return held_optimizer_bytes(self._sizes, self.run.optim, self.model)

    @cached_property
    def rows(self) -> float:
        """Rows of one microbatch on one device."""
        train = self.run.train
        return train.global_batch_size / train.num_microbatches / self.ways("batch")

    @cached_property
    def tokens(self) -> float:
        """Tokens of one microbatch on one device."""
        return self.rows * self.seq_len / self.ways("batch", "seq")

    @property
    def stages(self) -> int:
        return self.sizes["stage"]

    @property
    def layers(self) -> float:
        """Layers of one device."""
        return self.model.num_layers / self.stages

    def share(self, weight: Weight) -> float:
        """Fraction of the layers that have a weight of this stack."""
        return weight.layers / self.model.num_layers

    def product_ways(self, weight: Weight) -> int:
        """Devices that share the product of one token with a weight."""
        return split_ways(self._sizes, weight.axes)[0]

    def gathered_ways(self, weight: Weight) -> int:
        """Devices from which a weight is gathered for its product."""
        return split_ways(self._sizes, weight.axes)[1]

    def copies(self, weight: Weight) -> int:
        """Devices with other tokens that hold the same piece of a weight."""
        return self._ways(TOKEN_AXES) // self.gathered_ways(weight)

    @property
    def activation_bytes(self) -> int:
        """Bytes of one element of an activation."""
        return 2 if self.run.train.precision == "bf16" else 4

    def stream_bytes(self) -> float:
        """The residual stream of one microbatch, [B, T, D], on one device."""
        ways = self.ways("batch", "stream") / self.ways("batch", "seq")
        return self.tokens * self.model.embed_dim * self.activation_bytes / ways

    @property
    def mlp_width(self) -> float:
        """Width of a token in a layer between up and down, averaged over layers."""
        down = [w for w in self.weights if w.inputs == ("mlp",)]
        return sum(w.per_token * w.fan_in * w.layers for w in down) / self.model.num_layers

    def output_bytes(self, weight: Weight) -> float:
        """Bytes of the output of one layer's matmul with this weight on one device; an output added
        to the residual stream is sharded like the stream."""
        if weight.outputs == ("embed",) and not weight.is_expert:
            return self.stream_bytes()
        cuts = activation_cuts(("batch", "seq", *weight.outputs))[2:]
        width = weight.per_token * weight.fan_out
        width /= self._ways(axis for cut in cuts for axis in cut)
        if weight.outputs[-1] == "head_dim":
            width *= self.lanes / self.model.head_dim
        return self.tokens * width * self.activation_bytes

    @property
    def lanes(self) -> int:
        """Width of one head in registers and memory: a TPU pads it to 128 lanes."""
        size = self.model.head_dim
        return -(-size // LANES) * LANES if self.kernels in ("tpu", "early tpu") else size

    @property
    def has_whole_rows(self) -> bool:
        """True if attention is computed by `kernels/tpu_row_attention.py`."""
        alone = self.kernels == "tpu" and self.sizes["context"] == 1
        return alone and fits(self.seq_len, self.model.head_dim, self.activation_bytes)

    @property
    def attention_bytes(self) -> float:
        """Bytes that attention saves of its forward pass: its output and, for each query and head,
        the float32 log of its sum."""
        m = self.model
        lanes = m.head_dim if self.has_whole_rows else self.lanes
        width = lanes * self.activation_bytes + 4
        return self.tokens * m.num_heads * width / self.ways("batch", "seq", "heads")
