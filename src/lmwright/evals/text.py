"""Perplexity of any model on a text file, in windows.

    |------- context -------|
            stride  |------- context -------|      each token but the first is predicted once, by
      all of the first      |- the last stride -|  the window that shows most of what is before it

A window has `context` tokens and predicts the one after each of them. With a stride as long as the
context windows lie side by side: fast, and the first tokens of each see little.
https://huggingface.co/docs/transformers/perplexity
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lmwright.core.compute import DTYPES, LANES, Compute
from lmwright.core.contract import Batch, Model, Objective
from lmwright.core.copies import computing_with, dealt, num_copies_of, on_each, stacked
from lmwright.core.param import Tree
from lmwright.core.ternary import cast_as_trained
from lmwright.data.tokens.token_bytes import TokenBytes
from lmwright.errors import UserError
from lmwright.evals.compute import Kernels, refuse_encoder, refuse_samples, row_compute, spread
from lmwright.evals.loss import Rows, batch_of, compiled, evaluate_rows, tally_of
from lmwright.evals.source_loss import SourceLoss
from lmwright.evals.tables import print_losses
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.objectives.clm import Clm

CONTEXT = 1024
BATCH_TOKENS = 4096


def evaluate_text(
    model: Model,
    w: Tree,
    ids: Sequence[int],
    *,
    context: int = CONTEXT,
    stride: int | None = None,
    compute: Compute | None = None,
    source: str = "text",
    objective: Objective | None = None,
) -> SourceLoss:
    """Loss over the ids of one text, in which each token but the first is predicted once;
    `text_bytes` is 0. The objective is that of next tokens if unset.

    `context` and `stride` are in tokens; a stride below the context makes windows overlap.
    Raises UserError where they do not fit the model or the text.
    """
    compute, objective = compute or row_compute(), objective or Clm()
    if not objective.fills_masks:
        refuse_encoder(model)
    batches = text_batches(model, ids, context, stride, compute, source)
    w = cast_as_trained(model.spec(), w, DTYPES[compute.precision])
    if num_copies_of(w) > 1:
        return _on_copies(model, objective, compute, w, source, batches)
    return evaluate_rows(model, objective, compute, w, source, batches)


def _on_copies(
    model: Model, objective: Objective, compute: Compute, w: Tree, source: str,
    batches: Iterator[Rows],
) -> SourceLoss:  # fmt: skip
    """`evaluate_rows` by devices that have all weights each."""
    tally = tally_of(objective)

    def sums(w: Tree, batch: Batch) -> Any:
        return tally.measure(model, objective, w, batch, compute)

    measure = compiled(on_each(sums), compute)
    for group, filled in dealt(batches, num_copies_of(w)):
        found = jax.device_get(measure(w, stacked([batch_of(each) for each in filled])))
        for number, each in enumerate(group):
            tally.add(each, jax.tree.map(lambda a, number=number: a[number], found))
    return tally.loss(source)


def text_batches(
    model: Model,
    ids: Sequence[int],
    context: int,
    stride: int | None,
    compute: Compute,
    source: str = "text",
) -> Iterator[dict[str, np.ndarray]]:
    """The windows of a text as batches of rows; `evaluate_text` says what is what."""
    # the last target of next tokens is in no context; masks are in their own
    most = context - 1 if model.fills_masks or _turns_after(model, context) else context
    stride = stride or most
    if not 2 <= context <= model.seq_len:
        raise UserError(f"context: {context} must be from 2 to the model's {model.seq_len}")
    if not 1 <= stride <= most:
        raise UserError(f"stride: {stride} must be from 1 to {most}, the targets of a window")
    if len(ids) < 2:
        raise UserError(f"{source}: has {len(ids)} tokens; at least 2 are needed")
    windows = list(_windows(len(ids), most, stride))
    rows = min(max(1, BATCH_TOKENS // context), len(windows))
    width = most + 1
    if compute.platform == "tpu":
        width = -(-width // LANES) * LANES  # others have no kernel
    return _batches(np.asarray(ids, np.int32), windows, context - 1, (rows, width))


def _turns_after(model: Model, length: int) -> bool:
    """True for a model whose rotations are others in rows of more than `length` tokens."""
    scaling = getattr(model, "rope_scaling", None)
    kind, original = (getattr(scaling, name, None) for name in ("kind", "original_seq_len"))
    return kind in ("dynamic", "longrope") and original == length


def _batches(
    ids: np.ndarray, windows: list[tuple[int, int, int]], last: int, shape: tuple[int, int]
) -> Iterator[dict[str, np.ndarray]]:
    rows, width = shape
    for first in range(0, len(windows), rows):
        batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "segment_ids")}
        places = np.minimum(np.arange(width, dtype=np.int32), last)
        batch["positions"] = np.broadcast_to(places, shape)
        batch["loss_weight"] = np.zeros(shape, np.float32)
        batch["text_bytes"] = np.zeros(rows)
        for row, (start, new, stop) in enumerate(windows[first : first + rows]):
            batch["tokens"][row, : stop - start] = ids[start:stop]
            batch["segment_ids"][row, : stop - start] = 1
            batch["loss_weight"][row, new - start : stop - start] = 1.0
        yield batch


def _windows(count: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, first predicted token, stop) of each window."""
    seen = 1
    for start in range(0, count - 1, stride):
        stop = min(start + context + 1, count)
        yield start, seen, stop
        seen = stop
        if stop == count:
            return


