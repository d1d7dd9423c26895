"""Attention whose softmax has a learned score of nothing for each head, its sink.

scores of a query --+--> softmax --> probabilities of keys, together less than 1
sink of the head ---+
"""

from dataclasses import replace
from typing import ClassVar

from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import Param, Tree
from lmwright.core.stack import Aux
from lmwright.kernels import select
from lmwright.models.decoder import Decoder
from lmwright.models.layers import Attend
from lmwright.nn.attention import Scoring


class Sinks(Decoder):
    """A decoder with a sink in every head of every layer. It stands first among the bases, and so
    `Decoder`'s defaults go before those of the others: a family says its own again."""

    sinks: ClassVar = True

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        return super().layer_spec(kind) | {"sinks": Param("heads", (self.num_heads,), fill=0.0)}

    def hidden(self, w: Tree, batch: Batch, compute: Compute) -> tuple[Array, Aux]:
        """Residual stream after the last norm, [B, T, D], by attention with sinks."""
        return self.hidden_by(select.KERNELS["attention with sinks"](compute), w, batch, compute)

    def layer(
        self, kind: str, w: Tree, x: Array, tables: Tree, attend: Attend
    ) -> tuple[Array, Aux]:
        """x [B, T, D] after attention and feed-forward."""

        def with_sinks(q: Array, k: Array, v: Array, scoring: Scoring) -> Array:
            return attend.run(q, k, v, scoring, w["sinks"])

        return super().layer(kind, w, x, tables, replace(attend, run=with_sinks))
