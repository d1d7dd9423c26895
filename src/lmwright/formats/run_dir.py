"""A run directory, read without ever being written to: its weights and its tokenizer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from lmwright.checkpoint.saved import SavedStates
from lmwright.config.run import Mesh, Run
from lmwright.core.param import Tree
from lmwright.data.rows.store import TokenStore
from lmwright.errors import UserError
from lmwright.formats.open import open_run
from lmwright.formats.tokenizer_files import has_tokenizer
from lmwright.program.plan import resolve
from lmwright.program.state import abstract_state, eval_weights


def load_run_weights(
    run_dir: str | Path, step: int | None = None, *, adapter: str | None = None
) -> tuple[Run, Tree]:
    """The run of a directory and its weights at a step, or the newest intact ones (the moving
    average where the run keeps one), on this process's first device; `adapter` names one of
    several, and is merged into its base. The directory is only read, so a run may be training
    there. Raises UserError where there are none."""
    folder = Path(run_dir)
    run = open_run(folder).run
    alone = replace(run, mesh=Mesh())
    plan = resolve(alone, jax.local_devices()[:1])
    if run.lora is not None:
        from lmwright.train.lora_restore import merged_weights

        return run, merged_weights(plan, folder, adapter, step)
    if adapter is not None:
        raise UserError(f"{folder}: trained all its weights and has no adapters; drop {adapter!r}")
    saved, abstract = SavedStates(folder), abstract_state(plan)
    if step is not None:
        return run, eval_weights(saved.restore_at(step, abstract)[0])
    restored = saved.restore(abstract)
    if restored is None:
        raise UserError(f"{folder}: has no checkpoint yet; train at least one step")
    return run, eval_weights(restored[0])


def run_tokenizer(run: Any, path: Path) -> Path:
    """The tokenizer kept in the run directory, else that of the prepared data."""
    data_dir = str(run.data.dir)
    if "://" in data_dir and not has_tokenizer(path / "tokenizer"):
        return Path(TokenStore.open(data_dir).tokenizer_dir)
    for folder in (path / "tokenizer", Path(data_dir) / "tokenizer"):
        if has_tokenizer(folder):
            return folder
    raise UserError(
        f"{data_dir}/tokenizer: the run's tokenizer is not there; work from the folder in which "
        f"it was trained, or copy the tokenizer to {path / 'tokenizer'}"
    )
