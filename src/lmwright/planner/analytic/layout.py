"""Layout: a run on a mesh that exists on paper only, and what one device holds of it.

    Run, sizes of the axes --on_paper--> Plan (abstract mesh) --Layout--> elements, bytes, ways

Everything is read off the arrows and the sharding tables, so that a new model, optimizer or
table entry needs no change here.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, TypeVar

from jax.sharding import AbstractMesh

from lmwright.config.run import Run, seq_len_of
from lmwright.core.compute import LANES, MATMUL, Remat, platform_of, remat_of, unrolled
from lmwright.core.contract import Attention, Work
from lmwright.core.sharding import ACTIVATIONS, WEIGHTS, axes_of, mesh_shape, partition, slices_of
from lmwright.hardware.chips import CHIPS
from lmwright.hardware.devices import GPUS
from lmwright.kernels import tpu_row_attention, tpu_spans
from lmwright.kernels.relu_signs import SIGNS
from lmwright.planner.analytic.machine import Machine
from lmwright.planner.analytic.stock import Stock, Weight, stocks_of
from lmwright.program.executable import refuse_options
from lmwright.program.plan import (
    MAX_UNROLLED,
    UNROLLED,
    Plan,
    compute_of,
    refuse_impossible,
)

T = TypeVar("T")
WEIGHT_BYTES = 4  # weights and their gradients are float32


@cache
def weight_cuts(axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that cut each axis of a weight."""
    return tuple(axes_of(entry) for entry in partition(axes, WEIGHTS))


