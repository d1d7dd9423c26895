"""MaskDecoder: a DeBERTa whose last layer is run twice with queries that carry positions (the
enhanced mask decoder of https://arxiv.org/abs/2006.03654), before its head over the vocabulary.

    tokens --embed--> layers but the last --> h --keys and values--+
    positions [S, D] -----------------------> + --queries z--> last layer --> last layer --> logits

Microsoft's generators have it. transformers has no class for it, though its layers take queries of
their own.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import jax
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Work
from lmwright.core.param import Param, Tree
from lmwright.core.stack import Aux, added
from lmwright.core.weight import before_products, dot, lookup
from lmwright.kernels import select
from lmwright.models.block import with_bias
from lmwright.models.hf.detector import MASK_DECODER_FORM
from lmwright.models.layers import Attend, run_layers
from lmwright.models.over import OverEncoder

POSITIONS = "positions"  # the table of the queries, in the tree
TIMES = 2  # that the last layer runs
AGAIN = ("q", "o", "up", "down")  # its weights that each time meet every token


@dataclass(frozen=True)
class MaskDecoder(OverEncoder):
    """An encoder with its head over the vocabulary, and positions for the queries of its last
    layer."""

    hf: ClassVar = MASK_DECODER_FORM
    called: ClassVar[str] = "an encoder with a mask decoder"
    reads_documents: ClassVar[bool] = False

    def spec(self) -> Tree:
        """Every weight, once. A position is the distance from the start of the document."""
        shape, std = (self.encoder.seq_len, self.encoder.embed_dim), self.encoder.embed_std
        return self.encoder.spec() | {POSITIONS: Param("distances -> embed", shape, std=std)}

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`: a layer more, whose keys and values are there."""
        work, layers = self.encoder.work(seq_len), self.encoder.num_layers
        share = (layers + TIMES - 1) / layers
        assert work.attention is not None
        windows = (*work.attention.windows, *(None,) * (TIMES - 1))
        return replace(
            work,
            spec=self.spec(),
            num_layers=layers + TIMES - 1,
            active={**work.active, POSITIONS: 0.0, **{f"layers.{n}": share for n in AGAIN}},
            attention=replace(work.attention, windows=windows),
            mixing_flops=work.mixing_flops * share,
        )

    def hidden(self, w: Tree, batch: Batch, compute: Compute) -> tuple[Array, Aux]:
        """The residual stream after the last layer, [B, T, D], and sums of the layers beside it."""
        encoder = self.encoder
        below = replace(encoder, num_layers=max(1, encoder.num_layers - 1))
        lower, last = (
            {"layers": jax.tree.map(lambda a, cut=cut: a[cut], w["layers"])}
            for cut in (slice(0, -1), slice(-1, None))
        )
        aux: Aux = {}
        if encoder.num_layers > 1:
            x, aux = below.hidden(w | lower, batch, compute)
        else:
            x = encoder.embedded(w, batch.tokens, compute)
        z = x + lookup(w[POSITIONS], batch.positions, compute.dtype)
        side = {"rows": encoder.distances(w, compute), "seen": x}
        kernel = select.disentangled_attention(compute)
        spans = replace(encoder, num_layers=1).spans
        z, more = run_layers(self.decode, spans, last, z, side, batch, compute, kernel)
        return z, added(aux, more)

    def decode(self, kind: str, w: Tree, z: Array, side: Tree, attend: Attend) -> tuple[Array, Aux]:
        """Queries z [B, T, D] after the layer's attention and mlp, twice; keys and values are of
        what is `seen` [B, T, D]."""
        encoder = self.encoder
        keys = partial(dot, "btd,dnh->btnh", before_products(side["seen"]))
        k, v = (with_bias(keys(w[name]), w, name) for name in "kv")
        far = encoder.projected(w, side["rows"])
        for _ in range(TIMES):
            q = with_bias(dot("btd,dnh->btnh", before_products(z), w["q"]), w, "q")
            z = encoder.attended(w, z, (q, k, v), far, attend)
        return z, {}
