"""Distillation as a kind of training: another kind, with a teacher among the frozen weights.

    frozen weights of the other kind --+
    weights of a trainee --------------+--its bind--> student --+
    teacher, frozen --------------------------------------------+--> weights of the objective

With adapters inside the rounding ([lora] in [qat]) a student that learns from its own start has it
at hand: the frozen base is the teacher, and there is no second copy. No checkpoint holds a teacher,
only the hash of its weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh

from lmwright.core.compute import DTYPES
from lmwright.core.leaves import Storage
from lmwright.core.param import Param, Tree, init_weights, nest, walk
from lmwright.core.quantize import quantize
from lmwright.core.sharding import weight_shardings
from lmwright.errors import UserError
from lmwright.models.counts import part_of
from lmwright.objectives.distill import TEACHER, student_of
from lmwright.program.trainee import Held, Trainee, Training


@dataclass(frozen=True)
class DistillTraining(Training[Any]):
    """Training of another kind, beside a teacher."""

    inner: Training

    def __post_init__(self) -> None:
        self.run.objective.refuse(self.run)

    @property
    def model(self) -> Any:
        """The teacher."""
        return self.run.objective.model_of_teacher(self.run.model)

    @property
    def shares_base(self) -> bool:
        """True if the frozen weights of the other kind are the teacher's."""
        return self.run.objective.teacher is None and self.inner.freezes

    @cached_property
    def teacher_spec(self) -> Tree:
        """The weights of the teacher as Params."""
        return self.model.spec()

    @cached_property
    def storages(self) -> dict[str, Storage]:
        """Storage of each weight of the teacher: matrices in the precision of their products."""
        return {path: self._storage(param) for path, param in walk(self.teacher_spec)}

    def _storage(self, param: Param) -> Storage:
        # ternary codes of rounded floats would be others
        wide = not param.is_matrix or part_of(param) == "router" or param.ternary
        return "fp32" if wide else self.run.train.activations

    @property
    def flops_per_weight(self) -> int:  # type: ignore[override]
        """FLOPs of the training that the student has."""
        return self.inner.flops_per_weight

    @property
    def freezes(self) -> bool:  # type: ignore[override]
        """True if the student's own weights are frozen."""
        return self.inner.freezes

    @property
    def trainees(self) -> tuple[Trainee, ...]:
        """The students."""
        return self.inner.trainees

    @property
    def listed(self) -> str:
        """The list of trainees in the run file."""
        return self.inner.listed

    def held(self) -> list[Held]:
        """Every weight of the student, and those of the teacher; shared ones take no memory."""
        sizes = {"fp32": 4.0, "bf16": 2.0}
        teacher = (
            Held(f"{TEACHER}.{path}", param, 0.0 if self.shares_base else sizes[kind], False)
            for (path, param), kind in zip(
                walk(self.teacher_spec), self.storages.values(), strict=True
            )
        )
        return [*self.inner.held(), *teacher]

    def refuse(self, mesh: Mesh, active: Sequence[Trainee]) -> None:
        """Raises UserError where these trainees cannot train on the mesh."""
        self.inner.refuse(mesh, active)
        self.teacher_shardings(mesh)

    def teacher_shardings(self, mesh: Mesh) -> Tree:
        """Shardings of the teacher, by its axes. Raises UserError where one does not divide."""
        try:
            return weight_shardings(self.teacher_spec, mesh)
        except UserError as error:
            raise error.at("objective.teacher") from error

    def abstract_frozen(self, mesh: Mesh) -> Tree:
        """The frozen weights of the other kind, and the teacher."""
        frozen = self.inner.abstract_frozen(mesh)
        if self.shares_base:
            return frozen
        shardings = dict(walk(self.teacher_shardings(mesh)))
        teacher = (
            (path, jax.ShapeDtypeStruct(
                param.shape, DTYPES[self.storages[path]], sharding=shardings[path]
            ))
            for path, param in walk(self.teacher_spec)
        )  # fmt: skip
        return frozen | {TEACHER: nest(teacher)}

    def make_frozen(self, key: Array) -> Tree:
        """Randomly initialized ones."""
        frozen = self.inner.make_frozen(key)
        if self.shares_base:
            return frozen
        params, kinds = dict(walk(self.teacher_spec)), self.storages
        fresh = walk(init_weights(self.teacher_spec, key))
        kept = ((path, quantize(a, params[path], kinds[path])) for path, a in fresh)
        return frozen | {TEACHER: nest(kept)}

    def shardings(self, trainee: Trainee, mesh: Mesh) -> Tree:
        """Shardings of a trainee's weights."""
        return self.inner.shardings(trainee, mesh)

    def init(self, trainee: Trainee, frozen: Tree, key: Array) -> Tree:
        """A trainee's fresh weights; traceable."""
        return self.inner.init(trainee, student_of(frozen), key)

    def parts(self, trainee: Trainee, weights: Tree) -> Any:
        """A trainee's weights as `bind` takes them; traceable."""
        return self.inner.parts(trainee, weights)

    def stack(self, parts: Sequence[Any], order: Sequence[int]) -> Any:
        """Parts of several trainees with a leading axis."""
        return self.inner.stack(parts, order)

    def bind(self, frozen: Tree, parts: Any, key: Array | None = None, dropout: Any = None) -> Tree:
        """The student's weights, with the teacher beside them where it is there."""
        student = self.inner.bind(student_of(frozen), parts, key, dropout)
        teacher = frozen if self.shares_base else frozen.get(TEACHER)
        return student if teacher is None else student | {TEACHER: teacher}

    def scale_updates(self, updates: Tree) -> Tree:
        """The optimizer's updates as they are applied."""
        return self.inner.scale_updates(updates)

    def merged(self, trainee: Trainee, frozen: Tree, weights: Tree) -> Tree:
        """float32 weights of the student with a trainee in it."""
        return self.inner.merged(trainee, student_of(frozen), weights)

    def codes(
        self, trainee: Trainee, frozen: Tree, weights: Tree
    ) -> dict[str, tuple[Array, Array]]:
        """Integers and scales of the student's rounded weights, by path."""
        return self.inner.codes(trainee, student_of(frozen), weights)
