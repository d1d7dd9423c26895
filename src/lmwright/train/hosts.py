"""Hosts: several processes, each with its own devices, train one run together.

    JAX_COORDINATOR_ADDRESS=host0:1234 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0   said outright
    srun lmwright train; mpirun lmwright train; a GKE slice  JAX finds it by itself
    lmwright train --pod                                     JAX has to find it: TPU pods

Every process runs the same command on a shared run directory; process 0 writes.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lmwright.core.sharding import batch_sharding
from lmwright.errors import TransientError, UserError, first_line
from lmwright.program.plan import Plan
from lmwright.train import peers

# Their launchers say how many processes they started; a script of Slurm that starts one itself has
# no step.
LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
# and how many of them on this machine, or on each, as "1" or "1(x2),3"
ON_EACH = ("SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
# Of a slice on Kubernetes: all its hosts. New node images set the first, and JAX looks there first.
WORKERS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
SLICES = "MEGASCALE_NUM_SLICES"  # a JobSet of several; each may have a single host
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def alone(*, pod: bool = False, variables: Mapping[str, str] = os.environ) -> bool:
    """True if nothing says that other processes train this run, too."""
    said = any(variables.get(name) for name in (ADDRESS, COUNT, INDEX))
    return not (said or pod or started_together(variables))


def join(*, pod: bool = False, variables: Mapping[str, str] = os.environ) -> None:
    """Connects to the run's other processes, if there are any, before any use of devices.

    Raises UserError where the variables are incomplete, TransientError where the others are not
    found.
    """
    if alone(pod=pod, variables=variables):
        return
    where = _given(variables)
    if where.get("num_processes") == 1:
        return  # JAX's service would swallow SIGTERM
    # CPUs match collectives by order alone: two programs at once would mix theirs
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    count = where.get("num_processes")
    others = f"the other {count - 1} processes" if count else "the other processes"
    at = f" at {where['coordinator_address']}" if where else ""
    visible = jax.config.read("jax_cuda_visible_devices")
    try:
        with peers.Waiting(others, at):
            jax.distributed.initialize(
                **where,
                heartbeat_timeout_seconds=peers.HEARTBEAT_S,
                initialization_timeout=peers.JOIN_S + 60,  # JAX would abort
            )
    except (RuntimeError, ValueError) as error:
        raise _not_found(error, known=bool(where)) from error
    if one_a_machine(variables) and not variables.get("JAX_LOCAL_DEVICE_IDS"):
        # JAX has left each process of Slurm and MPI the one GPU that has its number
        jax.config.update("jax_cuda_visible_devices", visible)
    if jax.process_count() > 1:
        if jax.default_backend() == "cpu":
            # a program from the cache has lost the order of its collectives, and waits forever
            jax.config.update("jax_enable_compilation_cache", False)
        peers.AbortNotice(jax.process_count())


def _given(variables: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of `jax.distributed.initialize` that variables give; none where JAX has to find the
    other processes by itself."""
    given = [name for name in (ADDRESS, COUNT, INDEX) if variables.get(name)]
    if not given:
        return {}
    if len(given) < 3:
        missing = sorted({ADDRESS, COUNT, INDEX} - set(given))
        raise UserError(
            f"{', '.join(given)}: set without {', '.join(missing)}; set all three in every process"
        )
    count, index = (_count(variables, name) for name in (COUNT, INDEX))
    if index >= count:
        raise UserError(f"{INDEX}: {index} is not below {COUNT} = {count}; processes count from 0")
    return {
        "coordinator_address": variables[ADDRESS], "num_processes": count, "process_id": index,
    }  # fmt: skip


def _not_found(error: Exception, *, known: bool) -> Exception:
    """The error to raise where JAX did not find the other processes; `known` says that it was told
    where they are."""
    if not known and isinstance(error, ValueError):  # no cluster that JAX knows
        return UserError(
            "--pod: JAX finds the other processes on TPU pods, under Slurm and under MPI, and this "
            f"is none of these; leave out --pod to train on this machine only, or set {ADDRESS}, "
            f"{COUNT} and {INDEX} in every process"
        )
    return TransientError(
        f"the other processes were not found ({first_line(error)}); start one on each host, or set "
        f"{ADDRESS}, {COUNT} and {INDEX} in each"
    )


def started_together(variables: Mapping[str, str]) -> bool:
    """True if a launcher started this process with others, so that JAX knows where they are."""
    counts = [variables.get(name, "") for name in (*LAUNCHERS, SLICES)]
    several = any(count.isdecimal() and int(count) > 1 for count in counts)
    workers = next((variables[name] for name in WORKERS if name in variables), "")
    return several or "," in workers


def one_a_machine(variables: Mapping[str, str]) -> bool:
    """True if a launcher started one process on each machine, which takes all GPUs there."""
    told = next((variables[name] for name in ON_EACH if name in variables), "")
    return set(re.sub(r"\(x\d+\)", "", told).split(",")) == {"1"}


def _count(variables: Mapping[str, str], name: str) -> int:
    if not variables[name].isdecimal():
        raise UserError(f"{name}: {variables[name]!r} is not a number; write it as 0, 1, 2 ...")
    return int(variables[name])


@dataclass(frozen=True)
class HostRows:
    """Rows of a microbatch on this process's devices, as (start, stop) ranges.

    Rows of a microbatch are taken at stride A from the batch: row j of microbatch a is row
    j A + a of the batch, whatever the number of processes.
    """

    stretches: tuple[tuple[int, int], ...]
    num_microbatches: int
    num_rows: int
    """Rows of a microbatch on all hosts together."""

    @classmethod
    def of(cls, plan: Plan, num_rows: int | None = None) -> "HostRows":
        """HostRows for microbatches of the size of the run, or of `num_rows`."""
        train = plan.run.train
        rows = num_rows or train.global_batch_size // train.num_microbatches
        indices = batch_sharding(plan.mesh).addressable_devices_indices_map((rows, plan.seq_len))
        stretches: list[tuple[int, int]] = []
        for start, stop in sorted({index[0].indices(rows)[:2] for index in indices.values()}):
            if stretches and stretches[-1][1] == start:
                stretches[-1] = (stretches[-1][0], stop)
            else:
                stretches.append((start, stop))
        return cls(tuple(stretches), train.num_microbatches, rows)

    def place(self, plan: Plan, rows: np.ndarray) -> jax.Array:
        """Rows [b, T] of this host, in order, as its part of a global [A, B, T]."""
        num = self.num_microbatches
        local = np.ascontiguousarray(rows.reshape(-1, num, rows.shape[1]).swapaxes(0, 1))
        sharding = batch_sharding(plan.mesh, leading=1)
        if jax.process_count() == 1:
            return jax.device_put(local, sharding)
        whole = (num, self.num_rows, rows.shape[1])

        def piece(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[1].indices(whole[1])
            at = self._local(start)
            return local[index[0], at : at + stop - start, index[2]]

        return jax.make_array_from_callback(whole, sharding, piece)

    def _local(self, row: int) -> int:
        before = 0
        for start, stop in self.stretches:
            if start <= row < stop:
                return before + row - start
            before += stop - start
        raise ValueError(f"row {row} is not of this host")
