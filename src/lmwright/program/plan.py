"""Plan: what follows from a run on given devices. `plan` prints it, `train` executes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
from jax.sharding import Mesh

from lmwright.config.run import Run, seq_len_of
from lmwright.core.compute import Compute
from lmwright.core.contract import Work
from lmwright.core.param import Tree, count_params
from lmwright.core.sharding import (
    ACTIVATIONS,
    batch_ways,
    make_mesh,
    mesh_shape,
    num_slices_of,
    refuse_uneven,
    weight_shardings,
)
from lmwright.errors import UserError
from lmwright.kernels import select
from lmwright.program.trainee import Training, spec_of, training_of

UNROLLED = ("cpu", "gpu", "early gpu")  # kernels of platforms that lose time to a scan
MAX_UNROLLED = 48  # layers; a scan stores what the backward pass needs in slower ways


@dataclass(frozen=True)
class Plan:
    """A run bound to a mesh of devices; holds no arrays."""

    run: Run
    mesh: Mesh
    compute: Compute
    seq_len: int

    @cached_property
    def spec(self) -> Tree:
        """All weights of the run as Params."""
        return spec_of(self.run)

    @cached_property
    def works(self) -> Mapping[str, Work]:
        """The work of a token in each model of the objective."""
        return self.run.objective.works(self.run.model, self.seq_len)

    @cached_property
    def training(self) -> Training:
        """The trainees of the run. Raises UserError for adapters that do not fit the run."""
        return training_of(self.run)

    @cached_property
    def shardings(self) -> Tree:
        return weight_shardings(self.spec, self.mesh)

    @property
    def devices(self) -> list[jax.Device]:
        return list(self.mesh.devices.flat)

    @property
    def num_params(self) -> int:
        return count_params(self.spec)

    @property
    def tokens_per_step(self) -> int:
        return self.run.train.global_batch_size * self.seq_len

    @property
    def flops_per_step(self) -> float:
        """FLOPs of a step, forward and backward, without recomputation."""
        passes = self.training.flops_per_weight, self.run.objective.forward_passes
        each = sum(work.flops_per_token(*passes) for work in self.works.values())
        return float(self.tokens_per_step) * (each + self.training.trainees[0].head_flops)


def resolve(run: Run, devices: Sequence[jax.Device] | None = None) -> Plan:
    """The plan of a run on these devices (all by default). Raises UserError where the run
    cannot be laid out on them."""
    devices = list(devices) if devices is not None else jax.devices()
    mesh = make_mesh(mesh_shape(run.mesh, len(devices), num_slices_of(devices)), devices)
    run = replace(run, train=replace(run.train, remat=run.train.fixed_remat))
    compute = compute_of(run, devices[0].platform, len(devices), devices[0].device_kind)
    plan = Plan(run=run, mesh=mesh, compute=compute, seq_len=seq_len_of(run))
    refuse_impossible(plan)
    return plan


def refuse_impossible(plan: Plan) -> None:
    """Raises UserError where rows, tokens, heads or a weight do not divide over the mesh."""
    train, model, mesh = plan.run.train, plan.run.model, plan.mesh
    refuse_batch(plan, train.global_batch_size, "train.global_batch_size", "rows")
    tokens = f"{plan.seq_len} tokens of a row (data.pack.seq_len)"
    refuse_uneven(mesh, ACTIVATIONS["seq"], plan.seq_len, tokens)
    refuse_uneven(mesh, ACTIVATIONS["stream"], plan.seq_len, tokens)
    alone = {axis for w in plan.works.values() for axis in w.uncut}
    for axis, what in (("context", "its rows"), ("stage", "its layers")):
        if mesh.shape[axis] > 1 and axis in alone:
            raise UserError(
                f"mesh.{axis}: a {model.kind} model cannot cut {what} over devices; use mesh.fsdp"
            )
    _ = plan.shardings  # heads, layers and every other dimension of a weight
    for kv in [w.attention.num_kv_heads for w in plan.works.values() if w.attention]:
        refuse_uneven(mesh, "tensor", kv, f"{kv} of model.num_kv_heads")
    refuse_chunks(plan)
    if train.context_attention == "ring":
        pairs = f"{plan.seq_len // 2} pairs of tokens of a row, which ring attention cuts in two"
        refuse_uneven(mesh, "context", plan.seq_len // 2, pairs)
    elif mesh.shape["context"] > 1:
        for heads in [w.attention.num_heads for w in plan.works.values() if w.attention]:
            traded = (
                f"{heads} of model.num_heads, which train.context_attention = "
                f'"all_to_all" trades for tokens ("ring" does not)'
            )
            refuse_uneven(mesh, ("context", "tensor"), heads, traded)


def refuse_batch(plan: Plan, rows: int, field: str, what: str) -> None:
    """Raises UserError where rows of a step do not divide into microbatches over the mesh."""
    num, ways = plan.run.train.num_microbatches, batch_ways(plan.mesh)
    size = num * ways
    if rows % size:
        below = rows // size * size
        nearest = f"{below} or {below + size}" if below else f"{size}"
        pieces = f" into {num} microbatches" if num > 1 else ""
        if ways > 1:
            pieces += f" over {ways} {'' if ways == plan.mesh.size else 'groups of '}devices"
        raise UserError(
            f"{field}: {rows} {what} do not divide{pieces}; use a multiple of {size} "
            f"(nearest: {nearest})"
        )


def refuse_chunks(plan: Plan) -> None:
    """Raises UserError where `train.mlp_chunk_tokens` does not divide over the mesh."""
    if (chunk := plan.run.train.mlp_chunk_tokens) is not None:
        tokens = f"{chunk} tokens of a chunk (train.mlp_chunk_tokens)"
        refuse_uneven(plan.mesh, ACTIVATIONS["seq"], chunk, tokens)


def compute_of(run: Run, platform: str, num_devices: int = 1, device_kind: str = "") -> Compute:
    """Compute settings of the run's model on a platform. Raises UserError for bf16 on a GPU that
    does not compute in it."""
    kernels = select.kernels_for(platform, num_devices, device_kind)
    if kernels == "early gpu" and run.train.activations == "bf16":
        raise UserError(f"train.precision: {device_kind} has no bf16; set train.precision = 'fp32'")
    return Compute(
        precision=run.train.activations,
        remat=run.train.fixed_remat,
        offload=run.train.offload,
        block_inputs=run.train.block_inputs,
        unroll=kernels in UNROLLED and run.model.num_layers <= MAX_UNROLLED,
        kernels=kernels,
        one_document=run.data.pack.attention == "row"
        and not select.KERNELS["sums in order"](run.train.compiler_options),
        loss_chunk_tokens=run.train.loss_chunk_tokens,
        head_gradient=run.train.head_gradient,
        mlp_chunk_tokens=run.train.mlp_chunk_tokens,
        context_attention=run.train.context_attention,
        num_microbatches=run.train.num_microbatches,
    )


def step_options(plan: Plan) -> dict[str, str]:
    """XLA's options for the step: those of the platform and those of the run."""
    ours = select.compiler_options(plan.compute, plan.devices[0].device_kind)
    return ours | plan.run.train.compiler_options
