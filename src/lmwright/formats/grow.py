"""Growth: a larger model out of a smaller one of its family, by tiling.

    axis of 4 to 7        . a b c d . .  -->  d a b c d a b      put in the middle, wrapped around
    layers of 4 to 6      a b c d        -->  a b b c d d        layer round(i 4 / 6) for each i

So ModernBERT large began as base (https://arxiv.org/abs/2412.13663): tiles as Phi's, layers as
Gopher's (https://arxiv.org/abs/2112.11446). Heads stay whole, each query with its key and value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from lmwright import presets
from lmwright.config.errors import nearest
from lmwright.config.section import with_overrides
from lmwright.core.contract import HfModel
from lmwright.core.param import Param, count_params
from lmwright.errors import UserError
from lmwright.formats.encoding import stored_dtype
from lmwright.formats.hf_layout import Slot, slots
from lmwright.formats.hf_stream import from_hf
from lmwright.formats.hf_write import write_hf
from lmwright.formats.load import load_model
from lmwright.formats.proof import Proof
from lmwright.formats.safetensors import Tensors, described
from lmwright.models.over import OverEncoder
from lmwright.storage.mirror import sending

SIZES = ("embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim")
TILED = ("embed", "norm", "mlp", "heads", "kv_heads")
"""Axes that may grow."""

Key = tuple[str, int, tuple[int, ...]]
"""Own name of a weight, its layer, and its expert; -1 for a weight outside the layers."""

Shaped = set[tuple[str, tuple[int, ...]]]
"""Names and shapes of weights."""


def grow_command(
    path: str,
    out: str | Path,
    overrides: Sequence[str] = (),
    *,
    like: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Proof:
    """Writes a larger model made of the one at `path` to the folder `out`, and prints what was
    done. Raises UserError for sizes that are smaller, or that do not go together."""
    loaded = load_model(path)
    if isinstance(loaded.model, OverEncoder):
        raise UserError(f"{path}: is {loaded.model.called}; grow the model that it was made from")
    loaded.check()
    model = with_overrides(_sized_as(loaded.model, like), overrides, "the model")
    refuse_growth(loaded.model, model)
    tensors = TiledTensors(loaded.model, model, loaded.tensors)
    with sending(out, overwrite=overwrite) as local:
        proof = write_hf(
            model,
            tensors,
            lambda: from_hf(model, tensors, path),
            loaded.tokenizer_dir,
            local,
            dtype=dtype or stored_dtype(model, tensors),
            facts=loaded.facts,
            prefix=loaded.prefix,
            generation=loaded.generation,
            overwrite=overwrite,
        )
    before, after = (count_params(m.spec()) for m in (loaded.model, model))
    grown = [f"{n} {was} to {now}" for n, was, now in _changes(loaded.model, model)]
    grown += [text for text in overrides if text.partition("=")[0].split(".")[-1] not in SIZES]
    print(f"{out}: {before:,} parameters became {after:,}: {', '.join(grown)}")
    for line in proof.lines():
        print(f"  {line}")
    return proof


def _sized_as(model: Any, preset: str | None) -> Any:
    """The model with the sizes of a preset of its family."""
    if preset is None:
        return model
    known = presets.of_section("model")
    if preset not in known:
        cure = nearest(preset, list(known), what="the presets are")
        raise UserError(f"--like: there is no preset {preset!r}; {cure}")
    other = known[preset]()
    if other.kind != model.kind:
        raise UserError(
            f"--like: {preset} is of kind {other.kind!r} and the model of {model.kind!r}; name a "
            "preset of its own family, or sizes such as num_layers=28"
        )
    sizes = {name: getattr(other, name) for name in SIZES if hasattr(other, name)}
    return replace(model, **sizes)


def _changes(small: Any, large: Any) -> list[tuple[str, int, int]]:
    sizes = [(n, getattr(small, n), getattr(large, n)) for n in SIZES if hasattr(small, n)]
    return [each for each in sizes if each[1] != each[2]]


def refuse_growth(small: Any, large: Any) -> None:
    """Raises UserError where one model is no larger one of the other's shape."""
    if small.num_kv_heads is None:
        raise UserError(
            f"grow: a {small.kind!r} model has no keys and values to grow by; give a decoder with "
            "attention"
        )
    _refuse_other_sizes(small, large)
    changes = _changes(small, large)
    if not changes:
        raise UserError("grow: no size is larger; give sizes such as num_layers=28, or --like")
    for name, was, now in changes:
        if now < was:
            raise UserError(f"{name}: {now} is less than the {was} of the model; give more")
        if name == "head_dim":
            raise UserError(f"head_dim: {now} is not the {was} of the model; add heads instead")
    _refuse_gemma4(small, large)
    groups = [model.num_heads / model.num_kv_heads for model in (small, large)]
    if groups[0] != groups[1]:
        raise UserError(
            f"num_kv_heads: {large.num_heads} heads on {large.num_kv_heads} are other groups than "
            f"the model's {small.num_heads} on {small.num_kv_heads}; keep {groups[0]:g} to one"
        )