def text_loss(
    loaded: LoadedModel,
    text: str | Path,
    *,
    context: int | None = None,
    stride: int | None = None,
    max_chars: int | None = None,
    samples: int | None = None,
    precision: str | None = None,
    kernels: Kernels = "platform",
) -> tuple[SourceLoss, Compute]:
    """The loss of a model on a text file as one document, and how it was computed. `context` and
    `stride` are in tokens, `samples` is for diffusion. Raises UserError if something is missing."""
    compute = spread(row_compute(precision, kernels), loaded.num_devices)
    objective = _objective_of(loaded, samples)
    ids = encode_file(loaded, text, max_chars)
    with computing_with(loaded.weights):
        loss = evaluate_text(
            loaded.model,
            loaded.weights,
            ids,
            context=context or min(CONTEXT, loaded.model.seq_len),
            stride=stride,
            compute=compute,
            source=Path(text).name,
            objective=objective,
        )
    text_bytes = int(TokenBytes(loaded.tokenizer).of(np.asarray(ids))[1:].sum())
    return replace(loss, text_bytes=text_bytes), compute


def eval_text_command(
    path: str, text: str, *, adapter: str | None = None, devices: int | None = None, **options: Any
) -> int:
    """Prints the loss of any model (run directory, Hugging Face folder, .gguf, hub name) on a text
    file; `options` are those of `text_loss`. Returns 0."""
    loaded = load_model(path, adapter, num_devices=devices, copies=True)
    loss, compute = text_loss(loaded, text, **options)
    print_losses([loss], compute, None, loaded.num_devices, loaded.num_copies)
    return 0


def _objective_of(loaded: LoadedModel, samples: int | None) -> Objective:
    """The objective that a model is measured by on a text. Raises UserError for `samples` without
    effect."""
    if loaded.model.fills_masks:
        from lmwright.evals.fill import mask_of
        from lmwright.objectives.diffusion import Diffusion

        given = {} if samples is None else {"eval_samples": samples}
        return Diffusion(mask_token_id=mask_of(loaded.tokenizer), **given)
    refuse_samples(loaded.model, samples)
    return Clm()


def encode_file(loaded: LoadedModel, text: str | Path, max_chars: int | None = None) -> list[int]:
    """Ids of a text file, or of its beginning, with those that go before each text; a byte order
    mark is none of it. Raises UserError where it cannot be read."""
    try:
        whole = Path(text).read_bytes().decode("utf-8-sig")[:max_chars]
    except OSError as error:
        raise UserError(f"{text}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{text}: is not UTF-8 text") from None
    # a prefix such as bos stands before the text, as it did in training
    return [*loaded.prompt_prefix, *loaded.tokenizer.encode(whole)]
