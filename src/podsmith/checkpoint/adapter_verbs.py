"""The verbs of adapters: a run's adapter as a PEFT folder, folders combined, and merged."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from podsmith.checkpoint.combine import Combination, combine
from podsmith.checkpoint.hf import LoadedModel, export_loaded, load_model
from podsmith.checkpoint.layout import HfTensors
from podsmith.checkpoint.origin import look_at, weights_hash
from podsmith.checkpoint.peft import merge_into, to_peft
from podsmith.checkpoint.peft_folder import PeftFolder, read_folder, write_folder
from podsmith.checkpoint.proof import Proof
from podsmith.checkpoint.writer import new_folder
from podsmith.core.param import Tree
from podsmith.errors import UserError

ORIGIN = "podsmith.json"  # the base's hash, which PEFT's config has no place for
ROUNDED = "base_hash_bf16"  # the same of a base that was exported in bfloat16


def export_adapter_command(
    run_dir: str | Path, out: str | Path, *, adapter: str | None = None
) -> None:
    """Writes an adapter of a run's newest checkpoint as a PEFT folder."""
    from podsmith.config import load_run
    from podsmith.plan.resolve import resolve
    from podsmith.run import Mesh
    from podsmith.train.lora_restore import pick, trained

    folder = Path(run_dir)
    if not (folder / "run.toml").exists():
        raise UserError(f"{folder}: not a run directory (no run.toml); train one first")
    run = replace(load_run(folder / "run.toml", []), mesh=Mesh())
    if run.lora is None:
        raise UserError(f"{folder}: trained all its weights; write it with podsmith export")
    plan = resolve(run, jax.local_devices()[:1])
    chosen = pick(plan, adapter)
    base, weights = trained(plan, folder)
    found = to_peft(run.model, chosen, weights[chosen.name], base.path)
    with new_folder(Path(out)) as temporary:
        write_folder(temporary, found)
        said = {"base": base.path, "base_hash": base.hash, "base_storage": run.lora.base}
        if base.path:
            said[ROUNDED] = weights_hash(look_at(base.path).weights(), ml_dtypes.bfloat16)
        (temporary / ORIGIN).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    _say(out, found)


def merge_command(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Proof:
    """Writes a model with a PEFT adapter merged into it, as `podsmith export` writes models.
    Raises UserError for an adapter that was trained on another base."""
    loaded, found = load_model(base), read_folder(adapter)
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), loaded.weights)
    _refuse_other_base(Path(adapter), base, weights)
    merged = merge_into(loaded.model, weights, found, str(adapter))
    facts = replace(
        loaded.facts,
        name=Path(out).absolute().name,
        origin=f"{loaded.facts.name} with the adapter {Path(adapter).absolute().name} merged in.",
    )
    changed: LoadedModel = replace(
        loaded, tensors=HfTensors(loaded.model, merged), facts=facts, reference=None
    )
    return export_loaded(changed, out, dtype=dtype, overwrite=overwrite)


def _refuse_other_base(adapter: Path, base: str | Path, weights: Tree) -> None:
    """Raises UserError where podsmith wrote the adapter and says that its base was another."""
    try:
        said = json.loads((adapter / ORIGIN).read_text(encoding="utf-8"))
        known = {said[name] for name in ("base_hash", ROUNDED) if name in said}
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{adapter / ORIGIN}: cannot be read ({error}); export it again") from None
    if ROUNDED not in said:  # a base made from a seed has no files to compare with
        return
    if not any(weights_hash(weights, to) in known for to in (None, ml_dtypes.bfloat16)):
        raise UserError(
            f"{adapter}: was trained on {said.get('base')}, and the weights of {base} are others; "
            f"merge into that one, or remove {adapter / ORIGIN} to merge all the same"
        )


def combine_command(
    out: str | Path, adapters: Sequence[str], *, weights: Sequence[float] = (), **how: Any
) -> None:
    """Writes several PEFT adapters of one base as one; equal weights if none are given."""
    said = list(weights) or [1.0 / len(adapters)] * len(adapters)
    found = combine([read_folder(folder) for folder in adapters], said, Combination(**how))
    with new_folder(Path(out)) as temporary:
        write_folder(temporary, found)
    _say(out, found)


def _say(out: str | Path, adapter: PeftFolder) -> None:
    count = sum(module.a.size + module.b.size for module in adapter.modules.values())
    ranks = sorted({module.rank for module in adapter.modules.values()})
    print(
        f"{out}: {len(adapter.modules)} modules, {count:,} parameters, "
        f"rank {', '.join(map(str, ranks))}"
    )
