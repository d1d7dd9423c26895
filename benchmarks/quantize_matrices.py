"""Errors of the results of a model's matrices, by grid: integers next to each weight, GPTQ, and
llama.cpp's own rounding with an importance matrix of the same tokens, where xllamacpp is installed.

    python benchmarks/quantize_matrices.py MODEL TEXT [--rows 16] [--context 512] [--most 12]

Only matrices with rows of a multiple of 256, which all grids hold; at most so many of them, spread
over the layers. TEXT is measured on. An error is the mean squared error of results as a share of
their mean square, on the tokens that were measured, and the mean over the matrices is geometric.
"""

import argparse
import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmwright.evals.compute import row_compute
from lmwright.formats.load import load_model
from lmwright.quantize.command import matrices_of
from lmwright.quantize.gptq import Method, Rounder
from lmwright.quantize.grids import BLOCKS, GridName
from lmwright.quantize.layers import Weights
from lmwright.quantize.moments import measured
from lmwright.quantize.rows import rows_of_text

METHODS: tuple[Method, ...] = ("nearest", "gptq")


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--most", type=int, default=12)
    said = parser.parse_args()
    loaded, compute = load_model(said.model), row_compute("fp32")
    rows = rows_of_text(loaded, said.text, None, said.rows, said.context)
    params = {
        path: param
        for path, param in matrices_of(loaded.model, "q4_k").items()
        if len(param.shape) == 3  # no experts
    }
    weights = Weights(loaded.model, loaded.tensors)
    total = sum(param.shape[0] for param in params.values())
    every = -(-total // said.most)
    errors: dict[tuple[str, str], list[float]] = {}
    found = measured(loaded.model, weights, rows.batches(), params, compute)
    for number, (path, layer, moments) in enumerate(found):
        if number % every:
            continue
        w = weights.weight(path, layer).reshape(params[path].matrix_shape).astype(jnp.float32)
        for to in BLOCKS:
            for method in METHODS:
                error = float(Rounder(method, 32)(w, moments, to).error)
                errors.setdefault((to, method), []).append(error)
            if (theirs := by_llama_cpp(np.asarray(w).T, np.diagonal(moments), to)) is not None:
                errors.setdefault((to, "llama.cpp"), []).append(of_results(theirs, w, moments))
    count = len(next(iter(errors.values())))
    print(f"{count} of {total} matrices")
    print("| grid | nearest | llama.cpp, importance matrix | GPTQ |")
    print("|---|---:|---:|---:|")
    for to in BLOCKS:
        each = [errors.get((to, method)) for method in ("nearest", "llama.cpp", "gptq")]
        shown = [f"{np.exp(np.mean(np.log(e))):.2e}" if e else "not installed" for e in each]
        print(f"| `{to}` | {' | '.join(shown)} |")


def of_results(values: np.ndarray, w: Array, moments: Array) -> float:
    """Error of values [out, in] in the place of w [in, out]."""
    with jax.default_matmul_precision("highest"):
        apart = jnp.asarray(values.T) - w
        return float(jnp.sum(apart * (moments @ apart)) / jnp.sum(w * (moments @ w)))


def by_llama_cpp(w: np.ndarray, importance: np.ndarray, to: GridName) -> Any:
    """float32 [out, in] of w as llama.cpp rounds it; None where its library is not installed."""
    spec, gguf = importlib.util.find_spec("xllamacpp"), __import__("gguf")
    if spec is None or spec.origin is None:
        return None
    kind = gguf.GGMLQuantizationType[to.upper()]
    library = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("*.so"))))
    quantize = getattr(library, f"quantize_{to.replace('_k', '_K')}")
    number, place = ctypes.c_int64, ctypes.c_void_p
    quantize.argtypes, quantize.restype = (place, place, number, number, place), ctypes.c_size_t
    values, block = gguf.GGML_QUANT_SIZES[kind]
    out = np.zeros((len(w), w.shape[1] // values * block), np.uint8)
    w, importance = (np.ascontiguousarray(a, np.float32) for a in (w, importance))
    quantize(w.ctypes.data, out.ctypes.data, *w.shape, importance.ctypes.data)
    return gguf.dequantize(out, kind)


if __name__ == "__main__":
    main()
