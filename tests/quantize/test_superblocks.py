"""K-quants: the gguf package reads their bytes as the numbers that were meant, and llama.cpp's own
search finds no nearer ones."""

import ctypes
import importlib.util
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.formats.gguf_blocks import BLOCKS, block_in
from lmwright.quantize.gptq import Rounder
from lmwright.quantize.superblocks import KINDS, in_units

gguf = pytest.importorskip("gguf", reason="reads the blocks")
EACH = pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])


def read(kind, codes, numbers):
    """float32 [out, in] that gguf reads."""
    block = BLOCKS[kind]
    packed = block.packed(block.rows(codes, numbers), codes.shape[1])
    return gguf.dequantize(packed, gguf.GGMLQuantizationType[kind])


def values_of(found, kind):
    """(what the integers stand for, what a file of them says), float32 [out, in]."""
    codes, scale, offset, unit, offset_unit = (
        np.asarray(a).T
        for a in (found.codes, found.scale, found.offset, found.unit, found.offset_unit)
    )
    both = [(scale, unit), (offset, offset_unit)][: 1 + KINDS[kind.lower()].offset]
    whole = [in_units(a, by) for a, by in both]
    numbers = np.concatenate([*whole, *(by[..., None] for _, by in both)], -1)
    meant = codes.reshape(*scale.shape, -1).astype("f4") * scale[..., None] - offset[..., None]
    return meant.reshape(codes.shape), read(kind, codes, numbers)


def by_llama_cpp(w, kind):
    """float32 [out, in]: w as llama.cpp rounds it without an importance matrix."""
    spec = importlib.util.find_spec("xllamacpp") or pytest.skip("xllamacpp not installed")
    library = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("*.so"))))
    quantize = getattr(library, f"quantize_q{kind[1]}_K")
    number, place = ctypes.c_int64, ctypes.c_void_p
    quantize.argtypes, quantize.restype = (place, place, number, number, place), ctypes.c_size_t
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    out = np.zeros((len(w), w.shape[1] // 256 * size), np.uint8)
    w = np.ascontiguousarray(w, np.float32)
    assert quantize(w.ctypes.data, out.ctypes.data, *w.shape, None) == out.nbytes
    return gguf.dequantize(out, gguf.GGMLQuantizationType[kind])


def rounded(w, kind, method="nearest", moments=None):
    moments = np.eye(w.shape[1]) if moments is None else moments
    w, moments = jnp.asarray(w.T, jnp.float32), jnp.asarray(moments, jnp.float32)
    return Rounder(method, 32)(w, moments, kind.lower())


@EACH
def test_all_integers_that_a_block_has_are_read_as_they_are_meant(kind):
    rng, of = np.random.default_rng(3), KINDS[kind.lower()]
    codes = rng.integers(of.rule.low, of.rule.high + 1, (5, 512))
    units = rng.standard_normal((5, 2, 2)).astype("f2").astype("f4")
    scale = rng.integers(0 if of.offset else -128, of.most + 1, (5, 2, 256 // of.group))
    offset = rng.integers(0, 64, (5, 2, 8)) if of.offset else np.zeros((5, 2, 1), int)
    numbers = np.concatenate([scale, offset, units] if of.offset else [scale, units[..., :1]], -1)
    steps = np.repeat(scale * units[..., :1], of.group, -1).reshape(5, 512)
    below = np.repeat(offset * units[..., 1:], 256 // offset.shape[-1], -1).reshape(5, 512)
    np.testing.assert_allclose(
        read(kind, codes, numbers), steps * codes - below * of.offset, rtol=1e-6, atol=1e-5
    )


@EACH
@pytest.mark.parametrize("draw", ["standard_normal", "random", "standard_t"])
def test_no_farther_than_llama_cpp_gets(kind, draw):
    rng = np.random.default_rng(7)
    shape = (32, 512)
    w = rng.standard_t(3, shape) if draw == "standard_t" else getattr(rng, draw)(shape)
    w = w.astype("f4")
    meant, there = values_of(rounded(w, kind), kind)
    np.testing.assert_array_equal(meant, there)
    theirs = by_llama_cpp(w, kind)
    assert 0 < np.square(there - w).sum() <= np.square(theirs - w).sum()


@EACH
@pytest.mark.parametrize("method", ["nearest", "gptq"])
def test_rows_without_a_range(kind, method):
    """Zeros, one value alone, and values of one sign."""
    rng = np.random.default_rng(1)
    far = np.zeros(256)
    far[100] = -3.0
    w = np.stack([np.zeros(256), np.full(256, 0.5), np.full(256, -0.5), far,
                  -rng.random(256), 1 + rng.random(256), 1e-9 * rng.random(256)])  # fmt: skip
    meant, there = values_of(rounded(w, kind, method), kind)
    np.testing.assert_array_equal(meant, there)
    assert (there[0] == 0).all()
    error = np.abs(there - w).max(1) / np.maximum(np.abs(w).max(1), 1e-6)
    assert error.max() < (0.08 if kind == "Q4_K" else 0.04), error


# what llama.cpp prints when it loads files that its quantizer made: TinyLlama, Mistral 7B
@pytest.mark.parametrize(("layers", "larger"), [(22, 20), (32, 32)])
@pytest.mark.parametrize("to", ["Q4_K_M", "Q5_K_M"])
def test_a_mix_has_as_many_larger_matrices_as_llama_cpps(to, layers, larger):
    ends = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    names = [f"blk.{layer}.{end}.weight" for layer in range(layers) for end in ends]
    kinds = Counter(block_in(to, name, layers) for name in names)
    assert kinds == {to[:4]: 7 * layers - larger, "Q6_K": larger}
