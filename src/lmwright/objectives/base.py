"""Base: what the objectives of one model share."""

from collections.abc import Mapping
from typing import ClassVar, Self

from lmwright.core.contract import Aux, Loss, Model, Work
from lmwright.core.param import Tree
from lmwright.models.decoder import penalties


class OneModel:
    """An objective that trains the run's own model (see `core.contract.Objective`)."""

    learns_from: ClassVar[str] = "texts"

    def spec(self, model: Model) -> Tree:
        """The model's weights."""
        return model.spec()

    def works(self, model: Model, seq_len: int) -> Mapping[str, Work]:
        """The model's work, under no name."""
        return {"": model.work(seq_len)}

    def exported(self, model: Model, w: Tree) -> tuple[Model, Tree]:
        """The model as it is."""
        return model, w

    def for_eval(self) -> Self:
        """The objective itself."""
        return self


def with_penalties(loss: Loss, model: Model, aux: Aux) -> Loss:
    """The loss with what the model's layers add to that of each token, and their metrics; `aux`
    is what `model.hidden` returned beside the residual stream."""
    added, metrics = penalties(model, aux)
    return Loss(loss.total + added * loss.weight, loss.weight, loss.metrics | metrics)
