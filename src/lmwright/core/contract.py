"""Contract: what training, planning and evaluation ask of a model and of an objective.

    model      its weights (`spec`), its predictions, and the work of a token (`work`)
    objective  the weights that a run has (`spec`), and the loss of a batch

A model family is any class with these methods. An objective inherits what it does not change.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.param import Tree, walk
from lmwright.core.stack import Aux


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of packed tokens; arrays are [..., B, T].

    Targets are the objective's business: `loss_weight` belongs to a token as a *target*.
    """

    tokens: Array  # int32 [B, T]
    segment_ids: Array  # int32 [B, T]; 0 is padding, documents count from 1
    positions: Array  # int32 [B, T]; restart at each segment
    loss_weight: Array  # float32 [B, T]; weight of predicting this very token


@dataclass(frozen=True)
class Attention:
    """Dimensions of the attention layers."""

    windows: tuple[int | None, ...]
    """Tokens that a query sees in each of these layers, itself included; None for all before it."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    both_ways: bool = False
    """True if queries see as many tokens after themselves as before."""
    narrower_dim: int | None = None  # width of its keys or its values, where it is not head_dim

    def keys(self, seq_len: int) -> float:
        """Keys that a query sees, summed over layers: the mean over a row of `seq_len` tokens."""
        return (1 + self.both_ways) * sum(seen_keys(window, seq_len) for window in self.windows)


@dataclass(frozen=True, eq=False)
class Work:
    """The computation of a model for each token of a row: all that FLOPs, memory and time are
    estimated from."""

    spec: Tree
    """Weights of the model as Params; each matrix is one matmul of a token."""
    seq_len: int
    """Tokens in a row."""
    num_layers: int
    embed_dim: int
    vocab_size: int
    active: Mapping[str, float] = field(default_factory=dict)
    """Fraction of a weight, by path, that a token is multiplied with, where that is not all of it:
    the chosen ones of the experts, nothing of a table that is only looked up."""
    attention: Attention | None = None
    """None for a model without attention."""
    mixing_flops: float = 0.0
    """FLOPs of a token, forward, in all layers, beside matmuls and attention."""
    mixing_kept: float = 0.0
    """Elements of a token, in all layers, that such mixing saves for its backward pass."""
    mixing_bytes: float = 0.0
    """Bytes of a token, forward, in all layers, that such mixing moves beside its products."""
    soft_capped: bool = False
    """True if a soft cap changes the logits."""
    uncut: tuple[str, ...] = ("context",)
    """Mesh axes over which the model cannot be cut: its rows, where it does not say otherwise."""
    normed: frozenset[str] = frozenset()
    """Own names of the weights whose product a norm takes in, which its backward pass needs."""
    forward_only: bool = False
    """True for a frozen model, which takes no gradient, as a teacher."""

    def flops_per_token(self, per_weight: int = 6, forward_passes: int = 0) -> float:
        """`per_weight` for each matmul weight of a token, 12 N H for each key that a query sees,
        three times the mixing, forward and backward; a third for each of the `forward_passes`."""
        matrices = ((path, p.size) for path, p in walk(self.spec) if p.is_matrix)
        weights = sum(size * self.active.get(path, 1.0) for path, size in matrices)
        once = 2 * weights + self.mixing_flops
        if (of := self.attention) is not None:
            both = of.head_dim + (of.narrower_dim or of.head_dim)
            once += 2 * of.keys(self.seq_len) * of.num_heads * both
        if self.forward_only:
            return once
        return (per_weight - 6) * weights + (3 + forward_passes) * once


def seen_keys(window: int | None, seq_len: int) -> float:
    """Keys that a query of a row sees on average: half the row, or the window,
    corrected for the shorter windows at the start of the row."""
    if window is None or window >= seq_len:
        return seq_len / 2
    return window - window**2 / (2 * seq_len)


Metrics = dict[str, tuple[Array, Array]]
"""Sums and their weights, by name."""


class Model(Protocol):
    """A language model: its fields in the run file are the model."""

    @property
    def kind(self) -> str:
        """The name of its family in a run file."""

    @property
    def both_ways(self) -> bool:
        """True if its tokens see those after them, as an encoder's do."""

    @property
    def fills_masks(self) -> bool:
        """True if it writes text in the place of masks, as a diffusion model does."""

    @property
    def vocab_size(self) -> int:
        """Rows of its embedding table."""

    @property
    def embed_dim(self) -> int:
        """Width of the residual stream."""

    @property
    def num_layers(self) -> int:
        """Layers between the embedding and the head."""

    @property
    def seq_len(self) -> int:
        """Tokens of the longest row that it is built for."""

    @property
    def mixtures(self) -> Mapping[str, Any]:
        """Experts of its layers, by the prefix of the sums that `hidden` returns of them."""

    def spec(self) -> Tree:
        """Every weight as a Param, once."""

    def work(self, seq_len: int) -> Work:
        """The work of a token of a row of `seq_len`."""

    def with_noise(self, w: Tree, noise: Array) -> Tree:
        """The weights, with noise [B, T, D] on the embeddings of a batch."""

    def hidden(self, w: Tree, batch: Batch, compute: Compute) -> tuple[Array, Aux]:
        """The residual stream after the last norm, [B, T, D], and sums of the layers beside it."""

    def head_weights(self, w: Tree) -> Tree:
        """The part of the weights that `logits` reads."""

    def logits(self, w: Tree, hidden: Array) -> Array:
        """float32 [..., V] for hidden [..., D]; `w` may be `head_weights(w)` alone."""


