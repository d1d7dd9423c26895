"""Question answering: an encoder says where in a context the answer to a question stands.

A document is a question and a window on its context (`data.tokens.answers`); `loss_weight` has
bits at the tokens where the answer starts and ends, which are the first token where the window has
none. Losses are sums over documents, so they are the same however these are packed.
"""

from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.config.rows import ANSWERED_QUESTIONS
from lmwright.config.run import Free, NonNegativeInt, PositiveInt, Run, section, seq_len_of
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Loss, Metrics, Model
from lmwright.core.param import Tree
from lmwright.errors import UserError
from lmwright.models.answerer import Answerer, has_answers
from lmwright.models.classifier import document_sums, first_tokens
from lmwright.models.heads import HEAD
from lmwright.objectives.clm import penalties
from lmwright.objectives.over import OverObjective, unsuited


class Spans(NamedTuple):
    """Scores of the tokens of a batch, and sums over its documents."""

    logits: Array
    """float32 [B, T, 2]: of the first token of the answer, and of its last one."""
    nll: Array
    weight: Array
    """Number of documents."""
    right: Array
    """Number of documents whose answer starts and ends at the likeliest tokens."""
    penalty: Array | float
    metrics: Metrics


@section
class Answer(OverObjective):
    """The part of a context that answers a question."""

    kind: Literal["answer"] = "answer"
    window_tokens: PositiveInt = 384
    """Tokens of a question and a part of its context; a longer context has several windows."""
    window_overlap: NonNegativeInt = 128
    """Tokens of the context that neighboring windows share."""
    max_answer_tokens: Free[PositiveInt] = 30
    """Tokens of the longest answer that is given."""
    no_answer: Free[Literal["allowed", "never"]] = "allowed"
    """`never` gives each question an answer, as SQuAD 1.1 has it."""

    new_weights: ClassVar[tuple[str, ...]] = (HEAD,)
    learns_from: ClassVar[str] = ANSWERED_QUESTIONS
    tally: ClassVar[str] = "answered.AnswerRowTally"
    labels: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        most = (self.window_tokens - 4) // 2  # a question takes half of the rest at most
        if self.window_overlap > most:
            raise UserError(
                f"objective.window_overlap: {self.window_overlap} is too large for windows of "
                f"{self.window_tokens} tokens, half of which a question may take; use at most "
                f"{max(0, most)}, or raise objective.window_tokens"
            )

    @property
    def windows(self) -> tuple[int, int]:
        """Tokens of a window, and those of the context that it shares with the next."""
        return self.window_tokens, self.window_overlap

    def refuse(self, run: Run) -> None:
        """Raises UserError for windows that no row holds, or whose answers would move."""
        from lmwright.data.tokens.answers import windows_of

        windows_of(run.data, seq_len_of(run), self.windows)

    def model_over(self, encoder: Model) -> Answerer:
        """The encoder with its layer of scores. Raises UserError for a model that has none."""
        if not has_answers(encoder):
            lacks = "cannot answer questions, since transformers has no class for it"
            raise unsuited(encoder, lacks, has_answers)
        return Answerer(encoder, *self.windows, self.max_answer_tokens, self.no_answer)

    def spans(self, model: Model, w: Tree, batch: Batch, compute: Compute) -> Spans:
        """Scores of the tokens of a batch, and the loss of its documents: the mean of two
        cross-entropies, each over the tokens of the document, as in transformers."""
        answerer = self.model_over(model)
        x, aux = answerer.hidden(w, batch, compute)
        logits = answerer.logits(w, x)  # [B, T, 2]
        there = document_sums(jnp.asarray(first_tokens(batch)), batch.segment_ids)
        most, logsum = over_documents(logits, batch.segment_ids)
        bits = batch.loss_weight.astype(jnp.int32)
        chosen = jnp.stack([bits & 1, (bits >> 1) & 1], axis=-1).astype(jnp.float32)
        nll = (jnp.sum(logsum * there[..., None]) - jnp.sum(logits * chosen)) / 2
        hits = document_sums((logits >= most) * chosen, batch.segment_ids)
        right = jnp.sum(jnp.prod(hits, axis=-1) * there)
        penalty, metrics = penalties(answerer, aux)
        return Spans(logits, nll, jnp.sum(there), right, penalty, metrics)

    def loss(self, model: Model, w: Tree, batch: Batch, key: Array, compute: Compute) -> Loss:
        """The loss of `spans`, summed over documents; `key` is unused, nothing is sampled."""
        made = self.spans(model, w, batch, compute)
        metrics = {"nll": (made.nll, made.weight), "accuracy": (made.right, made.weight)}
        total = made.nll + made.penalty * made.weight
        return Loss(total, made.weight, metrics | made.metrics)


def over_documents(logits: Array, segment_ids: Array) -> tuple[Array, Array]:
    """Largest logit, and log of the sum of exponentials, over each document: float32 [B, T, K] by
    token, and by document of a row, 0 for those that are not there; logits are [B, T, K]."""
    t = segment_ids.shape[1]
    ids = jnp.where(segment_ids > 0, segment_ids - 1, t)  # in order: padding is behind
    largest = lambda row, at: jax.ops.segment_max(row, at, t + 1, indices_are_sorted=True)  # noqa: E731
    most = jax.vmap(largest)(jax.lax.stop_gradient(logits), ids)
    most = jnp.where(jnp.isfinite(most), most, 0.0)
    of_token = jnp.take_along_axis(most, ids[..., None], axis=1)
    sums = document_sums(jnp.exp(logits - of_token), segment_ids)
    there = sums > 0
    logsum = jnp.where(there, jnp.log(jnp.where(there, sums, 1.0)) + most[:, :t], 0.0)
    return of_token, logsum
