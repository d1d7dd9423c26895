"""Speed of one product in every layout of its operands, beside torch's (MKL), on this CPU.

    python benchmarks/products_cpu.py

GFLOP/s by wall time, the fifth best of 25 interleaved rounds. N and T say how the operands lie
(T: transposed in memory); "swapped" computes the transposed result.
"""

import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
import torch
from jax import lax

from lmwright.core.cpu import compiler_options

SHAPES = ((1024, 576, 1536), (1024, 1536, 576), (576, 1024, 1536), (1024, 576, 576))  # m, k, n
ROUNDS = 25


def contestants(m: int, k: int, n: int) -> dict[str, Callable[[], object]]:
    """The same product, [m, k] by [k, n], by name."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (k, n)))
    at, bt = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    layouts = {
        "NN": (a, b, 1, 0), "NT": (a, bt, 1, 1), "TN": (at, b, 0, 0), "TT": (at, bt, 0, 1),
        "NN swapped": (b, a, 0, 1), "NT swapped": (bt, a, 1, 1), "TN swapped": (b, at, 0, 0),
        "TT swapped": (bt, at, 1, 0),
    }  # fmt: skip
    found = {name: jax_product(*layout) for name, layout in layouts.items()}
    ta, tb, tbt = torch.tensor(a), torch.tensor(b), torch.tensor(bt)
    return found | {"torch NN": lambda: ta @ tb, "torch NT": lambda: ta @ tbt.T}


def jax_product(a: np.ndarray, b: np.ndarray, i: int, j: int) -> Callable[[], object]:
    """A compiled product over axis i of a and j of b, with the train step's options."""
    dims = (((i,), (j,)), ((), ()))
    a, b = jax.device_put(a), jax.device_put(b)
    run = jax.jit(lambda a, b: lax.dot_general(a, b, dims)).lower(a, b).compile(compiler_options())
    return lambda: run(a, b).block_until_ready()


def main() -> None:
    for m, k, n in SHAPES:
        seconds: dict[str, list[float]] = {}
        products = contestants(m, k, n)
        for _ in range(ROUNDS):
            for name, run in products.items():
                run()  # torch's threads spin for a while after their work; this one waits them out
                begin = time.perf_counter()
                run()
                seconds.setdefault(name, []).append(time.perf_counter() - begin)
        print(f"[{m}, {k}] x [{k}, {n}]")
        for name, found in seconds.items():
            speed = 2 * m * k * n / 1e9 / statistics.quantiles(found, n=5)[0]
            print(f"  {name:12} {speed:6.0f} GFLOP/s")


if __name__ == "__main__":
    main()