class HfModel(Model, Protocol):
    """A model that is read from and written to Hugging Face folders and GGUF files."""

    @property
    def hf(self) -> Any:
        """Table of the family's names (`models.hf`)."""


class Loss(NamedTuple):
    """Sums and weights of an objective, never means, so that accumulation, packing and uneven hosts
    are exact. float32 scalars: the gradient is that of `total`, the loss is total over weight."""

    total: Array
    weight: Array
    metrics: Metrics


class Objective(Protocol):
    """A loss to minimize, and the weights of a run; by default those of its own model."""

    @property
    def kind(self) -> str:
        """Name of the objective in a run file."""

    learns_from: ClassVar[str] = "texts"
    """The kind of rows that a store must hold for it (`TokenStore.holds`)."""

    both_ways: ClassVar[bool] = False
    """True if it needs a model whose tokens see those after them."""

    fills_masks: ClassVar[bool] = False
    """True if it trains models that write text in the place of masks."""

    new_weights: ClassVar[tuple[str, ...]] = ()
    """Names in `spec` of weights that start fresh where the model to begin with has none."""

    reads_tokenizer: ClassVar[bool] = False
    """True if `with_tokenizer` has anything to fill in."""

    def with_tokenizer(self, tokenizer: Any) -> Self:
        """The objective with ids that it leaves to the tokenizer of the prepared data."""
        return self

    tally: ClassVar[str] = "loss.TokenRowTally"
    """Module of `evals`, and the class there, that makes scores of held-out rows."""

    held_out_metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics of its loss that are shown for held-out rows, beside those of all objectives."""

    parts: ClassVar[tuple[str, ...]] = ()
    """Names of its models, where several can be exported."""

    def part(self, name: str) -> Self:
        """This objective, set to export the part called `name`."""
        return self

    def refuse(self, run: Any) -> None:
        """Raises UserError where other sections of a run do not go with it (`config.check`)."""
        return

    sums_head_once: ClassVar[bool] = False
    """True if its loss follows `Compute.head_gradient`."""

    has_teacher: ClassVar[bool] = False
    """True if its loss reads a frozen teacher beside the model."""

    whole_batch: ClassVar[bool] = False
    """True if rows are compared with each other: `loss` takes all microbatches, [A, B, T]."""

    @property
    def rows_are_alone(self) -> bool:
        """True if the loss of a row does not depend on the others of its microbatch."""
        return True

    @property
    def draws_noise(self) -> bool:
        """True if the loss of a training batch depends on its key."""
        return False

    @property
    def windows(self) -> tuple[int, int] | None:
        """Tokens of a window on a context, and of its overlap with the next; None without."""
        return None

    @property
    def starts_from(self) -> Mapping[str, str]:
        """Places of weights to start from beside `train.init_from`, by their field."""
        return {}

    @property
    def reads_from(self) -> Mapping[str, str | None]:
        """Places of all weights that it reads, by their field."""
        return self.starts_from

    def spec(self, model: Model) -> Tree:
        """The weights of the run: the model's, or those of several models below their names."""
        return model.spec()

    def works(self, model: Model, seq_len: int) -> Mapping[str, Work]:
        """The work of each model in `spec`, by its name there; "" where the model is alone."""
        return {"": model.work(seq_len)}

    @property
    def forward_passes(self) -> int:
        """Forward passes of a step beside the one that is differentiated, as of a reference."""
        return 0

    def passes_of(self, num_microbatches: int) -> int:
        """Forward passes of a step of so many microbatches, which some objectives encode twice."""
        return self.forward_passes + (self.whole_batch and num_microbatches > 1)

    def exported(self, model: Model, w: Tree) -> tuple[Model, Tree]:
        """The model that evaluation, generation and export see, and its weights in `w`."""
        return model, w

    def for_eval(self) -> Self:
        """The objective as it is measured on held-out rows, without noise of training."""
        return self

    def draws(self, key: Array, numbers: Array, count: int, progress: Array | float = 0.0) -> Any:
        """Randomness for `loss`: here a key for each row [B], by the `numbers` [B] of the rows in
        a whole batch of `count`. `progress` in [0, 1) is the share of the steps that is done."""
        return jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)

    def loss(self, model: Model, w: Tree, batch: Batch, key: Any, compute: Compute) -> Loss:
        """Sums over a batch; `key` is what `draws` returned for it."""
