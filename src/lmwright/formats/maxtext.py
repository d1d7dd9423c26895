"""MaxText's checkpoints, read: tensors by their Hugging Face names.

    99999/items/ _METADATA, arrays --MaxTextTensors(model)--> model.layers.0.self_attn.q_proj.weight

A checkpoint holds arrays and no configuration, so that the model has to be named. Layers are
stacked (`scan_layers`) or apart; a whole state's optimizer is left alone. Arrays are read by
tensorstore when they are asked for, of stacked ones the layer alone, from a folder or gs://.
What MaxText computes with them (src/maxtext/layers, version 0.2.5): without a norm or a factor on
queries, the root of the head's size is part of their projection; a llama with scaled rotations
turns neighboring pairs; a gemma's table is multiplied by the root of the width already.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lmwright.errors import UserError, first_line
from lmwright.formats.hf_layout import slots
from lmwright.formats.safetensors import Tensors, some
from lmwright.formats.text_tensors import NotTaken
from lmwright.storage.bucket import is_bucket

METADATA = "_METADATA"
ITEMS = "items"
GEMMA3_CYCLE = 6  # layers that one step of its scan takes

Key = tuple[str, ...]
TiedLogits = Literal["divided", "plain"]

PRODUCTS = {
    "self_attn.q_proj": ("self_attention", "query"),
    "self_attn.k_proj": ("self_attention", "key"),
    "self_attn.v_proj": ("self_attention", "value"),
    "self_attn.o_proj": ("self_attention", "out"),
    "mlp.gate_proj": ("mlp", "wi_0"),
    "mlp.up_proj": ("mlp", "wi_1"),
    "mlp.down_proj": ("mlp", "wo"),
}
QUERY_NORMS = {
    "self_attn.q_norm": ("self_attention", "query_norm"),
    "self_attn.k_norm": ("self_attention", "key_norm"),
}
LLAMA_NORMS = QUERY_NORMS | {
    "input_layernorm": ("pre_self_attention_layer_norm",),
    "post_attention_layernorm": ("post_self_attention_layer_norm",),
}
GEMMA_NORMS = QUERY_NORMS | {
    "input_layernorm": ("pre_self_attention_norm",),
    "post_attention_layernorm": ("post_self_attention_norm",),
    "pre_feedforward_layernorm": ("pre_ffw_norm",),
    "post_feedforward_layernorm": ("post_ffw_norm",),
}
TOP = {
    "model.embed_tokens.weight": ("token_embedder", "embedding"),
    "model.norm.weight": ("decoder", "decoder_norm", "scale"),
    "lm_head.weight": ("decoder", "logits_dense", "kernel"),
}


@dataclass(frozen=True)
class Address:
    """Where a tensor lies: its array, and its layer in a stacked one."""

    key: Key
    axis: int | None = None
    """Of the layers; None where the array is the tensor."""
    layer: int = 0
    layers: int = 0
    """Stacked in the array."""


@dataclass(frozen=True)
class Layout:
    """Names and axes of one kind of models in MaxText."""

    norms: Mapping[str, Key]
    addresses: Callable[[Any, int, Key], Iterator[Address]]
    """Places in which it keeps a tensor of a model's layer: stacked first, then apart."""
    changed: Callable[[Any, str, np.ndarray, bool], np.ndarray]
    """float32 numbers of the part of a model with its factors and order taken out; the flag says
    that nothing is added to queries."""
    divides_tied_logits: bool
    """Whether it may; else the table's own factor and that of the last norm are each other's
    inverse."""


def _llama_addresses(model: Any, layer: int, inner: Key) -> Iterator[Address]:
    yield Address(("decoder", "layers", *inner), 1, layer, model.num_layers)
    yield Address(("decoder", f"layers_{layer}", *inner))


