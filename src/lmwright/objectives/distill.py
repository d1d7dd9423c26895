"""Distillation: a student learns a frozen teacher's distribution of the next token
(https://arxiv.org/abs/1503.02531).

    tokens --> teacher, frozen --> p --+
    tokens --> student ----------> q --+--> (1 - alpha) cross-entropy + alpha t^2 KL(p || q)

The weights of a batch are the student's, with the teacher's below one name that no weight has. What
is trained, saved, measured and exported is the student.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
from jax import Array, lax
from pydantic import Field

from lmwright.config.registry import Kind
from lmwright.config.run import Free, Place, Positive, Run, section, seq_len_of
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model, Objective, Work
from lmwright.core.param import Tree
from lmwright.errors import UserError
from lmwright.models import KINDS
from lmwright.nn.soft_targets import chunked_distillation
from lmwright.objectives.clm import Clm, next_tokens, with_penalties

TEACHER = "(teacher)"


@section
class Distill(Objective):
    """Distillation from a frozen teacher."""

    kind: Literal["distill"] = "distill"
    teacher: Free[Place[str | None]] = None
    """Place of the teacher: a run, Hugging Face, GGUF; with [qat], unset is train.init_from as it
    was before rounding."""
    teacher_model: Annotated[
        Annotated[Any, Kind("model", KINDS)] | None,
        Field(description="Model of the teacher; read at its place if unset."),
    ] = None
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the teacher in the loss; the rest is the cross-entropy of the text."""
    temperature: Positive = 1.0
    """Both models' logits are divided by it where they are compared."""

    has_teacher: ClassVar[bool] = True

    @property
    def reads_from(self) -> Mapping[str, str | None]:
        """The place of the teacher."""
        return {"objective.teacher": self.teacher}

    def __post_init__(self) -> None:
        if self.teacher_model is not None and self.teacher is None:
            raise UserError(
                "objective.teacher_model: has no effect without objective.teacher; set that, too"
            )

    def refuse(self, run: Run) -> None:
        """Raises UserError for a run without a teacher, or with one that does not fit it."""
        if self.teacher is None and run.qat is None:
            raise UserError(
                "objective.teacher: is missing; name a model (only with [qat] may it be left out, "
                "for the weights before rounding)"
            )
        if self.teacher is None and run.train.init_from is None:
            raise UserError(
                "objective.teacher: is missing, and there is no train.init_from to learn from; set "
                "one of them"
            )
        context, length = self.model_of_teacher(run.model).seq_len, seq_len_of(run)
        if self.teacher is not None and length > context:
            raise UserError(
                f"objective.teacher: is built for rows of {context} tokens, and data.pack.seq_len "
                f"is {length}; shorten the rows or give another teacher"
            )

    def model_of_teacher(self, model: Model) -> Model:
        """The teacher of a student. Raises UserError for one that does not predict the same
        tokens."""
        teacher = self.teacher_model
        if teacher is None:
            return model
        if teacher.both_ways or teacher.fills_masks:
            what = "fills in masks" if teacher.fills_masks else "is an encoder"
            raise UserError(
                f"objective.teacher: a {teacher.kind} model {what} and predicts no next tokens; "
                "give a decoder"
            )
        if teacher.vocab_size != model.vocab_size:
            raise UserError(
                f"objective.teacher: predicts {teacher.vocab_size:,} tokens and the student "
                f"{model.vocab_size:,}; give a teacher of the student's tokenizer and vocabulary"
            )
        return teacher

    def works(self, model: Model, seq_len: int) -> Mapping[str, Work]:
        """The work of the student, and the teacher's forward pass."""
        teacher = self.model_of_teacher(model).work(seq_len)
        return {"": model.work(seq_len), TEACHER: replace(teacher, forward_only=True)}

    def exported(self, model: Model, w: Tree) -> tuple[Model, Tree]:
        """The student."""
        return model, student_of(w)

    def for_eval(self) -> "Distill":
        """The objective on held-out rows: the cross-entropy of the text, by which students of any
        teacher compare."""
        return _HeldOut(**vars(self))

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Sums over the batch's targets; `key` is unused, nothing is sampled."""
        teacher, student, frozen = self.model_of_teacher(model), student_of(w), w[TEACHER]
        frozen = lax.stop_gradient(frozen)
        # it has no backward pass, for which results would be kept in some form
        forward = replace(compute, remat="none", offload="none", block_inputs="exact")
        y, _ = teacher.hidden(frozen, batch, forward)
        x, aux = model.hidden(student, batch, compute)
        targets, weights = next_tokens(batch)
        sums = chunked_distillation(
            (model.logits, teacher.logits),
            (model.head_weights(student), x),
            (teacher.head_weights(frozen), lax.stop_gradient(y)),
            targets,
            weights,
            chunk=compute.loss_chunk_tokens,
            alpha=self.alpha,
            temperature=self.temperature,
        )
        weight = jnp.sum(weights)
        metrics = {
            "nll": (sums.nll, weight),
            "accuracy": (sums.correct, weight),
            "teacher_kl": (sums.kl, weight),
        }
        return with_penalties(Loss(sums.total, weight, metrics), model, aux)


def student_of(w: Tree) -> Tree:
    """The weights without a teacher."""
    return {name: tree for name, tree in w.items() if name != TEACHER}


class _HeldOut(Distill):
    """`Distill` as measured on held-out rows, by the text alone."""

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Sums of the student's cross-entropy."""
        return Clm().loss(model, student_of(w), batch, key, compute)
