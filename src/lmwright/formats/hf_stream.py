"""Tensors by Hugging Face name into our weights, one at a time.

    file --read--> [out, in] --transpose--> [in, out] --into its place--> leaf [L, in, out]
          one tensor               one tensor                 on the devices, sharded, in place

The host holds its share of the weights and twice the largest tensor, never the model twice.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from lmwright.core.contract import HfModel
from lmwright.core.param import Tree, nest, walk
from lmwright.errors import UserError
from lmwright.formats.hf_layout import Slot, slots
from lmwright.formats.safetensors import described, some
from lmwright.formats.ternary import codes_of, floats_of

IGNORED_ENDINGS = (
    "rotary_emb.inv_freq", "self_attn.masked_bias", "attn.bias_mask", ".attention.masked_bias",
    # triangles of masks in a GPT-NeoX and a GPT-2
    ".attention.bias", ".attn.bias", ".attn.masked_bias",
)  # fmt: skip
TIED_HEAD = "lm_head.weight"
COPIES = {
    **dict.fromkeys((
        TIED_HEAD, "decoder.weight", "cls.predictions.decoder.weight", "lm_head.decoder.weight",
        "embed_out.weight",
    )),
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.decoder.bias": "lm_head.bias",
}  # fmt: skip
"""Copies that some writers store, and what they are of; None for the embedding table."""
SMALL = 2**24
"""Bytes of a leaf that is stacked on the host, without programs of its shape."""
FLOATS = ("float16", "bfloat16", "float32", "float64")


def from_hf(
    model: HfModel,
    tensors: Mapping[str, Any],
    where: str = "weights",
    *,
    dtype: Any = None,
    shardings: Tree | None = None,
) -> Tree:
    """Our weights, jax arrays, from tensors by Hugging Face name.

    `dtype` is that of all leaves; None keeps what is stored (float64 becomes float32).
    `shardings` is a tree of NamedShardings (`weight_shardings(model.spec(), mesh)`); None puts
    everything on the first device. A leaf is filled in place, tensor by tensor.
    Raises UserError, naming the tensors and before any is read, where one is missing, unknown,
    of another shape or not a float.
    """
    wanted = slots(model)
    check_tensors(wanted, tensors, where)
    placed = dict(walk(shardings)) if shardings is not None else {}
    leaves: dict[str, Array] = {}
    by_leaf: dict[str, list[Slot]] = {}
    for slot in wanted:
        by_leaf.setdefault(slot.path, []).append(slot)
    for path, parts in by_leaf.items():
        kind = jnp.dtype(dtype or stored_kind(parts, tensors))
        if parts[0].param.balance_rate is not None:  # which is never narrowed
            kind = jnp.promote_types(kind, stored_kind(parts, tensors))
        leaves[path] = _filled(parts, tensors, kind, placed.get(path))
    return nest(leaves.items())


def check_tensors(wanted: list[Slot], tensors: Mapping[str, Any], where: str) -> None:
    """Raises UserError unless `tensors` holds exactly the wanted tensors, of their shapes and of
    floats; known buffers and a stored copy of a tied head may be there too."""
    _check_names(wanted, tensors, where)
    for slot in wanted:
        dtype, shape = described(tensors, slot.name)
        if dtype not in FLOATS:
            raise UserError(
                f"{where}: {slot.name} is {dtype}; quantized weights are not supported in this "
                f"format, so start from the unquantized model or a GGUF file"
            )
        if shape != slot.shape:
            raise UserError(
                f"{where}: {slot.name} has shape {list(shape)}, the model's configuration implies "
                f"{list(slot.shape)}; they do not belong to the same model"
            )


def unused(wanted: list[Slot], tensors: Mapping[str, Any]) -> list[str]:
    """Names in `tensors` that no weight comes from."""
    return sorted(set(tensors) - {slot.name for slot in wanted})


def _check_names(wanted: list[Slot], tensors: Mapping[str, Any], where: str) -> None:
    missing = sorted({slot.name for slot in wanted} - set(tensors))
    extra = [n for n in unused(wanted, tensors) if not n.endswith(IGNORED_ENDINGS)]
    if missing and (others := [name for name in extra if name not in COPIES]):
        raise UserError(
            f"{where}: lacks {some(missing, 3)}, and holds {some(others, 3)} instead, which is a "
            "different form of the weights: quantized, or not as transformers' "
            "save_pretrained(folder) writes them; get the unquantized model in that form"
        )
    if missing:
        raise UserError(f"{where}: lacks {some(missing)}; the model is not complete")
    for copy in sorted(set(COPIES) & set(extra)):
        of = COPIES[copy] or next(s.name for s in wanted if s.param.inputs == ("vocab",))
        if of not in tensors or not np.array_equal(
            np.asarray(tensors[copy]), np.asarray(tensors[of])
        ):
            raise UserError(
                f"{where}: {copy} differs from {of} although config.json ties them; set "
                "tie_word_embeddings to false if the head has weights of its own"
            )
        extra.remove(copy)
    if extra:
        raise UserError(
            f"{where}: holds {some(extra)}, which this architecture does not have; without them "
            "the imported model would be another one"
        )


def stored_kind(parts: list[Slot], tensors: Mapping[str, Any]) -> Any:
    """The dtype that holds all tensors of a weight as they are stored; float64 becomes float32."""
    kinds = {described(tensors, slot.name)[0] for slot in parts}
    kinds = {"float32" if kind == "float64" else kind for kind in kinds}
    return jnp.result_type(*(jnp.dtype(kind) for kind in kinds))


def _filled(
    parts: list[Slot], tensors: Mapping[str, Any], dtype: Any, sharding: NamedSharding | None
) -> Array:
    """A leaf from its tensors; of a large one each is let go before the next is read."""
    shape, depth = parts[0].param.shape, len(parts[0].at)
    if depth == 0:
        return on_devices(part_of(parts[0], tensors, dtype), sharding)
    if parts[0].param.size * dtype.itemsize <= SMALL:
        stack = np.zeros(shape, dtype)
        for slot in parts:
            stack[slot.at] = part_of(slot, tensors, dtype)
        return on_devices(stack, sharding)
    entries = () if sharding is None else tuple(sharding.spec)
    entries += (None,) * (len(shape) - len(entries))
    part_sharding = sharding and NamedSharding(sharding.mesh, PartitionSpec(*entries[depth:]))
    put = _put(depth, any(entries[:depth]), sharding)
    leaf = jnp.zeros(shape, dtype, device=sharding)
    for slot in parts:
        part = on_devices(part_of(slot, tensors, dtype), part_sharding)
        leaf = put(leaf, part, np.asarray(slot.at, np.int32))
        leaf.block_until_ready()  # else the host runs ahead, and holds several
        del part
    return leaf


def part_of(slot: Slot, tensors: Mapping[str, Any], dtype: Any = None) -> np.ndarray:
    """The part of a weight that a tensor holds, in our layout; without a `dtype` as it is
    stored."""
    array = np.asarray(tensors[slot.name])
    dtype = jnp.dtype(dtype or stored_kind([slot], tensors))
    if slot.param.ternary and dtype not in (array.dtype, np.float32):
        # rounded floats would have other codes near a threshold
        array = floats_of(*codes_of(array.astype(np.float32)))
    if array.dtype.itemsize > dtype.itemsize:  # the smaller of both is what gets transposed
        array = array.astype(dtype)
    return slot.from_layout(array).astype(dtype, copy=False)


def on_devices(array: np.ndarray, sharding: NamedSharding | None) -> Array:
    """The array sharded over devices, each of which gets its part; on the first without a
    sharding."""
    # a copy on CPUs, whose arrays would be views of memory, or of a file, that others change
    own = np.array if jax.default_backend() == "cpu" else np.asarray
    if sharding is None:
        return jax.device_put(own(array))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: own(array[index]))


@lru_cache(maxsize=64)
def _put(depth: int, cut: bool, sharding: NamedSharding | None) -> Any:
    """Puts a part into its place in the leaf, whose memory is used again: (leaf, part, at) ->
    leaf."""

    def whole(leaf: Array, part: Array, at: Array) -> Array:
        start = (*at, *(0,) * part.ndim)
        return lax.dynamic_update_slice(leaf, part[(None,) * depth], start)

    def stages(leaf: Array, part: Array, at: Array) -> Array:
        # the stacked axis is cut over devices: each looks whether the place is its own
        here = jnp.bool_(True)
        for axis in range(depth):
            here &= lax.broadcasted_iota(jnp.int32, leaf.shape, axis) == at[axis]
        return jnp.where(here, part[(None,) * depth], leaf)

    options = {} if sharding is None else {"out_shardings": sharding}
    return jax.jit(stages if cut else whole, donate_argnums=0, **options)
