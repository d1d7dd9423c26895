"""Packed: what attention takes in the rows that a run has prepared, beside rows of one document.

    data.dir --some rows--> segment ids --> blocks of keys that each block of queries visits

Kernels that leave other documents out are ours for GPUs (`kernels.gpu_attention`); all others take
about as long whatever the rows hold.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lmwright.config.run import Run, seq_len_of
from lmwright.data.missing import has_adapter_data
from lmwright.data.rows.store import TokenStore
from lmwright.errors import UserError
from lmwright.hardware.devices import GPUS
from lmwright.kernels import gpu_attention, gpu_tokamax
from lmwright.planner.analytic.machine import Machine
from lmwright.planner.analytic.stock import stocks_of

SAMPLED = 64  # rows
BLOCK = 128  # tokens of queries, and of keys
# Of one H100 (`benchmarks/attention_gpu.py`): three documents in 2,048 tokens take 0.34 ms where
# one takes 0.68, and cuDNN, with which rows of one document are reckoned, 0.57; with other heads
# 0.55, 1.06 and 0.91.
BESIDE = 1.0  # what a block of queries costs beside its blocks of keys, in these
SLOWER = 1.18


def with_documents(run: Run, machine: Machine) -> Machine:
    """The machine with the share of attention's time that the run's prepared rows take; as it is
    where nothing is prepared on this host, or where kernels compute what no document needs."""
    if not _leaves_out(run, machine):
        return machine
    segments = _segment_ids(run)
    if segments is None:
        return machine
    share = packed_share(segments, stocks_of(run)[0].work.attention.windows)
    return replace(machine, packed_share=share)


def packed_share(segments: np.ndarray, windows: Sequence[int | None]) -> float:
    """Time of our kernels in rows with these segment ids [rows, T], a layer for each of `windows`,
    over that in causal rows of one document."""
    blocks = [_blocks(segments, window) for window in windows]
    return SLOWER * float(np.mean(blocks)) / _blocks(np.ones_like(segments), None)


def _leaves_out(run: Run, machine: Machine) -> bool:
    """True if attention of packed rows is computed by our kernels there, as
    `gpu_attention.name_for` has it where tokamax is installed."""
    attention = stocks_of(run)[0].work.attention
    if machine.platform != "gpu" or run.data.pack.attention == "row":
        return False
    if attention is None or attention.both_ways:
        return False
    itemsize = 2 if run.train.activations == "bf16" else 4
    if not gpu_attention.fits(seq_len_of(run), attention.head_dim, itemsize):
        return False
    kind = GPUS[machine.kind].device_kind
    narrow = attention.head_dim <= gpu_attention.MOST_PACKED_HEAD_DIM
    return not gpu_tokamax.has_card(kind) or (narrow and gpu_tokamax.is_hopper(kind))


def _segment_ids(run: Run) -> np.ndarray | None:
    """[rows, T] of rows spread over an epoch; None where none are prepared on this host."""
    if "://" in run.data.dir or has_adapter_data(run):
        return None
    try:
        store = TokenStore.open(run.data.dir)
        if store.seq_len != seq_len_of(run) or not store.whole:
            return None
        rows = np.unique(np.linspace(0, store.epoch_rows - 1, SAMPLED).astype(int))
        return np.concatenate([store.batch(row, row + 1)["segment_ids"] for row in rows])
    except UserError:
        return None


def _blocks(segments: np.ndarray, window: int | None) -> float:
    """Mean number of blocks of keys that a row's blocks of queries visit, and what these cost
    beside."""
    at = np.arange(segments.shape[1])
    new = np.diff(segments, axis=1, prepend=-1) != 0
    start = np.maximum.accumulate(np.where(new, at, 0), axis=1)
    start = start if window is None else np.maximum(start, at + 1 - window)
    first = start[:, ::BLOCK] // BLOCK  # the first query of a block sees the earliest key
    visited = at[::BLOCK] // BLOCK + 1 - first
    return float(np.mean(np.sum(visited + BESIDE, axis=1)))
