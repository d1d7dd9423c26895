"""Silent corruption: devices that compute or keep other bits than their peers, found by name.

    replicas   a checksum of each device's shard of each leaf of the state; shards of the same
               index must agree
    rows       the token losses of one microbatch, computed again with its rows on other devices

Both compare integers, sums of bits that do not depend on their order, so that a healthy run gives
no alarm.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lmwright.core.contract import Batch
from lmwright.core.param import Tree, walk
from lmwright.core.sharding import AXES, batch_sharding, batch_ways
from lmwright.errors import UserError
from lmwright.objectives.clm import next_tokens
from lmwright.program.plan import Plan
from lmwright.train.evaluated import eval_weights
from lmwright.train.hooks import Hook, Running
from lmwright.train.signals import EXIT_CORRUPTED

WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
CURE = (
    "start it again, on other machines if it comes back: it continues from its newest checkpoint, "
    "which was checked"
)


class Corrupted(UserError):
    """A device has other bits than its peers."""

    exit_code = EXIT_CORRUPTED


class Checks(Hook):
    """Looks for corruption every `train.check_every_steps` and before each save; raises UserError
    if it finds any."""

    def __init__(self, plan: Plan):
        self._plan, self._every = plan, plan.run.train.check_every_steps
        self._checked = 0
        self._sums = self._prints = None

    def after_step(self, session: Running, step: int) -> None:
        if step % self._every == 0:
            self._check_replicas(session, step)
            self._check_rows(session, step)

    def before_save(self, session: Running, step: int) -> None:
        self._check_replicas(session, step)

    def _check_replicas(self, session: Running, step: int) -> None:
        if self._checked == step:
            return
        self._checked = step
        if self._sums is None:
            self._sums = replica_sums(self._plan.mesh, session.state)
        if odd := odd_replicas(session.state, np.asarray(self._sums(session.state))):
            leaf, devices = odd[0]
            more = f" (and {len(odd) - 1} more arrays)" if len(odd) > 1 else ""
            raise Corrupted(
                f"train.check_every_steps: after step {step}, {leaf}{more} has other bits on "
                f"{_names(devices)} than its replicas; {CURE}"
            )

    def _check_rows(self, session: Running, step: int) -> None:
        plan = self._plan
        shards = batch_ways(plan.mesh)
        experts = any("experts" in param.axes for _, param in walk(plan.spec))
        if shards == 1 or experts:  # whose tokens meet others after a turn
            return
        rows = jax.tree.map(lambda a: a[0], session.batch)
        if self._prints is None:
            placed = batch_sharding(plan.mesh)
            self._prints = jax.jit(partial(row_prints, plan), out_shardings=_whole(plan.mesh))
            self._turned = jax.jit(_turned, static_argnums=1, out_shardings=placed)
        share = rows.tokens.shape[0] // shards
        prints = []
        for turn in range(min(shards, 3)):
            turned = self._turned(rows, turn * share)
            losses = np.asarray(self._prints(session.state, turned))
            prints.append(np.roll(losses, -turn * share))
        if groups := odd_shards(np.stack(prints), share):
            places = batch_sharding(plan.mesh).devices_indices_map(rows.tokens.shape)
            guilty = [d for d, index in places.items() if (index[0].start or 0) // share in groups]
            raise Corrupted(
                f"train.check_every_steps: after step {step}, losses of the same rows have "
                f"other bits on {_names(guilty)} than on other devices; {CURE}"
            )


def checking(plan: Plan) -> tuple[Hook, ...]:
    """The hook of a run that looks for corruption."""
    return (Checks(plan),) if plan.run.train.check_every_steps else ()


def replica_sums(mesh: Mesh, state: Tree) -> Any:
    """The jitted function from a state like this one to checksums uint32 [devices, leaves]."""
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(state)]
    local = jax.shard_map(
        lambda leaves: jnp.stack([checksum(_on_device(leaf)) for leaf in leaves])[None],
        mesh=mesh,
        in_specs=(specs,),
        out_specs=PartitionSpec(AXES),
        check_vma=False,
    )
    return jax.jit(lambda state: local(jax.tree.leaves(state)), out_shardings=_whole(mesh))


def checksum(x: Array) -> Array:
    """Sum of an array's bits, uint32, weighed by odd numbers: any flipped bit changes it."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, WORDS[x.dtype.itemsize])
    place, stride = jnp.zeros((), jnp.uint32), 1
    for axis in reversed(range(x.ndim)):
        place = place + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
        stride = stride * x.shape[axis] % 2**32
    return jnp.sum(x.astype(jnp.uint32) * (2 * place + 1), dtype=jnp.uint32)


