"""Import of leaves with more elements than int32 counts."""

import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.param import Param
from lmwright.formats.hf_layout import Slot
from lmwright.formats.hf_stream import _filled

pytestmark = pytest.mark.slow  # 3 GB
LAYERS, EMBED, MLP = 9, 2048, 131_072  # 2.42e9 elements; one layer has 2.7e8
MARKS = {0: (0, 0), 4: (17, 100_003), 7: (2047, 131_071), 8: (2047, 131_071)}


class Tensors(dict):
    """Tensors that are made when they are asked for: zeros, and one mark."""

    def __getitem__(self, name):
        layer = int(name)
        tensor = np.zeros((MLP, EMBED), np.int8)  # as over there: outputs first
        if layer in MARKS:
            row, column = MARKS[layer]
            tensor[column, row] = layer + 1
        return tensor


def test_a_stack_beyond_int32():
    """Each layer's tensor comes to its own place; the last begins at element 2^31."""
    param = Param("[layers] embed -> mlp", (LAYERS, EMBED, MLP))
    assert param.size > 2**31 > 7 * EMBED * MLP and 8 * EMBED * MLP >= 2**31
    parts = [Slot(str(i), "layers.up", (i,), (MLP, EMBED), param) for i in range(LAYERS)]
    leaf = _filled(parts, Tensors(), jnp.dtype("int8"), None)
    assert leaf.shape == param.shape
    whole = np.asarray(leaf)
    for layer in range(LAYERS):
        assert np.count_nonzero(whole[layer]) == (layer in MARKS)
        if layer in MARKS:
            assert whole[layer][MARKS[layer]] == layer + 1
    assert whole.reshape(-1)[LAYERS * EMBED * MLP - 1] == 9
    # and back, tensor by tensor
    again = parts[8].to_layout(whole)
    assert again.shape == (MLP, EMBED) and again[131_071, 2047] == 9
