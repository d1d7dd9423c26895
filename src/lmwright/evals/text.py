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

import numpy as np

from lmwright.core.compute import DTYPES, LANES, Compute
from lmwright.core.contract import CachedModel
from lmwright.core.leaves import cast
from lmwright.core.param import Tree
from lmwright.data.tokens.token_bytes import TokenBytes
from lmwright.errors import UserError
from lmwright.evals.compute import Kernels, refuse_encoder, row_compute
from lmwright.evals.loss import SourceLoss, evaluate_rows
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.objectives.clm import Clm

CONTEXT = 1024
BATCH_TOKENS = 4096


def evaluate_text(
    model: CachedModel,
    w: Tree,
    ids: Sequence[int],
    *,
    context: int = CONTEXT,
    stride: int | None = None,
    compute: Compute | None = None,
    source: str = "text",
) -> SourceLoss:
    """Loss over the ids of one text, in which each token but the first is predicted once;
    `text_bytes` is 0.

    `context` and `stride` are in tokens; a stride below the context makes windows overlap.
    Raises UserError where they do not fit the model or the text.
    """
    compute = compute or row_compute()
    batches = text_batches(model, ids, context, stride, compute, source)
    w = cast(w, DTYPES[compute.precision])
    return evaluate_rows(model, Clm(), compute, w, source, batches)


def text_batches(
    model: CachedModel,
    ids: Sequence[int],
    context: int,
    stride: int | None,
    compute: Compute,
    source: str = "text",
) -> Iterator[dict[str, np.ndarray]]:
    """The windows of a text as batches of rows; `evaluate_text` says what is what."""
    refuse_encoder(model)
    stride = stride or context
    if not 1 <= stride <= context:
        raise UserError(f"stride: {stride} must be from 1 to the context, {context}")
    if not 2 <= context <= model.seq_len:
        raise UserError(f"context: {context} must be from 2 to the model's {model.seq_len}")
    if len(ids) < 2:
        raise UserError(f"{source}: has {len(ids)} tokens; at least 2 are needed")
    windows = list(_windows(len(ids), context, stride))
    rows = min(max(1, BATCH_TOKENS // context), len(windows))
    width = context + 1  # the last is a target alone
    if compute.kernels in ("tpu", "early tpu"):
        width = -(-width // LANES) * LANES  # others have no kernel
    return _batches(np.asarray(ids, np.int32), windows, context, (rows, width))


def _batches(
    ids: np.ndarray, windows: list[tuple[int, int, int]], context: int, shape: tuple[int, int]
) -> Iterator[dict[str, np.ndarray]]:
    rows, width = shape
    for first in range(0, len(windows), rows):
        batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "segment_ids")}
        places = np.minimum(np.arange(width, dtype=np.int32), context - 1)
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


def eval_text_command(
    path: str,
    text: str,
    *,
    context: int | None = None,
    stride: int | None = None,
    max_chars: int | None = None,
    adapter: str | None = None,
    precision: str | None = None,
    kernels: Kernels = "platform",
) -> int:
    """Prints the loss of any model (run directory, Hugging Face folder, .gguf, hub name) on a text
    file as one document; returns 0. Raises UserError if something is missing."""
    from lmwright.evals.held_out import print_losses

    loaded = load_model(path, adapter)
    compute = row_compute(precision, kernels)
    ids = encode_file(loaded, text, max_chars)
    loss = evaluate_text(
        loaded.model,
        loaded.weights,
        ids,
        context=context or min(CONTEXT, loaded.model.seq_len),
        stride=stride,
        compute=compute,
        source=Path(text).name,
    )
    text_bytes = int(TokenBytes(loaded.tokenizer).of(np.asarray(ids))[1:].sum())
    print_losses([replace(loss, text_bytes=text_bytes)], compute)
    return 0


def encode_file(loaded: LoadedModel, text: str, max_chars: int | None = None) -> list[int]:
    """Ids of a text file, or of its beginning, with those that go before each text. Raises
    UserError where it cannot be read."""
    try:
        whole = Path(text).read_bytes().decode("utf-8")[:max_chars]
    except OSError as error:
        raise UserError(f"{text}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{text}: is not UTF-8 text") from None
    # a prefix such as bos stands before the text, as it did in training
    return [*loaded.prompt_prefix, *loaded.tokenizer.encode(whole)]
