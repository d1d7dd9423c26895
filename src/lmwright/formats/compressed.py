"""compressed-tensors: integers of rounded weights, as `pack-quantized`.

    X.weight_packed  int32 [out, in * bits / 32]   value + 2^(bits - 1), the first at the low bits
    X.weight_scale   float32 [out, in / group]
    X.weight_shape   int64 [2]

https://github.com/vllm-project/compressed-tensors
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lmwright.core.contract import HfModel
from lmwright.errors import UserError
from lmwright.formats.hf_layout import Slot, slots
from lmwright.formats.safetensors import Tensors, described
from lmwright.models.counts import is_layer_matrix

BITS = {"int4": 4, "int8": 8}
ENDINGS = ("packed", "scale", "shape")  # behind `X.weight_`
FORMAT = "pack-quantized"
HEAD = "lm_head.weight"  # by its readers' name
STRATEGIES = ("group", "channel")  # inputs that share a scale
MORE = ("transform_config", "kv_cache_scheme", "input_activations", "output_activations")
WORD = 32


def refuse_grid(dtype: str, tensors: Mapping[str, Any]) -> None:
    """Raises UserError where the weights are not on the grid of the type; none are on that of q8_0,
    which takes floats."""
    grid = getattr(tensors, "grid", "")
    if dtype == "q8_0":
        if grid:
            raise UserError(
                f'dtype: q8_0 would round weights again that were trained with "{grid}"; use that '
                "type, or fp32, which holds the same values"
            )
        return
    if is_packed(tensors):
        raise UserError(
            f"dtype: {dtype}: the integers of a packed folder are read as floats, which are not "
            "packed again; copy that folder, or export the run that trained it"
        )
    if grid != dtype:
        trained = f'they were trained with "{grid}"' if grid else "they were trained as floats"
        raise UserError(
            f"dtype: {dtype} is for weights that a run with [qat] trained on its grid, but "
            f"{trained}; round floats with lmwright quantize --to {dtype}"
        )


def is_packed(tensors: Any) -> bool:
    """True for the tensors of a packed folder, also under other names or in parts."""
    while tensors is not None and not isinstance(tensors, PackedIntegers):
        tensors = getattr(tensors, "_stored", None)
    return tensors is not None


def group_of(dtype: str, model: HfModel, tensors: Any) -> int:
    """Inputs that share a scale; 0 if all do."""
    if dtype == "int8":
        return 0
    slot = next(slot for slot in slots(model) if is_layer_matrix(slot.param))
    _, scale = tensors.codes(slot.name)
    return slot.shape[1] // scale.shape[1]


def left_as_floats(model: HfModel) -> list[str]:
    """Names of the linear layers that are not rounded: the head, tied or not, routers, and what is
    around the layers of an encoder."""
    head = model.hf.weights.get("head", HEAD)
    floats = [s.name for s in slots(model) if s.is_linear and not is_layer_matrix(s.param)]
    names = [name.removesuffix(".weight") for name in (head, *floats)]
    return list(dict.fromkeys((*names, *(model.hf.modules.get(name, name) for name in names))))


def scheme(dtype: str, group: int, floats: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of a folder, whose linear layers `floats` are not rounded."""
    weights = {
        "num_bits": BITS[dtype], "type": "int", "symmetric": True, "dynamic": False,
        "strategy": "group" if group else "channel", "group_size": group or None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": FORMAT,
        "quantization_status": "compressed", "ignore": list(floats),
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


def packed_width(slot: Slot, dtype: str) -> int:
    """Number of int32 words in a row."""
    return -(-slot.shape[1] * BITS[dtype] // WORD)


def pack_integers(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 [out, words] of signed codes [out, in]; a last word is filled up with zeros."""
    per_word = WORD // bits
    shifted = (codes.astype(np.int64) + 2 ** (bits - 1)).astype(np.uint32)
    padded = np.pad(shifted, ((0, 0), (0, -codes.shape[1] % per_word)))
    parts = padded.reshape(codes.shape[0], -1, per_word)
    at = (np.arange(per_word) * bits).astype(np.uint32)
    return np.bitwise_or.reduce(parts << at, axis=-1).astype(np.uint32).view(np.int32)


def unpack_integers(packed: np.ndarray, bits: int, width: int) -> np.ndarray:
    """int8 codes [out, width] of int32 words."""
    at = (np.arange(WORD // bits) * bits).astype(np.uint32)
    parts = (packed.view(np.uint32)[..., None] >> at) & np.uint32(2**bits - 1)
    flat = parts.reshape(packed.shape[0], -1)[:, :width]
    return (flat.astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)


class PackedIntegers(Tensors):
    """The tensors of a folder of packed integers, as the floats that they stand for."""

    def __init__(self, stored: Mapping[str, np.ndarray], config: Mapping[str, Any], where: str):
        self._stored, self._bits, self._where = stored, bits_of(config, where), Path(where).parent
        ends = tuple(f".weight_{end}" for end in ENDINGS)
        self._packed = {
            name.removesuffix("_packed") for name in stored if name.endswith(".weight_packed")
        }
        plain = [name for name in stored if not name.endswith(ends)]
        super().__init__({*plain, *self._packed})

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a tensor as floats. Raises UserError for parts of a weight that are
        missing or do not agree."""
        if name not in self._packed:
            return described(self._stored, name)
        if missing := [f"{name}_{e}" for e in ENDINGS if f"{name}_{e}" not in self._stored]:
            raise UserError(f"{self._where}: lacks {missing[0]}; download the folder again")
        shape = tuple(np.ravel(self._stored[f"{name}_shape"]).tolist())
        packed, scale = (described(self._stored, f"{name}_{end}") for end in ENDINGS[:2])
        if not _agree(shape, packed, scale[1], self._bits):
            raise UserError(
                f"{self._where}: the parts of {name} ({', '.join(ENDINGS)}) do not agree; download "
                "the folder again"
            )
        return "float32", shape

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._packed:
            return self._stored[name]
        rows, width = self.described(name)[1]
        codes = unpack_integers(self._stored[f"{name}_packed"], self._bits, width)
        scale = np.asarray(self._stored[f"{name}_scale"]).astype(np.float32)
        blocks = codes.reshape(rows, scale.shape[1], -1).astype(np.float32)
        return (blocks * scale[..., None]).reshape(rows, width)


def _agree(
    shape: tuple[int, ...], packed: tuple[str, tuple[int, ...]], scale: tuple[int, ...], bits: int
) -> bool:
    """True if a weight of a `shape` can be `packed`, (dtype, shape), with a `scale` of a shape."""
    if len(shape) != 2 or len(scale) != 2 or min(*shape, *scale) < 1:
        return False
    words, groups = -(-shape[1] * bits // WORD), scale[1]
    stored = packed == ("int32", (shape[0], words))
    return stored and scale[0] == shape[0] and shape[1] % groups == 0


def bits_of(config: Mapping[str, Any], where: str) -> int:
    """Bits of a folder's integers. Raises UserError for a scheme that is not read."""
    said = config["quantization_config"]
    listed = said.get("config_groups")
    groups = list(listed.values()) if isinstance(listed, dict) else []
    alone = groups[0] if len(groups) == 1 else None
    weights = alone.get("weights") if isinstance(alone, dict) else None
    if (
        not isinstance(weights, dict)
        or said.get("format") != FORMAT or not weights.get("symmetric")
        or weights.get("type") != "int" or weights.get("num_bits") not in BITS.values()
        or weights.get("strategy") not in STRATEGIES
    ):  # fmt: skip
        raise UserError(
            f"{where}: quantization_config is not one symmetric scheme of 4 or 8 bits in the "
            f"format {FORMAT}, by {' or '.join(STRATEGIES)}, the only form that is read; start "
            "from the unquantized model instead"
        )
    if more := [name for part in (said, *groups) for name in MORE if part.get(name)]:
        raise UserError(
            f"{where}: quantization_config.{more[0]} changes more than the weights, which is not "
            "computed; start from the unquantized model instead"
        )
    return int(weights["num_bits"])


def is_compressed(config: Mapping[str, Any]) -> bool:
    """True for a config.json of compressed-tensors."""
    said = config.get("quantization_config")
    return isinstance(said, dict) and said.get("quant_method") == "compressed-tensors"
