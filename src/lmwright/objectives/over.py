"""Objectives that train an encoder with a head that is not the one over its vocabulary, or with
none: classes, tags, answers, vectors."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from lmwright.core.contract import Model, Objective, Work
from lmwright.core.param import Tree
from lmwright.errors import UserError
from lmwright.models import KINDS
from lmwright.models.over import OverEncoder


class OverObjective(Objective):
    """An objective whose run trains, saves and exports a model over an encoder (`models.over`)."""

    both_ways: ClassVar[bool] = True

    def model_over(self, encoder: Model) -> OverEncoder:
        """The model over an encoder. Raises UserError for one that cannot be its encoder."""
        raise NotImplementedError

    def spec(self, model: Model) -> Tree:
        """The weights of the model over the encoder."""
        return self.model_over(model).spec()

    def works(self, model: Model, seq_len: int) -> Mapping[str, Work]:
        """The work of the model over the encoder, which has no logits over the vocabulary."""
        return {"": self.model_over(model).work(seq_len)}

    def exported(self, model: Model, w: Tree) -> tuple[Model, Tree]:
        """The model over the encoder, and its weights."""
        return self.model_over(model), w


def unsuited(model: Model, lacks: str, suits: Callable[[Any], object]) -> UserError:
    """Error for a model that lacks what its objective needs, in words; it names the families that
    suit."""
    kinds = [repr(kind) for kind, family in KINDS.items() if suits(family)]
    return UserError(f"model.kind: {model.kind!r} {lacks}; use {' or '.join(kinds)}")
