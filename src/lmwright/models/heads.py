"""Heads over documents, which an encoder's family names (`document_head`): tokens come together, a
transform, and a fresh layer of scores.

    pooled [B, S, D] --transform--> [B, S, D] --out--> scores [B, S, K]

The transform is a fresh dense layer with GELU (EuroBERT) or tanh (BERT), or what the encoder's own
head does before its logits, as it was pretrained (ModernBERT).
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.core.param import Param, Tree
from lmwright.core.weight import dot
from lmwright.nn.for_all import plus

HEAD = "classifier"  # the fresh weights in the tree
Pooling = Literal["bos", "cls", "mean", "late"]


@dataclass(frozen=True)
class DocumentHead:
    """A family's head over documents."""

    poolings: tuple[Pooling, ...]
    """Ways to combine the tokens of a document; the first one is the default."""
    kept: tuple[str, ...] = ()
    """Names of the encoder's weights that its `transformed` reads, which this head keeps. Without
    any, the transform starts fresh."""
    answers: bool = True
    """True if transformers has a class of the family that answers questions."""
    activation: Literal["gelu", "tanh"] = "gelu"
    """Behind a fresh dense layer."""

    def spec(self, embed_dim: int, outputs: int) -> Tree:
        """The fresh weights."""
        d = embed_dim
        dense = {
            "dense": Param("embed -> norm", (d, d)),
            "dense_bias": Param("norm", (d,), fill=0.0),
        }
        return ({} if self.kept else dense) | score_layer(d, outputs)

    def weights(self, w: Tree) -> Tree:
        """The part of the weights that the head reads."""
        return {name: w[name] for name in (HEAD, *self.kept) if name in w}

    def transformed(self, encoder: Any, w: Tree, x: Array) -> Array:
        """[B, T, D] of x [B, T, D], as the layer of scores takes it."""
        if self.kept:
            return encoder.transformed(w, x)
        h = plus(dot("btd,de->bte", x, w[HEAD]["dense"]), w[HEAD]["dense_bias"])
        return jnp.tanh(h) if self.activation == "tanh" else jax.nn.gelu(h, approximate=False)


def score_layer(embed_dim: int, outputs: int) -> Tree:
    """The fresh weights of the layer of scores."""
    return {
        "out": Param("embed -> norm", (embed_dim, outputs)),
        "out_bias": Param("norm", (outputs,), fill=0.0),
    }


def scores(w: Tree, h: Array) -> Array:
    """float32 [B, T, K] of h [B, T, D], by the layer of scores."""
    return dot("bte,ek->btk", h, w[HEAD]["out"], out_dtype=jnp.float32) + w[HEAD]["out_bias"]


def document_head_of(family: Any) -> DocumentHead | None:
    """The head over documents of a model, or of a family of them; None where it has none."""
    head: DocumentHead | None = getattr(family, "document_head", None)
    return head


def left_out(encoder: Any) -> frozenset[str]:
    """Names of the encoder's weights that only its head over the vocabulary reads, without those
    that its head over documents goes on with."""
    head = document_head_of(encoder)
    kept = head.kept if head is not None else ()
    read = encoder.head_weights(encoder.spec())
    table = lambda leaf: isinstance(leaf, Param) and "vocab" in leaf.inputs  # noqa: E731
    return frozenset(n for n, leaf in read.items() if n not in kept and not table(leaf))
