"""A model with the weights of another family: a causal one that comes to look both ways, or a llama
whose projections become ternary.

A model that fills in masks keeps the shift of the causal one (`predicts = "next"`), as DiffuLLaMA
(https://arxiv.org/abs/2410.17891) and Dream (https://arxiv.org/abs/2508.15487) do: its outputs go
on predicting the token behind them.
"""

from dataclasses import fields
from typing import Any

from lmwright.config.fields import default_of, to_plain
from lmwright.config.section import validate
from lmwright.errors import UserError
from lmwright.models import KINDS

SAME_BLOCKS = ("llama", "eurobert", "llada")
ADDING = {("llama", "bitnet"): ("attention_sub_norm", "mlp_sub_norm")}
"""The weights of a layer that a family has beside those of the one it is made from."""


def converted(model: Any, kind: str) -> Any:
    """The model with the same weights as one of `kind`. Raises UserError where there is none."""
    if kind == model.kind:
        return model
    family = KINDS[kind]
    both_ways = family.both_ways and model.kind in SAME_BLOCKS
    if not both_ways and (model.kind, kind) not in ADDING:
        raise UserError(
            f"model.kind: a {model.kind!r} does not become a {kind!r}; leave model.kind out"
        )
    known = {field.name for field in fields(family)}
    for field in fields(model):
        value = getattr(model, field.name)
        if field.name not in known and value != default_of(field):
            raise UserError(
                f"model.kind: a {kind!r} has no {field.name} = {value!r}, which the model has; "
                "start from another"
            )
    values = {name: value for name, value in to_plain(model).items() if name in known}
    if family.fills_masks and not model.both_ways:
        values["predicts"] = "next"
    return validate(family, values | {"kind": kind}, "model: ")
