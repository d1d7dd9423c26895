"""EuroBERT (https://arxiv.org/abs/2503.05500): the blocks of a llama that look both ways."""

from typing import ClassVar, Literal

from lmwright.config.run import PositiveInt, section
from lmwright.models.decoder import Head
from lmwright.models.heads import DocumentHead
from lmwright.models.llama import PreNorm


@section
class EuroBert(PreNorm):
    """An encoder of pre-norm blocks, whose head predicts masked tokens."""

    both_ways: ClassVar[bool] = True
    document_head: ClassVar[DocumentHead] = DocumentHead(("late", "mean", "bos"), answers=False)

    kind: Literal["eurobert"] = "eurobert"
    mlp_dim: PositiveInt
    head: Head = "untied"
    bias: Literal["none", "attention"] = "none"
    """Projections that add a bias."""