def _gemma_addresses(model: Any, layer: int, inner: Key) -> Iterator[Address]:
    count = model.num_layers
    if model.qk_norm == "head":  # gemma 3
        scanned = count - count % GEMMA3_CYCLE
        turn, index = divmod(layer, GEMMA3_CYCLE)
        if layer < scanned:
            key = ("decoder", "layers", f"layers_{index}", *inner)
            yield Address(key, 1, turn, scanned // GEMMA3_CYCLE)
        else:
            last = f"layers_{layer - scanned}"
            yield Address(("decoder", "layers_remainder", last, *inner))
        yield Address(("decoder", f"layers_{layer}", *inner))
    else:  # gemma 2: a local and a global layer are one
        half = "local" if layer % 2 == 0 else "global"
        paired = (f"{inner[0]}_{half}", *inner[1:])
        yield Address(("decoder", "layers", *paired), 1, layer // 2, count // 2)
        yield Address(("decoder", f"layers_{layer // 2}", *paired))


def _llama_changed(model: Any, part: str, array: np.ndarray, plain: bool) -> np.ndarray:
    if part in ("q_proj", "k_proj") and getattr(model.rope_scaling, "kind", None) == "llama3":
        array = np.concatenate([array[..., ::2], array[..., 1::2]], axis=-1)
    if part == "q_proj" and plain and model.qk_norm == "none":
        array = array * np.float32(math.sqrt(model.head_dim))
    return array


def _gemma_changed(model: Any, part: str, array: np.ndarray, plain: bool) -> np.ndarray:
    if part == "embed_tokens":
        return array / np.float32(math.sqrt(model.embed_dim))
    if part == "q_proj" and model.qk_norm == "none":
        return array * np.float32(math.sqrt(model.query_dim or model.head_dim))
    return array - np.float32(1) if array.ndim == 1 else array


LAYOUTS = {
    "llama": Layout(LLAMA_NORMS, _llama_addresses, _llama_changed, True),
    "gemma": Layout(GEMMA_NORMS, _gemma_addresses, _gemma_changed, False),
}
"""By kind: llama, mistral, qwen 2 and 3; gemma 2 and 3."""


def items_of(path: str | Path) -> Any | None:
    """The folder of a MaxText checkpoint's arrays, at a path or in its `items`; None if there is
    none."""
    from etils import epath

    for folder in (epath.Path(path), epath.Path(path) / ITEMS):
        try:
            if (folder / METADATA).exists():
                return folder
        except OSError:
            return None
    return None


class MaxTextTensors(Tensors):
    """The tensors of a model in a MaxText checkpoint, by Hugging Face name.

    `tied_logits` says whether a tied llama divided its logits by the root of the width
    (`normalize_embedding_logits`). Raises UserError for a model of another kind, arrays that are
    missing, left over or of other shapes.
    """

    def __init__(self, path: str | Path, model: Any, tied_logits: TiedLogits | None = None):
        if model.kind not in LAYOUTS:
            raise UserError(
                f"{path}: of MaxText's checkpoints, those of {' and '.join(LAYOUTS)} are read "
                f"(llama: mistral and qwen, too), not model.kind = {model.kind!r}"
            )
        if (folder := items_of(path)) is None:
            raise UserError(
                f"{path}: holds no checkpoint of MaxText (no {METADATA}); give the folder of one "
                "step, such as checkpoints/0"
            )
        self.path, self._model, self._layout = str(path), model, LAYOUTS[model.kind]
        self._arrays = Arrays(folder, str(path))
        self._shapes = {slot.name: slot.shape for slot in slots(model)}
        self._norm_factor = self._logits_factor(tied_logits)
        self._addresses = {name: self._address(name) for name in self._shapes}
        super().__init__(self._shapes)
        self.not_taken = self._check()

    def _logits_factor(self, tied_logits: TiedLogits | None) -> float:
        """Factor of the last norm that does what MaxText does to tied logits."""
        width = self._model.embed_dim
        tied = self._model.head != "untied" and TOP["lm_head.weight"] not in self._arrays
        if not (tied and self._layout.divides_tied_logits):
            return 1.0
        if tied_logits is None and not (self._model.qk_norm == "head" or self._has_bias()):
            raise UserError(
                f"{self.path}: the head is tied, and a checkpoint does not say whether logits were "
                f"divided by the root of the width (normalize_embedding_logits, MaxText's "
                f"default); give --tied-logits divided, or plain, to import"
            )
        return 1 / math.sqrt(width) if tied_logits == "divided" else 1.0

    def _has_bias(self) -> bool:
        return "model.layers.0.self_attn.q_proj.bias" in self._shapes

    def _check(self) -> tuple[NotTaken, ...]:
        used = {address.key for address in self._addresses.values()}
        left = [key for key in self._arrays if key not in used]
        seen = [key for key in left if key[0] == "vision_encoder"]
        if other := [".".join(key) for key in left if key[0] != "vision_encoder"]:
            raise UserError(
                f"{self.path}: holds {some(other)}, which the model does not have; name the model "
                f"that was trained"
            )
        taken = []
        if seen:
            size = sum(math.prod(self._arrays[key]) for key in seen)
            taken.append(NotTaken("image encoder", len(seen), size))
        rows, kept = self._arrays[TOP["model.embed_tokens.weight"]][0], self._model.vocab_size
        if rows > kept:
            size = (rows - kept) * self._model.embed_dim
            taken.append(NotTaken("rows of the vocabulary beyond the model's", 1, size))
        return tuple(taken)

    def _address(self, name: str) -> Address:
        """Where a tensor lies. Raises UserError where it does not, or has another shape."""
        if name in TOP:
            return self._checked(name, Address(TOP[name]))
        _, _, number, rest = name.split(".", 3)
        part, _, leaf = rest.rpartition(".")
        if part in PRODUCTS:
            inner = (*PRODUCTS[part], "kernel" if leaf == "weight" else "bias")
        else:
            inner = (*self._layout.norms[part], "scale")
        candidates = list(self._layout.addresses(self._model, int(number), inner))
        for address in candidates:
            if address.key in self._arrays:
                return self._checked(name, address)
        keys = " nor ".join(".".join(address.key) for address in candidates)
        raise UserError(
            f"{self.path}: {name} is missing (neither {keys}); name the model that was trained"
        )

    def _checked(self, name: str, address: Address) -> Address:
        if address.key not in self._arrays:
            raise UserError(
                f"{self.path}: {'.'.join(address.key)} is missing; name the model that was trained"
            )
        have, want = list(self._arrays[address.key]), self._theirs(name)
        if address.axis is not None:
            for axis in (1, 0):  # param_scan_axis is 1 unless set otherwise
                if have == [*want[:axis], address.layers, *want[axis:]]:
                    return replace(address, axis=axis)
            want.insert(1, address.layers)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):  # padded vocabularies
            rows = want.index(self._model.vocab_size)
            if have[rows] >= want[rows]:
                have[rows] = want[rows]
        if have != want:
            raise UserError(
                f"{self.path}: {'.'.join(address.key)} is {list(self._arrays[address.key])}, and "
                f"the model wants {want}; name the model that was trained"
            )
        return address

    def _theirs(self, name: str) -> list[int]:
        """Shape of one tensor in MaxText's layout."""
        shape, model = list(self._shapes[name]), self._model
        heads = {"q_proj": model.num_heads, "k_proj": model.num_kv_heads,
                 "v_proj": model.num_kv_heads, "o_proj": model.num_heads}  # fmt: skip
        part = name.split(".")[-2]
        if name == "model.embed_tokens.weight" or (len(shape) == 1 and part not in heads):
            return shape
        if part in heads:
            split = [heads[part], model.head_dim]
            if len(shape) == 1:
                return split
            return [*split, shape[0]] if part == "o_proj" else [shape[1], *split]
        return shape[::-1]

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a tensor, which is not read."""
        return self._arrays.dtype(self._addresses[name].key), self._shapes[name]

    def __getitem__(self, name: str) -> np.ndarray:
        address = self._addresses[name]
        array = self._arrays.read(address)
        part = name.split(".")[-2]
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = self._theirs(name).index(self._model.vocab_size)
            array = np.take(array, range(self._model.vocab_size), axis=rows)
        plain = not self._has_bias()
        made = self._layout.changed(self._model, part, array.astype(np.float32), plain)
        if name == "model.norm.weight":
            made = made * np.float32(self._norm_factor)
        shape = self._shapes[name]
        if len(shape) == 2 and name != "model.embed_tokens.weight":
            # products: [in..., out...] there, [out, in] here
            made = made.reshape(shape[::-1]).T
        return np.ascontiguousarray(made.reshape(shape)).astype(array.dtype)


class Arrays(Mapping[Key, tuple[int, ...]]):
    """Shapes of the parameters of a checkpoint by key, and the arrays, read by tensorstore.

    Raises UserError where its metadata is damaged or is not that of a model of MaxText.
    """

    def __init__(self, folder: Any, path: str):
        self._folder, self._path = folder, path
        try:
            about = json.loads((folder / METADATA).read_text())
            shapes = {
                tuple(str(each["key"]) for each in entry["key_metadata"]): tuple(map(int, shape))
                for entry in about["tree_metadata"].values()
                if (shape := entry["value_metadata"].get("write_shape")) is not None
            }
            self._driver = "zarr3" if about.get("use_zarr3") else "zarr"
            self._ocdbt = (folder / "manifest.ocdbt").exists()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: its {METADATA} is damaged ({first_line(error)})") from None
        depth = 2 if any(key[:2] == ("params", "params") for key in shapes) else 1
        self._prefix = ("params",) * depth
        self._shapes = {key[depth:]: s for key, s in shapes.items() if key[:1] == ("params",)}
        if TOP["model.embed_tokens.weight"] not in self._shapes:
            held = some(sorted({".".join(key[:2]) for key in shapes})) or "nothing"
            raise UserError(
                f"{path}: is not a checkpoint of a MaxText language model: it holds {held}, and no "
                "params.params.token_embedder.embedding"
            )

    def __getitem__(self, key: Key) -> tuple[int, ...]:
        return self._shapes[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def dtype(self, key: Key) -> str:
        """Name of an array's dtype."""
        return self._open(key).dtype.name

    def read(self, address: Address) -> np.ndarray:
        """The array at an address, of a stacked one its layer alone."""
        array = self._open(address.key)
        if address.axis is not None:
            array = array[(slice(None),) * address.axis + (address.layer,)]
        try:
            return np.asarray(array.read().result())
        except (ValueError, OSError) as error:
            raise self._unreadable(address.key, error) from None

    def _open(self, key: Key) -> Any:
        import tensorstore

        name = ".".join((*self._prefix, *key))
        root = str(self._folder).rstrip("/")
        base = f"{root}/" if is_bucket(root) else f"file://{Path(root).absolute()}/"
        store: Any = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        if not self._ocdbt:
            store = f"{base}{name}/"
        try:
            return tensorstore.open({"driver": self._driver, "kvstore": store}, open=True).result()
        except (ValueError, OSError) as error:
            raise self._unreadable(key, error) from None

    def _unreadable(self, key: Key, error: Exception) -> UserError:
        return UserError(
            f"{self._path}: {'.'.join(key)} cannot be read ({first_line(error):.200}); copy the "
            f"checkpoint again"
        )
