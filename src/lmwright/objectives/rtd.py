"""Replaced token detection (https://arxiv.org/abs/2003.10555, https://arxiv.org/abs/2111.09543): a
small generator fills in masks, and the model predicts for each token whether it is the original.

    tokens --hide--> generator --> loss of the masks
                         | samples, without a gradient
                         v
    tokens with samples in place of masks --> discriminator --> is each one replaced?

Both are trained in one step. The discriminator looks a token up in the generator's embedding, from
which its gradient is kept away, plus a table of its own that starts at zero (gradient-disentangled
embedding sharing). The model that comes out of a run is the discriminator, the two tables added.

The loss is a mean over tokens that are no padding: `detector_weight` times the cross-entropy of
the discriminator, plus that of the generator over `mask_ratio`, the share of tokens that are
masked; so it is a sum over tokens, the same however rows are cut into microbatches.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from pydantic import Field

from lmwright.config.run import Free, NonNegativeInt, Place, Positive, PositiveInt, section
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Model, Objective, Work
from lmwright.core.param import Tree, is_param, walk
from lmwright.core.sharding import constrain, context_ways
from lmwright.core.weight import lookup
from lmwright.errors import UserError
from lmwright.models.detector import TABLE, Detector
from lmwright.models.hf import TABLES
from lmwright.nn.gumbel import sample
from lmwright.objectives.clm import loss_at, penalties
from lmwright.objectives.masking import keys_of_rows
from lmwright.objectives.mlm import Hidden, Mlm

DISCRIMINATOR, GENERATOR = "discriminator", "generator"
LOSS_CHUNKS = 4  # of the generator's masks, whose logits exist at once
VOCAB_CHUNK = 8192  # ids whose logits exist at once while the generator samples
FORWARD_SHARE = 4 / 3  # of the head's work: once more forward, for the samples


@section
class Rtd(Objective):
    """Detection of tokens that a generator has replaced."""

    kind: Literal["rtd"] = "rtd"
    mask_token_id: NonNegativeInt | None = None
    """Id that stands for a hidden token; that of the tokenizer's mask token if unset."""
    mask_ratio: Annotated[float, Field(gt=0, le=1)] = 0.15
    """Share of a row's tokens that the generator fills in."""
    never_masked: tuple[NonNegativeInt, ...] | None = None
    """Ids of tokens that are not replaced; the tokenizer's special tokens if unset."""
    generator_layers: PositiveInt | None = None
    """Layers of the generator, as wide as the model; half of the model's if unset."""
    generator_from: Free[Place[str | None]] = None
    """Run directory or Hugging Face folder of the generator's weights, beside train.init_from;
    the first layers of the model there if unset."""
    mask_decoder: Literal["none", "enhanced"] = "none"
    """`enhanced` runs the generator's last layer twice with queries that know their positions, as
    Microsoft's generators do, for which transformers has no class."""
    detector_weight: Positive = 50.0
    """Weight of the discriminator's loss; 50 in ELECTRA, 10 in Microsoft's code."""

    both_ways: ClassVar[bool] = True
    reads_tokenizer: ClassVar[bool] = True
    sums_head_once: ClassVar[bool] = True
    held_out_metrics: ClassVar[tuple[str, ...]] = (
        "detector_loss", "detector_accuracy", "detector_recall", "replaced_share",
    )  # fmt: skip
    parts: ClassVar[tuple[str, ...]] = (DISCRIMINATOR, GENERATOR)

    @property
    def masking(self) -> Mlm:
        """The masked language modeling that the generator learns."""
        return Mlm(
            mask_token_id=self.mask_token_id,
            mask_ratio=self.mask_ratio,
            never_masked=self.never_masked,
        )

    @property
    def starts_from(self) -> Mapping[str, str]:
        """The place of the generator's own weights, if it has any."""
        place = self.generator_from
        return {} if place is None else {"objective.generator_from": place}

    def with_tokenizer(self, tokenizer: Any) -> "Rtd":
        """The objective with the ids that it leaves open. Raises UserError for a tokenizer without
        a mask token, or of another id."""
        known = self.masking.with_tokenizer(tokenizer)
        return replace(self, mask_token_id=known.mask_token_id, never_masked=known.never_masked)

    @property
    def draws_noise(self) -> bool:
        """True: masks and what fills them are drawn."""
        return True

    def generator(self, model: Model) -> Any:
        """The generator: the model with fewer layers. Raises UserError for more layers, or a model
        without a head for this."""
        kinds = [kind for kind, table in TABLES.items() if table.detector]
        if model.kind not in kinds:
            raise UserError(
                f"objective.kind: 'rtd' has no head for {model.kind!r}; use model.kind = "
                f"{' or '.join(map(repr, kinds))}, or objective.kind = 'mlm'"
            )
        layers = self.generator_layers or max(1, model.num_layers // 2)
        if layers > model.num_layers:
            raise UserError(
                f"objective.generator_layers: {layers} makes the generator larger than the "
                f"discriminator, which has model.num_layers = {model.num_layers}; use fewer"
            )
        generator: Any = replace(model, num_layers=layers)  # type: ignore[type-var]
        if self.mask_decoder == "none":
            return generator
        from lmwright.models.mask_decoder import MaskDecoder

        return MaskDecoder(generator)

    def spec(self, model: Model) -> Tree:
        """The weights of both; the discriminator's table is what it adds to the generator's."""
        generator, detector = self.generator(model), Detector(model).spec()
        added = {TABLE: replace(detector[TABLE], std=None, fill=0.0)}
        return {GENERATOR: generator.spec(), DISCRIMINATOR: detector | added}

    def works(self, model: Model, seq_len: int) -> Mapping[str, Work]:
        """The work of the generator, whose head runs over the masks alone, forward once more for
        the samples, and of the discriminator."""
        (work,) = self.masking.works(self.generator(model), seq_len).values()
        head = [path for path, _ in walk(self.generator(model).head_weights(work.spec))]
        again = {path: FORWARD_SHARE * work.active[path] for path in head}
        return {
            GENERATOR: replace(work, active={**work.active, **again}),
            DISCRIMINATOR: Detector(model).work(seq_len),
        }

    def exported(self, model: Model, w: Tree) -> tuple[Model, Tree]:
        """The discriminator, its two tables added."""
        own = w[DISCRIMINATOR]
        table = w[GENERATOR][TABLE]
        if not is_param(table):
            table = table + own[TABLE]
        return Detector(model), own | {TABLE: table}

    def part(self, name: str) -> "Rtd":
        """The objective of which one of the `parts` is exported."""
        return _OfGenerator(**vars(self)) if name == GENERATOR else self

    def for_eval(self) -> "Rtd":
        """The objective on held-out rows: the same tokens are replaced whenever they are
        measured."""
        return _HeldOut(**vars(self))

    def keys(self, batch: Batch, key: Array) -> Array:
        """A key [B] for each row."""
        return key

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """Sums over the batch; `key` [B] says what is masked, and what is drawn there."""
        keys = self.keys(batch, key)
        hidden = self.masking.hide(batch, model.vocab_size, keys)
        learned, mixed = self.fill(model, w[GENERATOR], batch, hidden, keys, compute)
        table = lax.stop_gradient(w[GENERATOR][TABLE])
        found, metrics = detect(model, w[DISCRIMINATOR], table, batch, mixed, compute)
        total = learned.total / self.mask_ratio + self.detector_weight * found.total
        share = {"replaced_share": (metrics["detector_recall"][1], learned.weight)}
        return Loss(total, found.weight, learned.metrics | metrics | share)

    def fill(
        self, model: Model, w: Tree, batch: Batch, hidden: Hidden, keys: Array, compute: Compute
    ) -> tuple[Loss, Array]:
        """The generator's loss, and the rows [B, T] with its samples in the place of masks."""
        generator = self.generator(model)
        x, aux = generator.hidden(w, replace(batch, tokens=hidden.tokens), compute)
        x, old = constrain(hidden.pick(x), "batch seq embed"), hidden.pick(batch.tokens)
        weights = hidden.pick(batch.loss_weight) * hidden.predicted
        chunk = min(compute.loss_chunk_tokens, -(-x.shape[1] // (LOSS_CHUNKS * context_ways())))
        compute = replace(compute, loss_chunk_tokens=chunk)
        loss = loss_at(generator, w, x, aux, old, weights, compute)
        head, spec = generator.head_weights(w), generator.head_weights(generator.spec())
        along = lambda p: p.axes.index("vocab") if "vocab" in p.axes else -1  # noqa: E731
        axes = jax.tree.map(along, spec, is_leaf=is_param)
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, 1)
        new = sample(generator.logits, head, axes, x, keys, model.vocab_size, VOCAB_CHUNK)
        new = jnp.where(hidden.predicted > 0, new, old)
        put = jax.vmap(lambda row, at, ids: row.at[at].set(ids))
        return loss, put(batch.tokens, hidden.places, new)


def detect(
    model: Model, w: Tree, table: Array, batch: Batch, mixed: Array, compute: Compute
) -> tuple[Loss, dict[str, tuple[Array, Array]]]:
    """The discriminator's loss for rows `mixed` [B, T], some of whose tokens are not those of the
    batch, and its metrics; `table` [V, D] is added to its own."""
    detector = Detector(model)
    w = detector.with_noise(w, lookup(table, mixed, compute.dtype))
    x, aux = detector.hidden(w, replace(batch, tokens=mixed), compute)
    logits = detector.logits(w, x)[..., 0]
    replaced = (mixed != batch.tokens).astype(jnp.float32)
    real = (batch.segment_ids > 0).astype(jnp.float32)
    each = jax.nn.softplus(logits) - replaced * logits
    weight = jnp.sum(real)
    loss = jnp.sum(each * real)
    right = ((logits > 0) == (replaced > 0)).astype(jnp.float32)
    metrics = {
        "detector_loss": (loss, weight),
        "detector_accuracy": (jnp.sum(right * real), weight),
        "detector_recall": (jnp.sum(right * replaced * real), jnp.sum(replaced * real)),
    }
    added, more = penalties(detector, aux)
    return Loss(loss + added * weight, weight, {}), metrics | more


class _HeldOut(Rtd):
    """`Rtd` as measured on held-out rows: their keys follow from their tokens."""

    def keys(self, batch: Batch, key: Array) -> Array:
        """A key [B] for each row, from its tokens alone."""
        return keys_of_rows(batch)


class _OfGenerator(Rtd):
    """`Rtd` whose generator is exported."""

    def exported(self, model: Model, w: Tree) -> tuple[Model, Tree]:
        """The generator, with its head over the vocabulary."""
        return self.generator(model), w[GENERATOR]
