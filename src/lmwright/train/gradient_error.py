"""Gradient error of choices that change gradients: measured on the weights and the rows of a run.

    the same rows --exact saves--> gradients, to the host --+--> error by part of the model
                  --as the run--> gradients ----------------+

A few rows are enough, so that what is exact fits where a whole step of it does not. Measured
before the first step of a session, printed, and kept in metrics.jsonl for the report.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from lmwright.core.cards import is_full
from lmwright.core.contract import Batch
from lmwright.core.param import Param, Tree, walk
from lmwright.core.sharding import batch_ways
from lmwright.data.rows.loader import Loader
from lmwright.data.rows.store import TokenStore
from lmwright.program.plan import Plan, step_options
from lmwright.program.state import own_step
from lmwright.program.step import summed_gradients
from lmwright.program.trainee import Trainee
from lmwright.train.hooks import Hook, Running
from lmwright.train.hosts import HostRows

TOKENS = 4096  # of each batch shard, at least one row
FACTORS = ("a", "b", "magnitude")  # of an adapter
EVENT = "gradient error"
SUMS = ("error", "exact", "both", "ours")  # of squares, and of products of the two gradients

Sums = Counter[tuple[str, str]]
"""Sums by part of the model and name of `SUMS`."""


@dataclass(frozen=True)
class GradientError:
    """Distance of a run's gradients from exact ones, on some of its rows."""

    setting: str
    """The choice that changes them, as in `train.block_inputs = int8`."""
    rows: int
    tokens: int
    """Tokens of each row."""
    sums: Sums

    def sum(self, name: str) -> float:
        """A sum over all parts."""
        return sum(value for (_, each), value in self.sums.items() if each == name)

    @property
    def error(self) -> float:
        """Norm of the difference over the norm of the exact gradient."""
        return _ratio(self.sum("error"), self.sum("exact"))

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two gradients."""
        norms = (self.sum("exact") * self.sum("ours")) ** 0.5
        return self.sum("both") / norms if norms else float("nan")

    @property
    def parts(self) -> dict[str, float]:
        """The error of each part that has a gradient, the largest first."""
        names = {part for part, _ in self.sums}
        errors = {
            part: _ratio(self.sums[part, "error"], self.sums[part, "exact"])
            for part in names
            if self.sums[part, "exact"]
        }
        return dict(sorted(errors.items(), key=lambda item: -item[1]))

    @property
    def text(self) -> str:
        """The error in one sentence."""
        parts = ", ".join(f"{part} {error:.2%}" for part, error in self.parts.items())
        return (
            f"{self.setting} changes gradients by {self.error:.2%} (cosine {self.cosine:.6f}), by "
            f"{self.rows} rows of {self.tokens:,} tokens; by part: {parts}"
        )

    def fields(self) -> dict[str, Any]:
        """The record for metrics.jsonl; errors are fractions."""
        whole = {"error": self.error, "cosine": self.cosine}
        facts = {"setting": self.setting, "rows": self.rows, "tokens": self.tokens}
        return facts | whole | {f"{part} error": error for part, error in self.parts.items()}


def _ratio(error: float, exact: float) -> float:
    return (error / exact) ** 0.5 if exact else float("nan")


def setting_of(plan: Plan) -> str:
    """The choice of a run that changes its gradients; empty where they are exact."""
    kept = plan.run.train.block_inputs
    return "" if kept == "exact" else f"train.block_inputs = {kept}"


def measure(plan: Plan, trainee: Trainee, state: Tree, store: TokenStore) -> GradientError | None:
    """The gradient error of a trainee at a state, on rows that it is about to read; None where not
    even one row a device can be taken exactly."""
    at = int(own_step(state["trained"][trainee.name]))
    for rows, tokens, exact in ways_to_measure(plan, trainee):
        batch = _batch(plan, trainee, store, at, rows, tokens)
        try:
            sums = compare(plan, exact, trainee, state, batch)
        except jax.errors.JaxRuntimeError as error:
            if not is_full(error):
                raise
        else:
            return GradientError(setting_of(plan), rows, tokens, sums)
    return None


def ways_to_measure(plan: Plan, trainee: Trainee) -> Iterator[tuple[int, int, Plan]]:
    """(rows, tokens of each, plan with exact gradients), from what is best to what needs least
    memory."""
    train, ways = plan.run.train, batch_ways(plan.mesh)
    exact = replace(plan, compute=replace(plan.compute, block_inputs="exact"))
    most = trainee.rows // train.num_microbatches // ways
    several = max(1, min(most, TOKENS // plan.seq_len))
    yield several * ways, plan.seq_len, exact
    if several > 1:
        yield ways, plan.seq_len, exact
    if train.offload == "none":
        yield (
            ways,
            plan.seq_len,
            replace(exact, compute=replace(exact.compute, offload="block_inputs")),
        )
    for part in (2, 4, 8):
        tokens, odd = divmod(plan.seq_len, part)
        if not odd and tokens % (train.mlp_chunk_tokens or 1) == 0 and tokens % 128 == 0:
            yield ways, tokens, exact


def compare(plan: Plan, exact: Plan, trainee: Trainee, state: Tree, batch: Batch) -> Sums:
    """Sums over the gradients of two plans for one batch, of all processes' weights. Raises
    JaxRuntimeError where one does not fit."""
    there = [_shards(leaf) for leaf in _gradients(exact, trainee, state, batch)]
    here = _gradients(plan, trainee, state, batch)
    sums: Sums = Counter()
    for (path, param), kept, leaf in zip(walk(trainee.spec), there, here, strict=True):
        for index, ours in _shards(leaf).items():
            sums.update(sums_of(part_of(path, param), kept[index], ours))
    return _of_all_processes(sums)


def sums_of(part: str, exact: np.ndarray, ours: np.ndarray) -> Sums:
    """`SUMS` over one array of each gradient."""
    a, b = (each.astype(np.float64).ravel() for each in (exact, ours))
    pairs = ((a - b, a - b), (a, a), (a, b), (b, b))
    return Counter({(part, name): float(np.dot(*p)) for name, p in zip(SUMS, pairs, strict=True)})


def _shards(leaf: Array) -> dict[str, np.ndarray]:
    """Pieces of an array that this process holds, each once among all processes."""
    pieces = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    return {str(shard.index): np.asarray(shard.data) for shard in pieces}


def _of_all_processes(sums: Sums) -> Sums:
    if jax.process_count() == 1:
        return sums
    names = sorted(sums)  # of the same spec, in the same order
    mine = np.array([sums[name] for name in names])
    whole = multihost_utils.process_allgather(mine).sum(axis=0)
    return Counter(dict(zip(names, map(float, whole), strict=True)))


def _gradients(plan: Plan, trainee: Trainee, state: Tree, batch: Batch) -> list[Array]:
    """Leaves of a trainee's summed gradient, sharded as its weights are."""

    def run(frozen: Tree, weights: Tree, batch: Batch) -> Tree:
        key = jax.random.key(plan.run.seed)
        of_one = {trainee.name: weights}
        grads, _ = summed_gradients(plan, (trainee,), frozen, of_one, batch, [key])
        return grads[trainee.name]

    shardings = plan.training.shardings(trainee, plan.mesh)
    step: Callable[..., Tree] = jax.jit(
        run, out_shardings=shardings, compiler_options=step_options(plan) or None
    )
    with jax.set_mesh(plan.mesh):
        weights = state["trained"][trainee.name]["weights"]
        return jax.tree.leaves(jax.block_until_ready(step(state["frozen"], weights, batch)))


