"""Detector: an encoder that predicts for each token whether it was replaced, by a head in place of
the one over its vocabulary.

    x [B, T, D] --+--> + --norm--> dense --> gelu --> out --> logits [B, T, 1]
    first token --+

The head is that of Microsoft's DeBERTa-v3, `mask_predictions` in its checkpoints: it adds the first
token of a document to each of its tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import Param, Tree
from lmwright.core.sharding import constrain
from lmwright.core.stack import Aux
from lmwright.core.weight import dot
from lmwright.models.hf.detector import DETECTOR
from lmwright.models.over import OverEncoder
from lmwright.nn.for_all import plus
from lmwright.nn.intervals import causal
from lmwright.nn.layer_norm import layer_norm
from lmwright.nn.mlp import activate

HEAD = "detector"  # its weights in the tree
TABLE = "embed"  # of the encoder


@dataclass(frozen=True)
class Detector(OverEncoder):
    """An encoder without the head over its vocabulary, and a head that scores each token."""

    hf: ClassVar = DETECTOR
    called: ClassVar[str] = "a detector"
    task: ClassVar[str] = "feature-extraction"
    reads_documents: ClassVar[bool] = False

    def spec(self) -> Tree:
        """Every weight, once."""
        spec, d, std = self.encoder.spec(), self.encoder.embed_dim, self.encoder.embed_std
        head = {*self.encoder.head_weights(spec)} - {TABLE}
        return {name: tree for name, tree in spec.items() if name not in head} | {
            HEAD: {
                "norm": Param("norm", (d,), fill=1.0),
                "norm_bias": Param("norm", (d,), fill=0.0),
                "dense": Param("embed -> embed", (d, d), std=std),
                "dense_bias": Param("norm", (d,), fill=0.0),
                "out": Param("embed -> norm", (d, 1), std=std),
                "out_bias": Param("norm", (1,), fill=0.0),
            }
        }

    def hidden(self, w: Tree, batch: Batch, compute: Compute) -> tuple[Array, Aux]:
        """The residual stream after the last norm, [B, T, D], with that of the first token of its
        document added to each, and sums of the layers beside it."""
        x, aux = self.encoder.hidden(w, batch, compute)
        at = causal(batch.segment_ids).start[..., None]
        # in float32, for its gradient is a sum over the document
        first = jnp.take_along_axis(x.astype(jnp.float32), at, axis=1).astype(x.dtype)
        return constrain(x + first, "batch stream embed"), aux

    def head_weights(self, w: Tree) -> Tree:
        """The part of the weights that `logits` reads."""
        return {HEAD: w[HEAD]}

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [B, T, 1] for hidden [B, T, D]: the logit that a token was replaced."""
        head = w[HEAD]
        h = layer_norm(hidden, head["norm"], head["norm_bias"], self.encoder.norm_eps)
        h = plus(dot("btd,de->bte", h, head["dense"]), head["dense_bias"])
        h = activate(self.encoder.mlp, h)
        return dot("bte,ek->btk", h, head["out"], out_dtype=jnp.float32) + head["out_bias"]
