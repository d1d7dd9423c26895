"""EXAONE 4 (https://arxiv.org/abs/2507.11407): norms behind the branches, as in OLMo 2, and of each
head of queries and keys. Its large model has windows in three of four layers, and the others do not
rotate; without windows all layers rotate."""

from typing import ClassVar, Literal

from lmwright.config.run import PositiveInt, section
from lmwright.models.by_reach import LocalTurns
from lmwright.models.decoder import Head
from lmwright.models.olmo2 import NormsBehind


@section
class Exaone4(LocalTurns, NormsBehind):
    """A decoder of the EXAONE 4 family; its fields are the model."""

    qk_norm: ClassVar = "head"
    kind: Literal["exaone4"] = "exaone4"
    mlp_dim: PositiveInt
    head: Head = "tied"
