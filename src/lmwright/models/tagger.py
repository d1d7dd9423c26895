"""Tagger: an encoder that gives each token scores of tags, as transformers' token classifiers.

    x [B, T, D] --transform, if it was pretrained--> [B, T, D] --out--> logits [B, T, K]

The transform is the one that the encoder's own head goes through before its logits (ModernBERT); a
family whose head over documents has a fresh one (EuroBERT, DeBERTa) has none here.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array

from lmwright.core.contract import Work
from lmwright.core.param import Param, Tree, walk
from lmwright.core.weight import dot
from lmwright.models.heads import HEAD, left_out
from lmwright.models.hf.tagger import TaggerHf
from lmwright.models.over import OverEncoder


@dataclass(frozen=True)
class Tagger(OverEncoder):
    """An encoder without its head, and a layer of scores over each of its tokens."""

    labels: tuple[str, ...]
    """The tags; their places are their numbers."""

    @property
    def hf(self) -> TaggerHf:
        """Its table of Hugging Face names."""
        return TaggerHf(self)

    def spec(self) -> Tree:
        """Every weight, once."""
        spec, d, k = self.encoder.spec(), self.encoder.embed_dim, len(self.labels)
        dropped = left_out(self.encoder)
        head = {
            "out": Param("embed -> norm", (d, k)),
            "out_bias": Param("norm", (k,), fill=0.0),
        }
        return {name: tree for name, tree in spec.items() if name not in dropped} | {HEAD: head}

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`; the embedding is only looked up."""
        work, spec = self.encoder.work(seq_len), self.spec()
        paths = {path for path, _ in walk(spec)}
        active = {path: share for path, share in work.active.items() if path in paths}
        return replace(work, spec=spec, active={**active, "embed": 0.0})

    def head_weights(self, w: Tree) -> Tree:
        """The part of the weights that `logits` reads."""
        names = (HEAD, *self.document_head.kept)
        return {name: w[name] for name in names if name in w}

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [B, T, K] for hidden [B, T, D]."""
        h = self.encoder.transformed(w, hidden) if self.document_head.kept else hidden
        scores = dot("bte,ek->btk", h, w[HEAD]["out"], out_dtype=jnp.float32)
        return scores + w[HEAD]["out_bias"]