def odd_replicas(state: Tree, sums: np.ndarray) -> list[tuple[str, list[jax.Device]]]:
    """The leaves whose replicas differ, and the devices in the minority; all if there is none."""
    odd = []
    for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        order = {d: place for place, d in enumerate(leaf.sharding.mesh.devices.flat)}
        replicas: dict[str, list[jax.Device]] = defaultdict(list)
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            replicas[str(index)].append(device)
        devices = [
            group[place]
            for group in replicas.values()
            for place in minority([int(sums[order[device], number]) for device in group])
        ]
        if devices:
            odd.append((jax.tree_util.keystr(path, simple=True, separator="/"), devices))
    return odd


def minority(values: Sequence[int]) -> list[int]:
    """Places of the values that are not the most common one; all where two are equally common."""
    counts = Counter(values).most_common(2)
    if len(counts) == 1:
        return []
    tie = counts[0][1] == counts[1][1]
    return [place for place, value in enumerate(values) if tie or value != counts[0][0]]


def row_prints(plan: Plan, state: Tree, rows: Batch) -> Array:
    """Sums of the bits of the token losses of each row, uint32 [B]; traceable."""
    run, (first, *_) = plan.run, plan.training.trainees
    model, w = run.objective.exported(run.model, eval_weights(plan, state, first.name))
    hidden, _ = model.hidden(w, rows, plan.compute)
    targets, _ = next_tokens(rows)
    length = rows.tokens.shape[1]
    chunk = max(n for n in range(1, plan.compute.loss_chunk_tokens + 1) if length % n == 0)

    def pieces(a: Array) -> Array:
        return jnp.moveaxis(a.reshape(a.shape[0], -1, chunk, *a.shape[2:]), 1, 0)

    def prints(piece: tuple[Array, Array]) -> Array:
        x, wanted = piece
        logits = model.logits(model.head_weights(w), x).astype(jnp.float32)
        wanted = wanted[..., None] % logits.shape[-1]  # a classifier has fewer than ids
        chosen = jnp.take_along_axis(logits, wanted, axis=-1)[..., 0]
        return jax.vmap(checksum)(jax.nn.logsumexp(logits, axis=-1) - chosen)

    sums = jax.lax.map(prints, (pieces(hidden), pieces(targets)))
    return jnp.sum(sums * (2 * jnp.arange(len(sums), dtype=jnp.uint32)[:, None] + 1), axis=0)


def odd_shards(prints: np.ndarray, share: int) -> set[int]:
    """Shards of the batch, of `share` rows each, whose results differ in bits: `prints[turn, r]` is
    the checksum of row r as shard `r // share + turn` computed it."""
    rows = prints.shape[1]
    return {
        (row // share + turn) % (rows // share)
        for row in range(rows)
        for turn in minority([int(value) for value in prints[:, row]])
    }


def _turned(rows: Batch, by: int) -> Batch:
    return jax.tree.map(lambda a: jnp.roll(a, by, axis=0), rows)


def _on_device(x: Array) -> Array:
    """The array in the device's memory; moments may be in the host's (`optim.offload`)."""
    return jax.device_put(x, jax.memory.Space.Device)


def _whole(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def _names(devices: Iterable[jax.Device]) -> str:
    return ", ".join(f"device {d.id} of host {d.process_index}" for d in devices)
