"""The verbs of adapters: a run's adapter as a PEFT folder, folders combined, and merged."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from lmwright.config.run import Run
from lmwright.data.text.chat_ends import end_ids
from lmwright.errors import UserError
from lmwright.formats.adapter_note import refuse_other_base, write_note
from lmwright.formats.combine import Combination, combine
from lmwright.formats.convert import export_loaded
from lmwright.formats.hf_layout import HfTensors
from lmwright.formats.hf_read import read_config
from lmwright.formats.hf_write import new_folder
from lmwright.formats.load import load_model, prompted, write_run_tokenizer
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.open import HF, is_run, open_origin, open_run
from lmwright.formats.peft import (
    in_files,
    in_stacks,
    merge_into,
    module_slots,
    read_for,
    to_peft,
)
from lmwright.formats.peft_folder import CONFIG, PeftFolder, read_folder, write_folder
from lmwright.formats.peft_head import headed, noted
from lmwright.formats.peft_names import lost_in_peft
from lmwright.formats.proof import Proof, Source
from lmwright.formats.safetensors import some
from lmwright.formats.tensor_hash import weights_hash
from lmwright.formats.tokenizer_files import (
    copy_terms,
    has_tokenizer,
    open_tokenizer,
    write_tokenizer,
)
from lmwright.guard.temporary import temporary_folder
from lmwright.models.text_part import TEXT_PARTS, architecture_of
from lmwright.program.lora import ResolvedAdapter
from lmwright.storage.mirror import sending


def export_adapter_command(
    run_dir: str | Path, out: str | Path, *, adapter: str | None = None
) -> None:
    """Writes an adapter of a run's newest checkpoint as a PEFT folder."""
    from lmwright.config.run import Mesh
    from lmwright.formats.train_state import pick
    from lmwright.formats.weights import trained
    from lmwright.program.plan import resolve

    place = open_run(run_dir)
    folder, run = place.path, replace(place.run, mesh=Mesh())
    plan = resolve(run, jax.local_devices()[:1])
    if not plan.training.freezes:
        raise UserError(f"{folder}: trained all weights; use lmwright export instead")
    chosen = pick(plan, adapter)
    refuse_folder(run, chosen, folder)
    base, weights = trained(plan, folder, place.step)
    model, _ = run.objective.exported(run.model, plan.spec)
    peft = to_peft(model, chosen, weights[chosen.name], base.path, names_in_whole(base.path, model))
    with sending(out) as local, new_folder(local, again=True) as temporary:
        write_folder(temporary, peft)
        write_run_tokenizer(run, folder, temporary)
        write_note(temporary, base, run.lora.base, **noted(prompted(run, model)))
    _say(out, peft, model)


def refuse_folder(run: Run, adapter: ResolvedAdapter, folder: str | Path) -> None:
    """Raises UserError for an adapter of a run that no folder of PEFT holds."""
    module_slots(run.model)  # which are none of ternary weights
    if adapter.variant == "dora" and in_stacks(run.model, adapter):
        raise UserError(
            f"lora.variant: PEFT has no DoRA for the experts of {run.model.hf.name}; write the "
            "merged model with lmwright export"
        )
    if run.qat is not None:
        raise UserError(
            f"{folder}: [qat] rounded its adapter with its base, and PEFT would add it behind the "
            "rounding; use lmwright export, which writes the merged model"
        )


def names_in_whole(base: str, model: Any) -> dict[str, str]:
    """Beginnings of the text's module names in transformers' class of a base that holds more than
    text, by what they are in the text alone; none for other bases."""
    if not base or (place := open_origin(base, model, header=True)).kind != HF:
        return {}
    part = TEXT_PARTS.get(architecture_of(read_config(place.path)))
    return dict(part.modules) if part else {}