def _batch(
    plan: Plan, trainee: Trainee, store: TokenStore, at: int, rows: int, tokens: int
) -> Batch:
    """The first rows of step `at`, cut to `tokens`, as one microbatch."""
    host = replace(HostRows.of(plan, rows), num_microbatches=1)
    with Loader(store, trainee.rows, stretches=host.stretches, start_step=at, host=None) as loader:
        arrays = loader.batch(at)
    cut = {name: arrays[name][:, :tokens] for name in Batch.__dataclass_fields__}
    return Batch(**{name: host.place(plan, array) for name, array in cut.items()})


def part_of(path: str, param: Param) -> str:
    """The part of the model that a weight belongs to: norms, biases, or its name, as `q`."""
    *folders, name = path.split(".")
    if name in FACTORS and folders:
        name = folders[-1]
    elif not param.is_matrix:
        return "biases" if name.endswith("bias") else "norms"
    return name


class GradientErrors(Hook):
    """Measures the first of the trainees at the start of a session, prints what was found and
    writes it down; does nothing for a run whose gradients are exact."""

    def __init__(self, plan: Plan, stores: Mapping[str, TokenStore]):
        self._plan, self._stores = plan, stores

    def at_start(self, session: Running, step: int) -> None:
        setting = setting_of(self._plan)
        if not setting:
            return
        first = session.active[0]
        found = measure(self._plan, first, session.state, self._stores[first.name])
        if found is None:
            text = "not known: not even a part of one row a device fits with exact gradients"
            session.metrics.event(EVENT, step=step, setting=setting, reason=text)
            session.display.note(f"{setting} changes gradients; by how much is {text}")
            return
        session.metrics.event(EVENT, step=step, **found.fields())
        session.display.note(found.text)
