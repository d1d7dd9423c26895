"""The teacher of a distillation, among what a session holds frozen.

Only training needs it: evaluation and export of a run do not read it.
"""

from dataclasses import replace

import jax

from lmwright.core.param import Tree, walk
from lmwright.data.rows.store import TokenStore
from lmwright.errors import UserError
from lmwright.formats.open import Origin, open_origin
from lmwright.formats.weights import host_weights, keep_frozen, refuse_difference
from lmwright.objectives.distill import TEACHER
from lmwright.program.distill_training import DistillTraining
from lmwright.program.plan import Plan
from lmwright.program.trainee import Frozen
from lmwright.train.start import refuse_tokenizer


def with_teacher(plan: Plan, frozen: Frozen, store: TokenStore) -> Frozen:
    """Frozen weights with the teacher beside them, read from its place. Raises UserError for
    another model or tokenizer there."""
    training, run = plan.training, plan.run
    assert isinstance(training, DistillTraining)
    if training.shares_base:
        return frozen
    named = run.objective.teacher
    shapes = training.abstract_frozen(plan.mesh)[TEACHER]
    places = dict(walk(jax.tree.map(lambda leaf: leaf.sharding, shapes)))
    try:
        place = open_origin(named or run.train.init_from, training.model)
        refuse_tokenizer(place, store)
        _refuse_unlike(place, training.teacher_spec, bool(named))
        weights = walk(host_weights(place))
    except UserError as error:
        raise error.at("objective.teacher" if named else "train.init_from") from error
    params = dict(walk(training.teacher_spec))
    teacher, digest = keep_frozen(plan.mesh, weights, params, training.storages, places)
    return replace(frozen, weights=frozen.weights | {TEACHER: teacher}, teacher=digest)


def _refuse_unlike(place: Origin, spec: Tree, named: bool) -> None:
    """UserError unless the weights of a place are those of the teacher."""
    shapes = ({path: param.shape for path, param in walk(tree)} for tree in (spec, place.spec))
    cure = "leave objective.teacher_model out, so that it is read there"
    if not named:
        cure = "name it in objective.teacher, which may be another model than the student"
    refuse_difference(place, *shapes, "the teacher", cure)
