"""Hash of the tensors of a model: what convert.json says of them."""

from collections.abc import Iterable, Mapping

import numpy as np
import xxhash

CONVERT = "convert.json"


def add_tensor(digest: xxhash.xxh3_128, name: str, array: np.ndarray) -> None:
    """One tensor more, as convert.json counts them: name, dtype, shape and bytes."""
    digest.update(f"{name} {array.dtype} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).view(np.uint8))


def hash_tensors(tensors: Mapping[str, np.ndarray], names: Iterable[str]) -> str:
    """xxh3 of tensors in the order of their names, one in memory at a time."""
    digest = xxhash.xxh3_128()
    for name in names:
        add_tensor(digest, name, tensors[name])
    return digest.hexdigest()