def _refuse_gemma4(small: Any, large: Any) -> None:
    """Raises UserError where a Gemma 4 would grow along what its axes do not name."""
    if getattr(small, "layer_input_dim", None) and large.num_layers != small.num_layers:
        raise UserError(
            f"num_layers: the model's table of layer inputs is for its {small.num_layers} layers; "
            "keep them"
        )
    if getattr(small, "global_kv_heads", None) and large.num_heads != small.num_heads:
        raise UserError(
            f"num_heads: global layers have {small.global_kv_heads} heads of keys and values "
            "(model.global_kv_heads), which do not grow; keep them"
        )


def _refuse_other_sizes(small: Any, large: Any) -> None:
    """Raises UserError where weights change by a field that does not grow, as
    `linear_num_value_heads`: their axes mean something else than those of attention."""
    like = {n: getattr(small, n) for n in (*SIZES, "vocab_size") if hasattr(small, n)}
    named = [{slot.name: slot.shape for slot in slots(m)} for m in (small, replace(large, **like))]
    if named[0] == named[1]:
        return
    for field in fields(small):
        name, (was, now) = field.name, (getattr(model, field.name) for model in (small, large))
        if was == now or name in like:
            continue
        if is_dataclass(was) and type(was) is type(now):  # a section, of which one field is another
            inner = next(
                f.name for f in fields(was) if getattr(was, f.name) != getattr(now, f.name)
            )
            name, was, now = f"{name}.{inner}", getattr(was, inner), getattr(now, inner)
        raise UserError(
            f"{name}: {now} is not the {was} of the model; what grows is "
            f"{', '.join(n for n in SIZES if hasattr(small, n) and n != 'head_dim')}"
        )


