"""Agreement: the processes of a run train the same with the same versions, or not at all.

    process 0 --its run, versions, data--> all: compare --does any differ?--> all end, or none

A process with another learning rate, or other data, would train along without a word: its part of
the weights would be another run's.
"""

import json
import tomllib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import lmwright
from lmwright.config.load import dump_toml
from lmwright.config.run import Run
from lmwright.core.processes import from_first, of_all
from lmwright.data.rows.store import TokenStore
from lmwright.errors import UserError
from lmwright.report.read import flatten

APART = ("dir", "data")  # places may be called otherwise on another host; data has fingerprints
MOST_SHOWN = 4
LONGEST_SHOWN = 60


def refuse_other_runs(run: Run) -> None:
    """Raises UserError on all processes if one has another run, or other versions."""
    if jax.process_count() > 1:
        tree = {k: v for k, v in tomllib.loads(dump_toml(run)).items() if k not in APART}
        versions = {"the version of lmwright": lmwright.__version__, "that of jax": jax.__version__}
        _compare({name: _text(value) for name, value in (flatten(tree) | versions).items()})


def refuse_other_stores(stores: Mapping[str, TokenStore]) -> None:
    """Raises UserError on all processes if one has other data."""
    if jax.process_count() > 1:
        of = {name: f" of {name}" if len(stores) > 1 else "" for name in stores}
        _compare({f"the data{of[name]}": store.fingerprint for name, store in stores.items()})


def _compare(mine: dict[str, str]) -> None:
    first = json.loads(_of_first(json.dumps(mine)))
    changed = [
        f"{name} is {_cut(mine.get(name))} here and {_cut(first.get(name))} on process 0"
        for name in sorted(mine.keys() | first.keys())
        if mine.get(name) != first.get(name)
    ]
    others = np.flatnonzero(of_all(bool(changed))).tolist()
    if not others:
        return
    more = f", and {len(changed) - MOST_SHOWN} more differ" if len(changed) > MOST_SHOWN else ""
    told = ", ".join(changed[:MOST_SHOWN]) + more
    told = told or f"not what process {', '.join(map(str, others))} has; see its message"
    raise UserError(f"the run of process {jax.process_index()}: {told}; start all processes alike")


def _text(value: Any) -> str:
    """Text of a value; of a path the last part."""
    return json.dumps(value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else value,
                      default=str)  # fmt: skip


def _cut(text: str | None) -> str:
    text = "unset" if text is None else text
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _of_first(text: str) -> str:
    """The text of process 0."""
    data = np.frombuffer(text.encode(), np.uint8)
    size = int(from_first(np.int32(data.size)))
    buffer = data if jax.process_index() == 0 else np.zeros(size, np.uint8)
    return bytes(from_first(buffer)).decode()
