"""Log probabilities of whole answers, and the reference model, for the objectives that compare
answers."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from lmwright.config.run import Run
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, Model
from lmwright.core.leaves import has_adapters, without_adapters
from lmwright.core.param import Tree
from lmwright.core.stack import Aux
from lmwright.errors import UserError
from lmwright.nn.logps import segment_sums, token_logps
from lmwright.objectives.clm import next_tokens


class Predictions(NamedTuple):
    """Predictions of the next token at each position, float32 [B, T]: its log probability, whether
    it is learned, and whether it belongs to the same segment as the position."""

    logps: Array
    learned: Array
    inside: Array
    aux: Aux
    """What the layers return beside the residual stream."""


def predict_answers(model: Model, w: Tree, batch: Batch, compute: Compute) -> Predictions:
    """Predictions of the next tokens of a batch under these weights."""
    x, aux = model.hidden(w, batch, compute)
    targets, learned = next_tokens(batch)
    # a segment's last token predicts nothing of it
    inside = jnp.roll(batch.positions, -1, axis=1) > 0
    logps = token_logps(
        model.logits, model.head_weights(w), x, targets, chunk=compute.loss_chunk_tokens
    )
    learned = (learned > 0) & inside
    return Predictions(logps, learned.astype(jnp.float32), inside.astype(jnp.float32), aux)


def log_ratios(policy: Predictions, base: Predictions, segment_ids: Array) -> Array:
    """Log ratio of each segment's answer to that of the reference, float32 [B, T + 1]. Ratios of
    tokens are summed: sums of long answers differ by less than they are rounded by."""
    ratios = (policy.logps - lax.stop_gradient(base.logps)) * policy.learned
    return segment_sums(ratios, segment_ids)


def refuse_alone(run: Run) -> None:
    """Raises UserError for a run whose objective compares with the base of adapters, and that has
    no adapters, or adapters that are rounded with their base."""
    if run.lora is None:
        raise _alone(run.objective.kind)
    if run.qat is not None:
        raise UserError(
            f'qat: objective.kind = "{run.objective.kind}" compares with the base, and [qat] '
            "rounds adapters with their base; remove [qat]"
        )


def _alone(kind: str) -> UserError:
    return UserError(f'objective.kind: "{kind}" compares with the base; add a [lora] section')


def reference_of(w: Tree, kind: str) -> Tree:
    """The base, adapters off, that objective `kind` compares with. Raises UserError for weights
    without adapters."""
    if not has_adapters(w):
        raise _alone(kind)
    return lax.stop_gradient(without_adapters(w))
