"""Models over an encoder: its layers and its settings, whatever their head."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Work
from lmwright.core.param import Tree, walk
from lmwright.core.stack import Aux


@dataclass(frozen=True)
class OverEncoder:
    """An encoder without the head over its vocabulary; its dimensions are those of the encoder."""

    encoder: Any

    both_ways: ClassVar[bool] = True
    called: ClassVar[str]
    """Name of such a model in messages, with its article."""
    reads_documents: ClassVar[bool] = True
    """True if it is given documents, which its tokenizer begins, ends and cuts as in training."""
    pairs_begin_once: ClassVar[bool] = False
    """True if its tokenizer puts what is before a text before the first of two only."""
    task: ClassVar[str] = "fill-mask"
    """The hub's name of its task."""
    outputs: ClassVar[str] = "logits"
    """Name of what `compared` returns."""
    saves_head: ClassVar[bool] = False
    """True if adapters train its head whole."""

    @property
    def kind(self) -> str:
        """The name of the encoder's family in a run file."""
        return self.encoder.kind

    @property
    def fills_masks(self) -> bool:
        """True if the encoder writes text in the place of masks."""
        return self.encoder.fills_masks

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        return self.encoder.vocab_size

    @property
    def embed_dim(self) -> int:
        """Width of the residual stream."""
        return self.encoder.embed_dim

    @property
    def num_layers(self) -> int:
        """Layers of the encoder."""
        return self.encoder.num_layers

    @property
    def seq_len(self) -> int:
        """Tokens of the longest row that the encoder is built for."""
        return self.encoder.seq_len

    def spec(self) -> Tree:
        """Every weight, once; those of the encoder where its head is kept."""
        return self.encoder.spec()

    def note(self) -> dict[str, Any]:
        """Facts that the config of an adapter of PEFT does not say."""
        return {}

    def with_prompts(self, prompts: Mapping[str, str]) -> Self:
        """The model of a run that put these before its texts, by name."""
        return self

    def compared(self, w: Tree, batch: Batch, compute: Compute) -> Array:
        """float32 [B, T, K]: what it gives to whole rows, as other programs do."""
        return self.logits(w, self.hidden(w, batch, compute)[0])

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

    @property
    def mixtures(self) -> Mapping[str, Any]:
        """Experts of the layers, by prefix of their statistics."""
        return self.encoder.mixtures

    def head_weights(self, w: Tree) -> Tree:
        """The part of the weights that `logits` reads."""
        return self.encoder.head_weights(w)

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [..., K] for hidden [..., D]; those of the encoder's head where it is kept."""
        return self.encoder.logits(w, hidden)


def encoder_of(model: Any) -> Any:
    """The encoder of a model over one; any other model itself."""
    return model.encoder if isinstance(model, OverEncoder) else model
