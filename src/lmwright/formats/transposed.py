"""Matrices on the host, turned."""

import numpy as np

ROWS = 64  # transposed at once: what they touch stays in the cache


def transposed(array: np.ndarray) -> np.ndarray:
    """A contiguous transpose of [A, B], several times as fast as numpy's own copy."""
    out = np.empty(array.shape[::-1], array.dtype)
    # custom dtypes are copied value by value; as integers they are not
    bits = f"u{array.itemsize}"
    source, target = array.view(bits), out.view(bits)
    for start in range(0, len(array), ROWS):
        target[:, start : start + ROWS] = source[start : start + ROWS].T
    return out