def wrapped(was: int, now: int) -> np.ndarray:
    """Entries of the smaller axis, [now], that those of the larger axis are copies of."""
    return (np.arange(now) - (now - was) // 2) % was


def source_layer(layer: int, was: int, now: int) -> int:
    """The layer of a stack of `was` from which one of `now` is made."""
    return min(round(layer * was / now), was - 1)


def _sources(small: HfModel, large: HfModel) -> dict[int, int]:
    """The layer of the smaller model that each one of the larger is made from: of its kind, if
    there are any, the nearest."""
    widths = {n: getattr(small, n) for n in SIZES if n != "num_layers" and hasattr(small, n)}
    has = _weights_by_layer(small, fresh=True)
    needs = _weights_by_layer(replace(cast(Any, large), **widths), fresh=False)
    sources = {}
    for layer, weights in needs.items():
        at = source_layer(layer, small.num_layers, large.num_layers)
        able = [n for n in has if weights <= has[n]]
        sources[layer] = min(able, key=lambda n: abs(n - at), default=at)
    return sources


def _weights_by_layer(model: HfModel, fresh: bool) -> dict[int, Shaped]:
    """Weights of each layer, with those that may begin `fresh` or without. Their shapes tell
    layers apart whose heads have other sizes, as local and global ones of Gemma 4."""
    weights: dict[int, Shaped] = {n: set() for n in range(model.num_layers)}
    for (leaf, layer, _), slot in _by_key(model):
        if layer >= 0 and (fresh or slot.param.fill is None):
            weights[layer].add((leaf, slot.shape))
    return weights


class TiledTensors(Tensors):
    """Tensors of the larger model by Hugging Face name, made of those of the smaller one when they
    are asked for. Raises UserError for weights that differ in what cannot grow."""

    def __init__(self, small: HfModel, large: HfModel, tensors: Mapping[str, np.ndarray]):
        theirs = {key: slot for key, slot in _by_key(small)}
        self._tensors, self._models = tensors, (small, large)
        self._slots: dict[str, tuple[Slot, Slot | None]] = {}
        sources = {-1: -1} | _sources(small, large)
        for (leaf, layer, inside), slot in _by_key(large):
            self._slots[slot.name] = slot, theirs.get((leaf, sources[layer], inside))
            self._refuse(*self._slots[slot.name])
        super().__init__(self._slots)

    def _refuse(self, new: Slot, old: Slot | None) -> None:
        if old is None and new.param.fill is None:
            raise UserError(f"{new.name}: the model has no such layer; keep its kinds of layers")
        for axis, was, now in _axes(old.param, new.param) if old else ():
            if was != now and axis not in TILED:
                cure = "lmwright vocab changes vocabularies" if axis == "vocab" else "keep it"
                raise UserError(f"{new.name}: {axis} is {was} and would be {now}; {cure}")

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape)."""
        new, old = self._slots[name]
        return described(self._tensors, old.name if old else next(iter(self._tensors)))[
            0
        ], new.shape

    def __getitem__(self, name: str) -> np.ndarray:
        new, old = self._slots[name]
        plain = replace(new, at=())  # of one layer
        if old is None:  # a norm that the first layer does not have
            dtype = np.asarray(self._tensors[next(iter(self._tensors))]).dtype
            return np.full(new.shape, new.param.fill).astype(dtype)
        array = old.from_layout(np.asarray(self._tensors[old.name]))
        for place, (axis, was, now) in enumerate(_axes(old.param, new.param)):
            if was != now:
                array = np.take(array, self._copies(axis, was, now), axis=place)
        return plain.to_layout(array)

    def _copies(self, axis: str, was: int, now: int) -> np.ndarray:
        small, large = self._models
        keys = wrapped(small.num_kv_heads, large.num_kv_heads)
        group = small.num_heads // small.num_kv_heads
        queries = (keys[:, None] * group + np.arange(group)).ravel()
        if axis == "heads" and was == small.num_heads:
            return queries
        if axis == "heads" and was == small.num_heads + 2 * small.num_kv_heads:  # q, k and v in one
            first = small.num_heads
            return np.concatenate([queries, first + keys, first + small.num_kv_heads + keys])
        return wrapped(was, now)


def _by_key(model: HfModel) -> list[tuple[Key, Slot]]:
    numbers = {path: layers for span in model.spans for path, _, layers in span.places()}
    keyed = []
    for slot in slots(model):
        stack, _, leaf = slot.path.rpartition(".")
        inside = stack in numbers
        layer = numbers[stack][slot.at[0]] if inside else -1
        keyed.append(((leaf if inside else slot.path, layer, slot.at[1:]), slot))
    return keyed


def _axes(small: Param, large: Param) -> list[tuple[str, int, int]]:
    """Axes of the weight of one layer, with both sizes."""
    first = len(small.batch)
    return list(zip(small.axes, small.shape, large.shape, strict=True))[first:]
