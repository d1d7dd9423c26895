"""Models over an encoder: its layers and its settings, whatever their head."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Metrics, Work
from lmwright.core.param import Tree, walk
from lmwright.core.stack import Aux


@dataclass(frozen=True)
class OverEncoder:
    """An encoder without the head over its vocabulary; dimensions, layers and settings that are
    not its own are those of the encoder."""

    encoder: Any

    both_ways: ClassVar[bool] = True
    called: ClassVar[str]
    """What messages call it, with its article."""
    reads_documents: ClassVar[bool] = True
    """Whether it is given documents, which its tokenizer begins, ends and cuts as in training."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "encoder":
            raise AttributeError(name)
        return getattr(self.encoder, name)

    def work(self, seq_len: int) -> Work:
        """Work of a token in a row of `seq_len`; the embedding is only looked up."""
        work, spec = self.encoder.work(seq_len), self.spec()
        paths = {path for path, _ in walk(spec)}
        active = {path: share for path, share in work.active.items() if path in paths}
        return replace(work, spec=spec, active={**active, "embed": 0.0})

    def with_noise(self, w: Tree, noise: Array) -> Tree:
        """The weights, with noise [B, T, D] on the embeddings of a batch."""
        return self.encoder.with_noise(w, noise)

    def hidden(self, w: Tree, batch: Batch, compute: Compute) -> tuple[Array, Aux]:
        """The residual stream after the last norm, [B, T, D], and sums of the layers beside it."""
        return self.encoder.hidden(w, batch, compute)

    def penalties(self, aux: Aux) -> tuple[Array | float, Metrics]:
        """Losses that the layers add, and their metrics."""
        return self.encoder.penalties(aux)
