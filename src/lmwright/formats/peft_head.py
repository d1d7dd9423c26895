"""Heads of adapters: what an adapter trains whole, in PEFT's folder (`modules_to_save`), and the
classifier, tagger, answerer or embedder that an encoder becomes with it.

    our tree: classifier.out [D, K]     base_model.model.classifier.weight [K, D]

PEFT's config does not say the classes, nor how windows are cut and vectors made: they are in
lmwright.json beside it, or those of a base that is one.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lmwright.core.contract import HfModel
from lmwright.core.param import Tree, nest, walk
from lmwright.core.stack import LAYERS
from lmwright.errors import UserError
from lmwright.formats.adapter_note import read_note
from lmwright.formats.hf_layout import Slot, slots
from lmwright.formats.peft_folder import CONFIG, PeftFolder
from lmwright.formats.safetensors import some
from lmwright.models.answerer import Answerer, has_answers
from lmwright.models.classifier import Classifier
from lmwright.models.embedder import Embedder, embedder_of, vector_kinds
from lmwright.models.heads import HEAD, left_out
from lmwright.models.over import OverEncoder, encoder_of
from lmwright.models.tagger import Tagger

CLASSIFIER = "classifier"
TASK_TYPES: Mapping[type, str] = {
    Classifier: "SEQ_CLS", Tagger: "TOKEN_CLS", Answerer: "QUESTION_ANS",
    Embedder: "FEATURE_EXTRACTION",
}  # fmt: skip


def saved_weights(model: HfModel, whole: Tree, leaves: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Weights at the paths of `whole`, by Hugging Face name and in its layout."""
    return {slot.name: slot.to_layout(leaves[slot.path]) for slot in _slots_of(model, whole)}


def config_of_saved(saved: Collection[str]) -> dict[str, Any]:
    """Keys of adapter_config.json of an adapter with the weights of these names."""
    return {"modules_to_save": _modules(saved)} if saved else {}


def _modules(names: Iterable[str]) -> list[str]:
    """The modules that PEFT has to save for these weights. It saves `classifier` whole in any case,
    and does not open a folder that names a module within it."""
    above = {name.rpartition(".")[0] for name in names}
    return sorted({CLASSIFIER if name.startswith(f"{CLASSIFIER}.") else name for name in above})


def task_type(model: HfModel) -> str | None:
    """PEFT's word for what an adapter's model does; it has none for models that fill in masks."""
    return TASK_TYPES.get(type(model), None if model.both_ways else "CAUSAL_LM")


def noted(model: HfModel) -> dict[str, Any]:
    """Facts of a model over an encoder that PEFT's config does not say."""
    return model.note() if isinstance(model, OverEncoder) else {}


def saves_head(model: Any) -> bool:
    """True for a model whose head adapters train whole."""
    return isinstance(model, OverEncoder) and model.saves_head


def form_of(note: Mapping[str, Any], config: Mapping[str, Any]) -> type | None:
    """Kind of model over an encoder that an adapter is for, by its note or else by PEFT's config;
    None for a language model."""
    if "labels" in note:
        return Classifier if "pooling" in note else Tagger
    if "answers" in note:
        return Answerer
    if "length" in note:
        return Embedder
    return {name: form for form, name in TASK_TYPES.items()}.get(config.get("task_type"))


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
            f"{where}: has no {some(missing)}; save it with modules_to_save = {_modules(wanted)}"
        )
    return {slot.path: _read(adapter, slot, where) for slot in wanted.values()}


def refuse_saved(adapter: PeftFolder, where: str) -> None:
    """Raises UserError for an adapter with weights that it trained whole."""
    if adapter.saved:
        raise UserError(f"{where}: {_not_supported(adapter, sorted(adapter.saved))}")


def headed(
    model: HfModel, w: Tree, adapter: PeftFolder, folder: str | Path
) -> tuple[HfModel, Tree, Tree]:
    """(model, all weights, the weights that come from the base) of a base fitted to an adapter:
    with the adapter's head added, or its own head removed, as the adapter needs. `w` are float32
    host weights. Raises UserError where the adapter needs a head that the base cannot have."""
    note = read_note(Path(folder))
    form = form_of(note, adapter.config)
    if form is None and not isinstance(model, OverEncoder):
        # a language model, in which all that was trained whole has a place
        return model, w, _without_saved(w, model, adapter)
    encoder = encoder_of(model)
    if form is Embedder and encoder.kind in vector_kinds():
        model = _embedder(model, note)
        own = {name: w[name] for name in model.spec()}
        return model, own, _without_saved(own, model, adapter)
    if not adapter.saved:
        return model, w, w
    known_head = has_answers(encoder) if form is Answerer else hasattr(encoder, "document_head")
    if not known_head or form is Embedder:
        refuse_saved(adapter, str(folder))
    model = _with_head(model, encoder, form, note, folder)
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
                raise UserError(f"{folder}: has no {slot.name}, and neither has the base")
            made[slot.path] = old[slot.path]
    return model, nest(made.items()), _without_saved(base, model, adapter)


def _without_saved(w: Tree, model: HfModel, adapter: PeftFolder) -> Tree:
    """The weights outside of the layers that the adapter does not train whole."""
    theirs = {slot.path for slot in slots(model) if slot.name in adapter.saved}
    return {name: tree for name, tree in w.items() if name not in theirs}


def _with_head(
    model: Any, encoder: Any, form: type | None, note: Mapping[str, Any], folder: str | Path
) -> OverEncoder:
    """The classifier or tagger with the classes of the note, else of a base that is one; or the
    answerer with its settings, else the usual ones."""
    form = form or type(model)
    if "answers" in note:
        return Answerer(encoder, **note["answers"])
    if "labels" in note:
        labels = tuple(note["labels"])
        if form is Tagger:
            return Tagger(encoder, labels)
        return Classifier(encoder, labels, note["pooling"], note.get("per_text", "one"))
    if saves_head(model) and isinstance(model, form):
        return model
    if form is Answerer:
        return Answerer(**Answerer.hf.fields({}, encoder, str(folder)))
    what = "Token" if form is Tagger else "Sequence"
    raise UserError(
        f"{folder}: has a head for classes that neither it nor the base names; merge it into a "
        f"For{what}Classification folder with id2label"
    )


def _embedder(model: Any, note: Mapping[str, Any]) -> Embedder:
    """The embedder that the note describes, else that the base describes, else one of plain
    means."""
    if "length" in note:
        made = embedder_of(model, note["pooling"], note["length"])
        return replace(made, prompts=tuple(note.get("prompts", {}).items()))
    return embedder_of(model)


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
        f"{CONFIG} has modules_to_save = {listed}, and {some(names)} is not trained whole here; "
        "name it in lora.whole if it is not in the layers, or put it into its base with `lmwright "
        "adapters merge`"
    )
