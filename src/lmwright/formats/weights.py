"""The weights at a place, for a run that starts from them or reads its own.

Adapters lie beside a base, whose place may be the run directory of other adapters, and so on.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.sharding import Mesh as JaxMesh

from lmwright.checkpoint.saved import SavedStates
from lmwright.config.run import Mesh, Run
from lmwright.core.contract import Model
from lmwright.core.leaves import Storage
from lmwright.core.param import Param, Tree, first_difference, nest, walk
from lmwright.core.quantize import quantize
from lmwright.errors import UserError
from lmwright.formats.hf_stream import on_devices
from lmwright.formats.loaded import load_files
from lmwright.formats.open import RUN, Origin, open_origin, open_run
from lmwright.formats.tensor_hash import add_to_hash
from lmwright.formats.train_state import pick, restore
from lmwright.models.conversion import ADDING
from lmwright.models.heads import left_out
from lmwright.models.over import encoder_of
from lmwright.program.lora import storages
from lmwright.program.plan import Plan, resolve
from lmwright.program.state import averaged_weights, fresh_frozen
from lmwright.program.targets import frozen_spec, whole_names
from lmwright.program.trainee import Frozen
from lmwright.storage.mirror import shown

Codes = dict[str, tuple[np.ndarray, np.ndarray]]


def refuse_unlike(place: Origin, spec: Tree, but: Collection[str] = ()) -> None:
    """UserError unless the weights of a place have the names and shapes of `spec`, `but` for some
    of its own."""
    there = {name: tree for name, tree in place.spec.items() if name not in but}
    shapes = ({name: p.shape for name, p in walk(tree)} for tree in (spec, there))
    refuse_difference(place, *shapes)


def refuse_difference(
    place: Origin, ours: Tree, theirs: Tree, whose: str = "this run's model",
    cure: str = "leave [model] and recipes that bring one (quickstart) out, or change only what no "
    "weight depends on",
) -> None:  # fmt: skip
    """UserError unless the shapes at a place are ours, those of `whose` weights."""
    if difference := first_difference(ours, theirs):
        name, want, have = difference
        raise UserError(f"{name} is {have} in {place.path} and {want} in {whose}; {cure}")


def refuse_unlike_base(place: Origin, spec: Tree, fresh: Collection[str]) -> None:
    """`refuse_unlike` for an objective with `fresh` weights or without a head: one of the place's
    own, over documents or over its vocabulary, is left out."""
    but = {*fresh, *left_out(encoder_of(place.model))} if fresh else ()
    refuse_unlike(place, spec, but)


def headless_weights(plan: Plan) -> set[str]:
    """Names of weights of the run's model that only a head reads which the run leaves out."""
    model = plan.run.model
    return set(model.head_weights(model.spec())) - set(plan.spec)


def fresh_weights(plan: Plan, origin: Origin) -> tuple[str, ...]:
    """Names of weights that start fresh around the origin's: of a head that it does not have, or
    that is of another kind or for other classes."""
    new = plan.run.objective.new_weights
    theirs = origin.model
    if origin.kind == RUN and origin.run.objective.new_weights:
        theirs = origin.run.objective.model_over(origin.run.model)
    alike = new and _head(plan.run.objective.model_over(plan.run.model)) == _head(theirs)
    return () if alike else tuple(name for name in new if name in plan.spec)


def _head(model: Model) -> tuple[type, Any]:
    return type(model), getattr(model, "labels", None)


def added_weights(plan: Plan, origin: Origin) -> dict[str, Param]:
    """The weights that start fresh because the origin is of a family without them, by path."""
    kinds = (getattr(origin.model, "kind", ""), plan.run.model.kind)
    names = ADDING.get(kinds, ())
    return {path: param for path, param in walk(plan.spec) if path.rpartition(".")[2] in names}


def taken_spec(plan: Plan, origin: Origin, fresh: Collection[str], added: Collection[str]) -> Tree:
    """Spec of the weights that are taken from the origin. Raises UserError where it has others."""
    old = {name: tree for name, tree in plan.spec.items() if name not in fresh}
    old = nest((path, param) for path, param in walk(old) if path not in added)
    headless = headless_weights(plan)
    if fresh or headless:  # and a head that is no part of the model
        headless |= set(origin.spec) - set(plan.run.model.spec()) - set(plan.spec)
    refuse_unlike_base(origin, old, {*fresh, *headless})
    return old


def host_weights(place: Origin) -> Tree:
    """Weights as float32 host arrays. Raises UserError where they cannot be read."""
    if place.kind == RUN:  # of which no tokenizer is wanted
        run, w = load_run_weights(place.path, place.step)
        w = jax.tree.map(np.asarray, w)  # whatever mesh the caller has set
        _, w = run.objective.exported(run.model, w)
    else:
        w = load_files(place).weights
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), w)


def placed_weights(place: Origin, shardings: Tree) -> Tree:
    """Weights as float32 arrays on devices, as `shardings` say or on the first device; files are
    read tensor by tensor, so that no host holds them all."""
    if place.kind != RUN:
        return load_files(place).load(dtype=jnp.float32, shardings=shardings)
    where = dict(walk(shardings))
    return nest((name, on_devices(a, where.get(name))) for name, a in walk(host_weights(place)))


def load_run_weights(run_dir: str | Path, step: int | None = None) -> tuple[Run, Tree]:
    """The run of a directory and its weights at a step, or the newest intact ones (the moving
    average where the run keeps one), on this process's first device. The directory is only read,
    so a run may be training there. Raises UserError where there are none."""
    return load_run_at(run_dir, step)[:2]