def merge_command(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Proof:
    """Writes a model with a PEFT adapter merged into it, as `lmwright export` writes models, and
    compares it with what PEFT computes from the same base and folder, where PEFT is installed.
    Raises UserError for an adapter that was trained on another base."""
    _refuse_others(base, adapter)
    loaded = load_model(base)
    peft = in_files(read_for(loaded.model, adapter), loaded.model)
    loaded.check()
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), loaded.weights)
    model, weights, own = headed(loaded.model, weights, peft, adapter)
    hashes = (weights_hash(own, to) for to in (None, ml_dtypes.bfloat16))
    refuse_other_base(Path(adapter), base, hashes, "merge into that one")
    model, merged = merge_into(model, weights, peft, str(adapter))
    loaded = _with_tokenizer_of(loaded, model, Path(adapter))
    facts = replace(
        loaded.facts,
        name=Path(out).absolute().name,
        origin=f"{loaded.facts.name} with the adapter {Path(adapter).absolute().name} merged in.",
    )
    changed: LoadedModel = replace(
        loaded,
        model=model,
        tensors=HfTensors(model, merged),
        facts=facts,
        origin=Source(loaded.reference, model, lambda: merged, Path(adapter)),
    )
    return export_loaded(changed, out, dtype=dtype, overwrite=overwrite)


def _with_tokenizer_of(loaded: LoadedModel, model: Any, adapter: Path) -> LoadedModel:
    """The model with the tokenizer that the adapter was trained with, which knows its chat template
    and what is around a text, where it lies beside the adapter and the model has all its tokens.
    The base's license stays beside it."""
    if not has_tokenizer(adapter):
        return loaded
    tokenizer = open_tokenizer(adapter)
    if tokenizer.vocab_size > model.vocab_size:
        return loaded
    ends = loaded.end_ids
    if loaded.tokenizer_dir is None or loaded.tokenizer.chat_template != tokenizer.chat_template:
        ends = (*ends, *(each for each in end_ids(tokenizer) if each not in ends))
    temporary = temporary_folder()
    folder = Path(temporary.name)
    write_tokenizer(adapter, folder, None)
    if loaded.tokenizer_dir is not None:
        copy_terms(loaded.tokenizer_dir, folder)
    beside = {"tokenizer_dir": folder, "temporary": temporary}
    return replace(loaded, **beside, prefix=None, suffix=(), end_ids=ends)


def _refuse_others(base: str | Path, adapter: str | Path) -> None:
    """Raises UserError where base and adapter are exchanged, or the adapter is still in its run."""
    if (Path(base) / CONFIG).is_file():
        raise UserError(f"{base}: is an adapter; name its base first and then the adapter")
    if is_run(adapter):
        raise UserError(
            f"{adapter}: is a run; export its adapter first: lmwright adapters export {adapter} "
            "FOLDER, and give FOLDER; or write the merged model: "
            f"lmwright export {adapter} OUT"
        )


def combine_command(
    out: str | Path, adapters: Sequence[str], *, weights: Sequence[float] = (), **options: Any
) -> None:
    """Writes several PEFT adapters of one base as one; equal weights if none are given."""
    shares = list(weights) or [1.0 / len(adapters)] * len(adapters)
    combined = combine([read_folder(folder) for folder in adapters], shares, Combination(**options))
    with sending(out) as local, new_folder(local, again=True) as temporary:
        write_folder(temporary, combined)
    _say(out, combined)


def _say(out: str | Path, adapter: PeftFolder, model: Any = None) -> None:
    count = sum(module.a.size + module.b.size for module in adapter.modules.values())
    ranks = sorted({module.rank for module in adapter.modules.values()})
    said = (
        f"{out}: {len(adapter.modules)} modules, {count:,} parameters, "
        f"rank {', '.join(map(str, ranks))}"
    )
    saved = {id(weight): weight.size for weight in adapter.saved.values()}  # a tied table once
    if saved:
        said += f", and {sum(saved.values()):,} parameters that were trained whole"
    print(said)
    if lost := lost_in_peft(adapter, model):
        print(
            f"  PEFT would not load the factors of {some(lost)}; merge with lmwright adapters "
            "merge instead"
        )
