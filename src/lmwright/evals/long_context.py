"""The commands that measure long contexts, and keep what they find in the run directory.

eval MODEL --by-position     held-out rows, or windows of a text --> loss by position
eval MODEL --needle          held-out rows, or a text, as haystack --> numbers found
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lmwright.config.run import Mesh
from lmwright.core.compute import DTYPES
from lmwright.core.spread import computing
from lmwright.core.ternary import cast_as_trained
from lmwright.data.rows.store import TokenStore
from lmwright.errors import UserError
from lmwright.evals.compute import Kernels, compute_text, decode_compute, row_compute, spread
from lmwright.evals.held_out import open_held_out
from lmwright.evals.kept import kept_in_run
from lmwright.evals.needle import (
    Hay,
    answer_greedily,
    default_lengths,
    find_needles,
    print_needles,
)
from lmwright.evals.positions import position_losses, print_positions
from lmwright.evals.text import CONTEXT, encode_file, text_batches
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.open import RUN, open_place, open_run
from lmwright.formats.train_state import pick
from lmwright.program.plan import resolve

HAY_ROWS = 64  # held-out rows of each source in the haystack


def positions_command(
    path: str,
    *,
    text: str | None = None,
    context: int | None = None,
    stride: int | None = None,
    max_chars: int | None = None,
    max_rows: int | None = None,
    adapter: str | None = None,
    precision: str | None = None,
    kernels: Kernels = "platform",
    devices: int | None = None,
) -> int:
    """Prints the loss by position of a run on its held-out data, or of any model on a text in
    windows of `context` tokens, and keeps it in the run directory; returns 0. Raises UserError as
    `open_held_out` and `evaluate_text`."""
    if text is None:
        opened = open_held_out(
            path, max_rows=max_rows, adapter=adapter, precision=precision, kernels=kernels
        )
        measured = opened.held_out.positions(opened.weights)
        compute, step, num_devices = opened.plan.compute, opened.step, 1
    else:
        loaded = load_model(path, adapter, num_devices=devices)
        num_devices, step = loaded.num_devices, loaded.step
        compute = spread(row_compute(precision, kernels), num_devices)
        context = context or min(CONTEXT, loaded.model.seq_len)
        source, ids = Path(text).name, encode_file(loaded, text, max_chars)
        batches = text_batches(loaded.model, ids, context, stride, compute, source)
        model, dtype = loaded.model, DTYPES[compute.precision]
        w = cast_as_trained(model.spec(), loaded.weights, dtype)
        with computing(num_devices):
            measured = [position_losses(model, compute, w, source, batches, context)]
    with kept_in_run(path, step, [each.line() for each in measured], adapter):
        print_positions(measured)
        print(compute_text(compute, num_devices))
    return 0


def needle_command(
    path: str,
    *,
    text: str | None = None,
    lengths: Sequence[int] = (),
    depths: Sequence[float] = (0, 25, 50, 75, 100),
    tries: int = 4,
    max_chars: int | None = None,
    seed: int = 0,
    adapter: str | None = None,
    precision: str | None = None,
    kernels: Kernels = "platform",
    devices: int | None = None,
) -> int:
    """Prints how many needles a model finds by length and depth in a text, or in the held-out data
    of its run, and keeps it in the run directory; returns 0. Raises UserError for lengths beyond
    the context."""
    loaded = load_model(path, adapter, num_devices=devices)
    lengths = tuple(lengths) or default_lengths(loaded.model.seq_len, loaded.tokenizer)
    if too_long := [n for n in lengths if n > loaded.model.seq_len]:
        raise UserError(
            f"--lengths: {too_long[0]} is beyond the model's context of {loaded.model.seq_len}; "
            "take shorter ones, or extend the context (docs/long-context.md)"
        )
    source = Path(text).name if text else "held-out data"
    ids = encode_file(loaded, text, max_chars) if text else _held_out_ids(path, adapter)
    hay = Hay(loaded.tokenizer, _plain(loaded, ids), loaded.prompt_prefix)
    if not len(hay.ids):
        raise UserError(f"{text or path}: holds no text to hide a needle in; give --text FILE")
    compute = decode_compute(loaded.model, loaded.weights, 16, precision, kernels)
    compute = spread(compute, loaded.num_devices)
    scores = find_needles(
        answer_greedily(loaded, compute), hay, lengths, tuple(depths),
        source=source, tries=tries, seed=seed,
    )  # fmt: skip
    with kept_in_run(path, loaded.step, [scores.line()], adapter):
        print_needles(scores)
        if max(lengths) > len(hay.ids):
            print(f"the haystack has {len(hay.ids):,} tokens and was repeated")
        print(compute_text(compute, loaded.num_devices))
    return 0


def _held_out_ids(path: str, adapter: str | None) -> np.ndarray:
    """Tokens of held-out rows of a run, or of an adapter, spread evenly over each source."""
    if open_place(path).kind != RUN:
        raise UserError(f"{path}: not a run directory, so it has no held-out data; add --text FILE")
    run = replace(open_run(path).run, mesh=Mesh())
    store = TokenStore.open(pick(resolve(run, jax.local_devices()[:1]), adapter).data)
    pieces = []
    for source in store.eval_sources:
        rows = min(store.eval_rows(source), HAY_ROWS)
        for batch in store.eval_batches(source, max(rows, 1), HAY_ROWS):
            pieces.append(batch["tokens"][batch["segment_ids"] > 0])
    if not pieces:
        raise UserError(
            f"{path}: nothing is held out; set data.holdout_fraction and prepare again, or give "
            "--text FILE"
        )
    return np.concatenate(pieces)


def _plain(loaded: LoadedModel, ids: Any) -> np.ndarray:
    """Ids without special tokens, which would end a text or open a turn in its midst."""
    special = np.asarray(list(loaded.tokenizer.special_tokens.values()), np.int64)
    ids = np.asarray(ids, np.int64)
    return ids[~np.isin(ids, special)]