def load_run_at(
    run_dir: str | Path, step: int | None = None, *, adapter: str | None = None,
    num_devices: int = 1,
) -> tuple[Run, Tree, int]:  # fmt: skip
    """The result of `load_run_weights`, and the step that the weights are of; `adapter` names one
    of several, and is merged into its base. On several devices they lie as in the run's own mesh.
    Raises UserError for a mesh that has others."""
    plan, run, (trainee, frozen, weights), step = _trained_part(
        Path(run_dir), step, adapter, num_devices
    )
    with jax.set_mesh(plan.mesh):
        return run, plan.training.merged(trainee, frozen.weights, weights), step


def load_as_trained(
    run_dir: str | Path, step: int | None = None, *, adapter: str | None = None
) -> tuple[Run, Tree, int]:
    """The result of `load_run_at` with the weights as the objective sees them in training: an
    adapter stays beside its base, with which some objectives compare it."""
    plan, run, (trainee, frozen, weights), step = _trained_part(Path(run_dir), step, adapter)
    with jax.set_mesh(plan.mesh):
        return run, plan.training.bind(frozen.weights, plan.training.parts(trainee, weights)), step


def load_codes(run_dir: str | Path, step: int | None, adapter: str | None = None) -> Codes:
    """Integers and scales of the weights that a run trained rounded, by path."""
    plan, _, (trainee, frozen, weights), _ = _trained_part(Path(run_dir), step, adapter)
    with jax.set_mesh(plan.mesh):
        return jax.tree.map(np.asarray, plan.training.codes(trainee, frozen.weights, weights))


def _trained_part(
    folder: Path, step: int | None, adapter: str | None, num_devices: int = 1
) -> tuple[Any, ...]:
    """(plan, run, (trainee, frozen weights, its weights), step) on this process's first devices."""
    run = open_run(folder).run
    if num_devices == 1:
        alone = replace(run, mesh=Mesh())
    else:  # rows, of which none is computed, divide
        rows = run.train.global_batch_size * num_devices
        alone = replace(run, train=replace(run.train, global_batch_size=rows))
    try:
        plan = resolve(alone, jax.local_devices()[:num_devices])
    except UserError as error:
        raise error if num_devices == 1 else error.at(f"--devices {num_devices}") from None
    trainee = pick(plan, adapter)
    with jax.set_mesh(plan.mesh):  # whichever the caller has set
        frozen, state = _saved_state(plan, folder, step)
        weights = averaged_weights(state["trained"][trainee.name])
    return plan, run, (trainee, frozen, weights), int(state["step"])


def trained(plan: Plan, folder: Path, step: int | None = None) -> tuple[Frozen, dict[str, Tree]]:
    """The frozen weights, and each trainee's (the moving average where there is one), newest or of
    a step. Raises UserError where there is no checkpoint."""
    frozen, state = _saved_state(plan, folder, step)
    return frozen, {name: averaged_weights(part) for name, part in state["trained"].items()}


def _saved_state(plan: Plan, folder: Path, step: int | None) -> tuple[Frozen, Tree]:
    frozen = load_frozen(plan)
    restored = restore(plan, SavedStates(folder), frozen, step)
    if restored is None:
        raise UserError(f"{shown(folder)}: has no checkpoint yet; train at least one step")
    return frozen, restored[0]


def load_frozen(plan: Plan) -> Frozen:
    """The frozen weights, made or read, as the run keeps them, without a teacher. Raises UserError
    where they are another model's."""
    path = plan.run.train.init_from
    if not plan.training.freezes:
        return Frozen({})
    if path is None:
        return fresh_frozen(plan)
    shapes = plan.training.abstract_frozen(plan.mesh)  # refuses before anything is read
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    params, places = dict(walk(frozen_spec(plan.run))), dict(walk(shardings))
    kinds = storages(plan.run)
    try:
        place = open_origin(path, plan.run.model)
        new = plan.run.objective.new_weights
        spec = {name: tree for name, tree in plan.spec.items() if name not in new}
        refuse_unlike_base(place, spec, {*new, *headless_weights(plan)})
        fresh = fresh_weights(plan, place)
        weights = host_weights(place)
    except UserError as error:
        raise error.at("train.init_from") from error
    leaves, digest = keep_frozen(plan.mesh, _some(weights, params), params, kinds, places)
    whole = {k: weights[k] for k in sorted(whole_names(plan.run)) if k not in fresh}
    read = lambda: nest(_some(host_weights(place), params))  # noqa: E731
    return Frozen(leaves, path, digest, read, whole)


def keep_frozen(
    mesh: JaxMesh,
    weights: Iterable[tuple[str, Any]],
    params: Mapping[str, Param],
    kinds: Mapping[str, Storage],
    places: Mapping[str, Any],
) -> tuple[Tree, str]:
    """Host weights by path on the mesh, stored as `kinds` say and placed as `places`, and their
    hash."""
    digest, leaves = xxhash.xxh3_128(), []
    for name, array in weights:
        add_to_hash(digest, name, array)
        keep = jax.jit(quantize, static_argnums=(1, 2), out_shardings=places[name])
        with jax.set_mesh(mesh):
            leaves.append((name, keep(array, params[name], kinds[name])))
    return nest(leaves), digest.hexdigest()


def _some(weights: Tree, paths: Collection[str]) -> list[tuple[str, Any]]:
    return [(name, leaf) for name, leaf in walk(weights) if name in paths]
