"""Heads of adapters: what an adapter trains whole, in PEFT's folder (`modules_to_save`), and the
classifier or answerer that an encoder becomes with it.

    our tree: classifier.out [D, K]     base_model.model.classifier.weight [K, D]

PEFT's config does not say the classes, nor how windows are cut: they are in lmwright.json beside
it, or those of a base that is a classifier or an answerer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lmwright.core.contract import HfModel
from lmwright.core.param import Tree, nest, walk
from lmwright.core.stack import LAYERS
from lmwright.errors import UserError
from lmwright.formats.adapter_note import ANSWERS, read_note
from lmwright.formats.hf_layout import Slot, slots
from lmwright.formats.peft_folder import CONFIG, PeftFolder
from lmwright.formats.safetensors import some
from lmwright.models.answerer import Answerer
from lmwright.models.classifier import Classifier
from lmwright.models.heads import HEAD, left_out

HEADED = (Classifier, Answerer)
"""Models whose head an adapter trains whole."""


def head_note(model: HfModel) -> dict[str, Any]:
    """Facts on the head of a model that PEFT has no place for; none of another model."""
    if isinstance(model, Classifier):
        return {"labels": model.labels, "pooling": model.pooling}
    if isinstance(model, Answerer):
        return {"answers": {name: getattr(model, name) for name in ANSWERS}}
    return {}


def saved_weights(model: HfModel, whole: Tree, leaves: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Weights at the paths of `whole`, by Hugging Face name and in its layout."""
    return {slot.name: slot.to_layout(leaves[slot.path]) for slot in _slots_of(model, whole)}


def config_of_saved(model: HfModel, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of adapter_config.json of an adapter of the model with these weights."""
    modules = sorted({name.rpartition(".")[0] for name in saved})
    task = "QUESTION_ANS" if isinstance(model, Answerer) else "SEQ_CLS"
    return {"task_type": task, "modules_to_save": modules} if saved else {}


def read_saved(
    adapter: PeftFolder, model: HfModel, whole: Tree, where: str
) -> dict[str, np.ndarray]:
    """Weights by path of `whole` from a folder. Raises UserError where they are not exactly these,
    or of another shape."""
    wanted = {slot.name: slot for slot in _slots_of(model, whole)}
    if extra := sorted(adapter.saved.keys() - wanted.keys()):
        raise UserError(f"{where}: {_not_supported(adapter, extra)}")
    if missing := sorted(wanted.keys() - adapter.saved.keys()):
        raise UserError(
            f"{where}: has no {some(missing)}; save it with modules_to_save = "
            f"{sorted({name.rpartition('.')[0] for name in wanted})}"
        )
    return {slot.path: _read(adapter, slot, where) for slot in wanted.values()}


def refuse_saved(adapter: PeftFolder, where: str) -> None:
    """Raises UserError for an adapter with weights that it trained whole."""
    if adapter.saved:
        raise UserError(f"{where}: {_not_supported(adapter, sorted(adapter.saved))}")


def headed(
    model: HfModel, w: Tree, adapter: PeftFolder, folder: str | Path
) -> tuple[HfModel, Tree, Tree]:
    """(model, weights, those of them that are the base's) of a base with the head that an adapter
    brings; `w` are float32 host weights. Raises UserError where there is none for it."""
    if not adapter.saved:
        return model, w, w
    note = read_note(Path(folder))
    encoder = model.encoder if isinstance(model, HEADED) else model
    if getattr(encoder, "document_head", None) is None:
        refuse_saved(adapter, str(folder))
    if "labels" in note:
        model = Classifier(encoder, tuple(note["labels"]), note["pooling"])
    elif "answers" in note:
        model = Answerer(encoder, **note["answers"])
    elif not isinstance(model, HEADED):
        raise UserError(
            f"{folder}: has a head for classes that neither it nor the base names; merge it into a "
            "ForSequenceClassification folder with id2label"
        )
    old, others = dict(walk(w)), {HEAD, *left_out(encoder)}
    base = {name: tree for name, tree in w.items() if name not in others}
    known = {slot.name: slot for slot in slots(model) if LAYERS not in slot.path}
    if strange := sorted(adapter.saved.keys() - known.keys()):
        raise UserError(f"{folder}: {_not_supported(adapter, strange)}")
    made = dict(walk(base))
    for slot in known.values():
        if slot.name in adapter.saved:
            made[slot.path] = _read(adapter, slot, str(folder))
        elif slot.path not in made:
            if slot.path not in old:
                raise UserError(f"{folder}: has no {slot.name}, and the base has none, too")
            made[slot.path] = old[slot.path]
    return model, nest(made.items()), base


def _slots_of(model: HfModel, whole: Tree) -> list[Slot]:
    if not whole:
        return []
    paths = {path for path, _ in walk(whole)}
    return [slot for slot in slots(model) if slot.path in paths]


def _read(adapter: PeftFolder, slot: Slot, where: str) -> np.ndarray:
    array = adapter.saved[slot.name]
    if array.shape != slot.shape:
        raise UserError(
            f"{where}: {slot.name} is {list(array.shape)} there and {list(slot.shape)} in the "
            "model, which has other classes, or is another base"
        )
    return np.ascontiguousarray(slot.from_layout(array), np.float32)


def _not_supported(adapter: PeftFolder, names: list[str]) -> str:
    listed = adapter.config.get("modules_to_save")
    return (
        f"{CONFIG} has modules_to_save = {listed}, and {some(names)} cannot be trained whole here; "
        "only the head of a classifier or of an answerer can"
    )