@cache
def activation_cuts(axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that cut each axis of an activation."""
    return tuple(axes_of(entry) for entry in partition(axes, ACTIVATIONS))


Sizes = tuple[tuple[str, int], ...]
"""Devices along each mesh axis, hashable for caches."""


def held_elements(sizes: Sizes, axes: tuple[str, ...], shape: tuple[int, ...]) -> float:
    """Elements of an array with a weight's axes that a device holds; a dimension that does not
    divide stays whole."""
    along, held = dict(sizes), 1.0
    for size, cut in zip(shape, weight_cuts(axes), strict=True):
        ways = math.prod(along[a] for a in cut)
        held *= size if size % ways else size // ways
    return held


@lru_cache(4096)
def held_weights(sizes: Sizes, stock: Stock) -> dict[str, float]:
    """Sums over one device's shards of the weights: `all` and `trained` elements, `bytes`, `cast`
    (float32 elements, cast to bfloat16 in each step), `turned` (frozen bfloat16 elements of
    attention weights)."""
    sums = {"all": 0.0, "trained": 0.0, "bytes": 0.0, "cast": 0.0, "turned": 0.0}
    for w in stock.weights:
        held = held_elements(sizes, w.param.axes, w.param.shape)
        sums["all"] += held
        sums["trained"] += held * w.trained
        sums["bytes"] += held * w.bytes
        sums["cast"] += held * (w.bytes == WEIGHT_BYTES)
        heads = w.stacked and w.param.is_matrix and "head_dim" in w.param.axes and not w.adds_to
        sums["turned"] += held * (heads and not w.trained and w.bytes == 2)
    return sums


@lru_cache(4096)
def held_optimizer_bytes(sizes: Sizes, stock: Stock, on_host: bool = False) -> float:
    """Bytes of the optimizer's state on one device, or of its part on the host."""
    return sum(
        held_elements(sizes, axes, shape) * size
        for axes, shape, size, far in stock.optimizer
        if far == on_host
    )


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
"""Mesh axes that shard tokens. A weight that they shard is gathered before its product, but for the
experts that the `expert` axis holds."""


def on_paper(run: Run, machine: Machine) -> Plan:
    """The plan of a run on devices that are not there. Raises UserError where the run cannot
    be laid out on them."""
    slices = machine.num_groups if machine.platform == "tpu" else 1
    sizes = mesh_shape(run.mesh, machine.num_devices, slices)
    slices_of(sizes, slices)  # refuses what would cross them
    kind = CHIPS[machine.kind].device_kind if machine.platform == "tpu" else machine.device_kind
    plan = Plan(
        run=run,
        mesh=AbstractMesh(tuple(sizes.values()), tuple(sizes)),
        compute=compute_of(run, machine.platform, machine.num_devices, kind),
        seq_len=seq_len_of(run),
    )
    refuse_impossible(plan)
    refuse_options(run, machine.platform)
    plan.training.refuse(plan.mesh, plan.training.trainees)
    if run.train.precision == "fp8":
        from lmwright.program.float8_training import refuse_devices

        card = GPUS[machine.kind].card.capability if machine.platform == "gpu" else ()
        refuse_devices(machine.platform, kind or machine.name, card)
    return plan


@dataclass(frozen=True)
class Layout:
    """Sizes of one model of a run on one device, in elements, tokens and shards."""

    run: Run
    stock: Stock
    sizes: Mapping[str, int]
    """Devices along each mesh axis."""
    seq_len: int
    kernels: str = "tpu"
    more_passes: int = 0
    """Forward passes beside those of the objective."""

    @classmethod
    def of(cls, plan: Plan) -> tuple["Layout", ...]:
        """The layout of each model of a plan, whose mesh may be abstract."""
        sizes, kernels = dict(plan.mesh.shape), plan.compute.kernels
        return tuple(
            cls(plan.run, stock, sizes, plan.seq_len, kernels) for stock in stocks_of(plan.run)
        )

    @property
    def work(self) -> Work:
        return self.stock.work

    @property
    def extra_passes(self) -> int:
        """Forward passes of a microbatch beside the one that is differentiated."""
        return self.more_passes + self.run.objective.passes_of(self.run.train.num_microbatches)

    @property
    def attention(self) -> Attention | None:
        return self.work.attention

    @cached_property
    def remat(self) -> Remat:
        train = self.run.train
        policy = remat_of(train.fixed_remat, train.offload, train.block_inputs)
        if not self.is_unrolled:
            return policy
        return unrolled(policy, platform_of(self.kernels), math.prod(self.sizes.values()))

    @cached_property
    def is_unrolled(self) -> bool:
        """True if layers are unrolled (`core.stack`)."""
        few = self.work.num_layers <= MAX_UNROLLED
        return self.kernels in UNROLLED and few and self.stages == 1

    @cached_property
    def _found(self) -> dict[str, Any]:
        return {}

    def once(self, fn: Callable[["Layout"], T]) -> T:
        """Answer of a function of the layout, which is asked once."""
        if fn.__name__ not in self._found:
            self._found[fn.__name__] = fn(self)
        return self._found[fn.__name__]

    @property
    def weights(self) -> tuple[Weight, ...]:
        return self.stock.weights

    def _ways(self, mesh_axes: Iterable[str]) -> int:
        return math.prod(self.sizes[a] for a in mesh_axes)

    def ways(self, *axes: str) -> int:
        """Number of shards of an activation's last axis, given those of the other axes."""
        return self._ways(activation_cuts(axes)[-1])

    @cached_property
    def _sizes(self) -> Sizes:
        return tuple(self.sizes.items())

    @cached_property
    def held(self) -> dict[str, float]:
        """Weights on one device, as `held_weights` sums them."""
        return held_weights(self._sizes, self.stock)

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of the optimizer state on one device."""
        return held_optimizer_bytes(self._sizes, self.stock)

    @property
    def host_optimizer_bytes(self) -> float:
        """Bytes of one device's optimizer state on the host."""
        return held_optimizer_bytes(self._sizes, self.stock, on_host=True)

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
    def chunk(self) -> int:
        """Tokens of a row whose logits exist at once, on all devices that have a piece of it."""
        return min(self.run.train.loss_chunk_tokens * self.sizes["context"], self.seq_len)

    @property
    def stages(self) -> int:
        return self.sizes["stage"]

    @property
    def ticks(self) -> int:
        """Microbatches that a stage computes before its backward pass begins, empty ones too
        (`core.pipeline`)."""
        pieces = self.run.train.num_microbatches
        return pieces + self.stages - 1 if self.stages > 1 else 1

    @property
    def layers(self) -> float:
        """Layers of one device."""
        return self.work.num_layers / self.stages

    def share(self, weight: Weight) -> float:
        """Fraction of the layers that have a weight of this stack."""
        return weight.layers / self.work.num_layers

    @property
    def has_chunks(self) -> bool:
        """True if mlps go by chunks of a row."""
        chunk = self.run.train.mlp_chunk_tokens
        return chunk is not None and chunk < self.seq_len

    def is_normed(self, weight: Weight) -> bool:
        """True if a norm takes in a product, which is then needed in the backward pass."""
        return weight.path.rpartition(".")[2] in self.work.normed

    def product_ways(self, weight: Weight) -> int:
        """Number of devices that share the product of one token with a weight."""
        return split_ways(self._sizes, weight.param.axes)[0]

    def gathered_ways(self, weight: Weight) -> int:
        """Number of devices from which a weight is gathered for its product."""
        return split_ways(self._sizes, weight.param.axes)[1]

    def copies(self, weight: Weight) -> int:
        """Number of devices with other tokens that hold the same piece of a weight."""
        others = TOKEN_AXES - {"expert"} if weight.is_expert else TOKEN_AXES
        return self._ways(others) // self.gathered_ways(weight)

    @cached_property
    def activation_bytes(self) -> int:
        """Bytes of one element of an activation."""
        return 2 if self.run.train.activations == "bf16" else 4

    @cached_property
    def stream_bytes(self) -> float:
        """Bytes of the residual stream of one microbatch, [B, T, D], on one device."""
        ways = self.ways("batch", "stream") / self.ways("batch", "seq")
        return self.tokens * self.work.embed_dim * self.activation_bytes / ways

    @property
    def mlp_width(self) -> float:
        """Width of the mlp of a layer between up and down, averaged over layers, without experts
        that tokens are sent to."""
        every = (w for w in self.stock.model_weights if not w.is_routed)
        down = [w for w in every if w.param.inputs == ("mlp",)]
        return sum(w.per_token * w.fan_in * w.layers for w in down) / self.work.num_layers

    def output_bytes(self, weight: Weight) -> float:
        """Bytes of the output of one layer's matmul with this weight on one device; an output added
        to the residual stream is sharded like the stream."""
        if weight.param.outputs == ("embed",) and not weight.is_expert:
            return self.stream_bytes
        cuts = activation_cuts(("batch", "seq", *weight.param.outputs))[2:]
        width = weight.per_token * weight.fan_out
        width /= self._ways(axis for cut in cuts for axis in cut)
        if weight.param.outputs[-1] == "head_dim":
            width *= self.kernel_width(weight.param.shape[-1]) / weight.param.shape[-1]
        return self.tokens * width * self.activation_bytes

    def capacity_factor(self, weight: Weight) -> float | None:
        """Capacity of the experts that a weight belongs to; None where no token is dropped."""
        if not weight.is_routed:
            return None
        return getattr(getattr(self.run.model, "experts", None), "capacity_factor", None)

    def slots(self, weight: Weight) -> float:
        """Rows that experts compute for each choice of a token: more than one where they have a
        capacity, whose empty slots are computed as well."""
        capacity = self.capacity_factor(weight)
        if capacity is None:
            return 1.0
        tokens = self.seq_len / self.ways("batch", "seq")
        even = tokens * weight.active
        return min(tokens, math.ceil(capacity * even)) / even

    def in_rounds(self, weight: Weight) -> bool:
        """True if rows are sent to the devices that have a weight in rounds, which keep nothing for
        the backward pass (`nn.exchange`)."""
        capacity = self.capacity_factor(weight)
        return weight.is_expert and self.sizes["expert"] > 1 and capacity is None

    def keeps_signs(self, weight: Weight) -> bool:
        """True if signs are kept of the product with a weight: not by chunks, nor where layers are
        unrolled."""
        return weight.signs and not self.has_chunks and not self.is_unrolled

    def kept_name(self, weight: Weight) -> str:
        """The name by which `core.compute` knows what is kept of a product."""
        return MATMUL if self.keeps_signs(weight) else weight.product_name

    def kept_bytes(self, weight: Weight) -> float:
        """Bytes that are kept of the product of a mean layer with a weight."""
        share = self.share(weight)
        share /= SIGNS * self.activation_bytes if self.keeps_signs(weight) else 1
        return share * self.output_bytes(weight)

    def kernel_width(self, head_dim: int) -> int:
        """Width of a head in memory: a TPU pads it to 128 lanes, but not in the kernels of long
        rows."""
        padded = self.kernels in ("tpu", "early tpu")
        long = self.kernels == "tpu" and self.has_kernel and tpu_spans.fits(self.seq_len, head_dim)
        return -(-head_dim // LANES) * LANES if padded and not long else head_dim

    @property
    def has_kernel(self) -> bool:
        """True if the platform's attention kernel sees whole rows."""
        traded = self.run.train.context_attention == "all_to_all"
        return self.sizes["context"] == 1 or traded

    @property
    def has_whole_rows(self) -> bool:
        """True if attention is computed by `kernels/tpu_row_attention.py`."""
        alone = self.kernels == "tpu" and self.has_kernel and self.attention is not None
        size, itemsize = self.attention.head_dim if alone else 0, self.activation_bytes
        return alone and tpu_row_attention.fits(self.seq_len, size, itemsize)
