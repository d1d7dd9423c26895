"""Any model with its weights, wherever it lies.

run directory, Hugging Face folder, GGUF file, hub name --load_model--> LoadedModel
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lmwright.config.rows import PLAIN
from lmwright.core.copies import count_copies
from lmwright.core.spread import count_devices
from lmwright.data.rows.store import TokenStore
from lmwright.data.text.chat_ends import begins_with_bos, end_ids
from lmwright.data.tokens.tokenizer import TextTokenizer
from lmwright.errors import UserError
from lmwright.formats.card import facts_of_run
from lmwright.formats.document_tokenizer import fit_tokenizer
from lmwright.formats.hf_layout import HfTensors
from lmwright.formats.loaded import LoadedModel, load_files
from lmwright.formats.open import RUN, Origin, open_place
from lmwright.formats.tokenizer_files import (
    has_tokenizer,
    open_tokenizer,
    write_tokenizer,
)
from lmwright.formats.weights import load_codes, load_run_at
from lmwright.models.over import OverEncoder
from lmwright.storage.hub import PREFIX

CHATS = ("sft", "dpo", "orpo", "kto")
"""Kinds of objectives that learn from conversations."""


def load_model(
    path: str | Path, adapter: str | None = None, part: str | None = None,
    num_devices: int | None = 1, copies: bool = False,
) -> LoadedModel:  # fmt: skip
    """The model in a run directory (its newest intact checkpoint, or the one that the path
    names), an HF folder, a .gguf file or under a hub name (`hf://owner/name`); `part` names one of
    several that a run trains. `num_devices` of this machine share the weights: with None one, or
    all where one is too small. With `copies` each has all weights if it has room: with None, all
    do. Raises UserError if it is none of these."""
    place = open_place(path)
    if place.kind == RUN:
        return _load_run(place, adapter, part, num_devices, copies)
    for what, name in (("adapter", adapter), ("part", part)):
        if name is not None:
            raise UserError(f"{path}: is not a run directory, so it has no {what} {name!r}")
    loaded = load_files(place)
    loaded = replace(loaded, **_devices(loaded.model, num_devices, copies, str(path)))
    if not place.hub:
        return loaded
    name = str(path).removeprefix(PREFIX).partition("@")[0]
    facts = replace(loaded.facts, name=name, origin=f"Imported from {place.hub}.")
    return replace(loaded, facts=facts)


def _load_run(
    place: Origin, adapter: str | None, part: str | None, num_devices: int | None, copies: bool
) -> LoadedModel:
    path = place.path
    # a run's weights are wide when they are read, and narrow beside it
    devices = _devices(place.run.model, num_devices, copies, str(path), itemsize=6)
    objective = place.run.objective
    if part is not None:
        if part not in objective.parts:
            raise UserError(
                f"{path}: a run of objective.kind = {objective.kind!r} trains one model, and no "
                f"{part!r}; leave --part out"
            )
        objective = objective.part(part)
    run, w, step = load_run_at(
        path, place.step, adapter=adapter, num_devices=devices["num_devices"]
    )
    model, w = objective.exported(run.model, w)
    model = prompted(run, model)
    tokenizer_dir, prefix = run_tokenizer(run, path)
    facts = facts_of_run(path, place.step)
    suffix = _suffix(run, tokenizer_dir) if _reads_documents(model) else ()
    tensors = HfTensors(model, w)
    if run.qat is not None:
        tensors = HfTensors(model, w, load_codes(path, place.step, adapter), run.qat.weights)
    ends = end_ids(open_tokenizer(tokenizer_dir)) if any(_chats(run)) else ()
    return LoadedModel(
        model, tensors, tokenizer_dir, facts, path, prefix, suffix, end_ids=ends, step=step,
        **devices,
    )  # fmt: skip


def _devices(
    model: Any, asked: int | None, copies: bool, where: str, itemsize: int = 2
) -> dict[str, int]:
    """Numbers of devices that share weights of `itemsize` bytes, or have all of them each."""
    if copies and (count := count_copies(model, asked, itemsize)) > 1:
        return {"num_devices": 1, "num_copies": count}
    return {"num_devices": count_devices(model, asked, where, itemsize), "num_copies": 1}


def _chats(run: Any) -> list[bool]:
    """For each source of a run whether its rows are conversations; where none is named, by what the
    objective learns from."""
    if run.data.sources:
        return [source.rows not in PLAIN for source in run.data.sources]
    return [run.objective.kind in CHATS]


def prompted(run: Any, model: Any) -> Any:
    """A run's model, with the prompts that its texts were given if it is one of vectors."""
    if not (isinstance(model, OverEncoder) and run.data.sources):
        return model
    return model.with_prompts(run.data.sources[0].prompts)


def _reads_documents(model: Any) -> bool:
    """True for a model whose tokenizer begins, ends and cuts texts as in training."""
    return isinstance(model, OverEncoder) and model.reads_documents


def _suffix(run: Any, tokenizer_dir: Path) -> tuple[int, ...]:
    """The ids that ended each document."""
    ends = run.data.tokenize.append == "eos"
    return (open_tokenizer(tokenizer_dir).eos_id,) if ends else ()


def write_run_tokenizer(run: Any, path: Path, folder: Path) -> None:
    """Writes the tokenizer of a run, which adds the same tokens around a text as training did."""
    tokenizer_dir, prefix = run_tokenizer(run, path)
    model, _ = run.objective.exported(run.model, run.objective.spec(run.model))
    if not _reads_documents(model):
        write_tokenizer(tokenizer_dir, folder, prefix)
        return
    write_tokenizer(tokenizer_dir, folder, prefix, _suffix(run, tokenizer_dir))
    fit_tokenizer(folder, model)


def run_tokenizer(run: Any, path: Path) -> tuple[Path, tuple[int, ...]]:
    """The tokenizer kept in the run directory, else that of the prepared data, and the ids that
    began each document."""
    folder = _run_tokenizer(run, path)
    return folder, run_prefix(run, open_tokenizer(folder))


def run_prefix(run: Any, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The ids that begin each document of a run: of conversations, what their template writes."""
    chats = all(_chats(run))
    begins = begins_with_bos(tokenizer) if chats else run.data.tokenize.prepend == "bos"
    return (tokenizer.bos_id,) if begins and tokenizer.bos_id is not None else ()


def _run_tokenizer(run: Any, path: Path) -> Path:
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
