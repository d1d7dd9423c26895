"""Hashes of a model: of its tensors for convert.json, of its weights for adapters."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xxhash

from lmwright.core.param import Tree, walk

CONVERT = "convert.json"


def add_tensor(digest: xxhash.xxh3_128, name: str, array: np.ndarray) -> None:
    """Adds a tensor to a hash as convert.json counts it: name, dtype, shape and bytes."""
    digest.update(f"{name} {array.dtype} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8))


def hash_tensors(tensors: Mapping[str, np.ndarray], names: Iterable[str]) -> str:
    """xxh3 of tensors in the order of their names, one in memory at a time."""
    digest = xxhash.xxh3_128()
    for name in names:
        add_tensor(digest, name, tensors[name])
    return digest.hexdigest()


def weights_hash(w: Tree, rounded_to: Any = None) -> str:
    """Hash of all weights by their names, as float32 or first rounded to a dtype."""
    digest = xxhash.xxh3_128()
    for name, array in walk(w):
        add_to_hash(digest, name, array if rounded_to is None else array.astype(rounded_to))
    return digest.hexdigest()


def add_to_hash(digest: xxhash.xxh3_128, name: str, array: np.ndarray) -> None:
    """Adds a weight to a hash, as float32."""
    digest.update(name.encode())
    digest.update(np.ascontiguousarray(array, np.float32).data)
