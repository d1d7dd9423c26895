"""Packed rows of labeled documents, made by hand."""

import numpy as np

from lmwright.core.contract import Batch


def packed(rows, width):
    """A batch of rows of documents, (tokens, class) each."""
    shape = (len(rows), width)
    tokens, ids, places = (np.zeros(shape, np.int32) for _ in range(3))
    weight = np.zeros(shape, np.float32)
    for row, inside in enumerate(rows):
        at = 0
        for number, (text, label) in enumerate(inside, 1):
            here = slice(at, at + len(text))
            tokens[row, here], ids[row, here] = text, number
            places[row, here], weight[row, at] = np.arange(len(text)), label
            at += len(text)
    return Batch(tokens, ids, places, weight)
