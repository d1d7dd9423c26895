"""Attention on one GPU, forward and backward: time, and errors beside float32.

    python benchmarks/attention_gpu.py [--shape NAME] [--kernel NAME] [--results FILE]
    python benchmarks/attention_gpu.py --blocks          sizes of blocks of our kernels in Triton

Each kernel is compiled for each shape and runs in rounds with the others. cuDNN is left
out where a row holds several documents. On a CPU, `--tiny` checks the script itself with
our kernels interpreted.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmwright.kernels import gpu_attention, gpu_blocks, gpu_chunks, gpu_cudnn, gpu_tokamax
from lmwright.nn import intervals
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval

REACH = intervals.causal_reach(None)


@dataclass(frozen=True)
class Shape:
    """A problem: `documents` of one length in each row."""

    rows: int
    tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    documents: int

    @property
    def scores(self) -> float:
        """Scores that count, of all heads."""
        length = self.tokens / self.documents
        return self.rows * self.num_heads * self.documents * length * (length + 1) / 2

    @property
    def flops(self) -> float:
        """Those of two products forward and five backward."""
        return 7 * 2 * self.scores * self.head_dim

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.head_dim**-0.5)

    def arrays(self) -> tuple[tuple[Array, ...], Interval]:
        """q, k, v and the gradient of the result, in bfloat16, and what each query sees."""
        dice = np.random.default_rng(0)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        draw = lambda n: dice.standard_normal((self.rows, self.tokens, n, self.head_dim))  # noqa: E731
        ids = np.arange(self.tokens) * self.documents // self.tokens
        ids = np.broadcast_to(ids, (self.rows, self.tokens))
        seen = intervals.causal(jnp.asarray(ids, jnp.int32))
        return tuple(jnp.asarray(draw(n), jnp.bfloat16) for n in heads), seen


SHAPES = {
    "2k": Shape(8, 2048, 9, 3, 64, 1),
    "2k-packed": Shape(8, 2048, 9, 3, 64, 3),
    "2k-1b": Shape(4, 2048, 32, 8, 64, 1),
    "2k-1b-packed": Shape(4, 2048, 32, 8, 64, 3),
    "8k": Shape(2, 8192, 32, 8, 128, 1),
    "8k-packed": Shape(2, 8192, 32, 8, 128, 14),
    "32k": Shape(1, 32768, 32, 8, 128, 1),
}
TINY = {"tiny": Shape(2, 256, 4, 2, 16, 1), "tiny-packed": Shape(2, 256, 4, 2, 16, 3)}

Attend = Callable[[Array, Array, Array, Interval], Array]


def kernels(shape: Shape, interpret: bool) -> dict[str, Attend]:
    """Kernels that take this shape here, by name."""
    (q, k, *_), _ = jax.eval_shape(shape.arrays)
    device, scoring = jax.devices()[0].device_kind, shape.scoring
    attends: dict[str, Attend] = {}
    if shape.documents == 1 and gpu_cudnn.fits(q, scoring, REACH):
        attends["cudnn"] = lambda q, k, v, seen: gpu_cudnn.attention(q, k, v, scoring, REACH)
    if gpu_tokamax.fits(q, k, scoring, device):
        attends["tokamax"] = lambda *a: gpu_tokamax.attention(*a, scoring, REACH)
    if gpu_attention.fits(shape.tokens, shape.head_dim, 2):
        ours = partial(gpu_blocks.attention, interpret=interpret)
        attends["kernels"] = lambda *a: ours(*a, scoring, REACH)
    attends["chunks"] = lambda *a: gpu_chunks.attention(*a, scoring, REACH)
    return attends


def both_ways(attend: Attend) -> Callable[..., tuple[Array, ...]]:
    """A compiled function of arrays and intervals: result and gradients."""

    def run(q: Array, k: Array, v: Array, g: Array, seen: Interval) -> tuple[Array, ...]:
        out, back = jax.vjp(lambda *a: attend(*a, seen), q, k, v)
        return out, *back(g)

    return jax.jit(run)


def reference(shape: Shape, arrays: tuple[Array, ...], seen: Interval) -> tuple[Array, ...] | None:
    """Result and gradients in float32 by `nn.intervals.attention`; None where scores would take
    more than 4 GiB."""
    if shape.rows * shape.num_heads * shape.tokens**2 * 4 > 2**32:
        return None
    exact = both_ways(lambda *a: intervals.attention(*a, shape.scoring))
    with jax.default_matmul_precision("highest"):
        return exact(*(a.astype(jnp.float32) for a in arrays), seen)


def errors(got: tuple[Array, ...], wanted: tuple[Array, ...] | None) -> dict[str, float]:
    """Norm of the error over that of the exact array."""
    if wanted is None:
        return {}
    norm = lambda a: float(jnp.linalg.norm(a.astype(jnp.float32).ravel()))  # noqa: E731
    return {
        f"error_{name}": norm(a.astype(jnp.float32) - b) / norm(b)
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True)
    }


def milliseconds(run: Callable[[], Any], times: int) -> float:
    """Of one call, of so many in a row."""
    began = time.perf_counter()
    for _ in range(times):
        out = run()
    jax.block_until_ready(out)
    return 1e3 * (time.perf_counter() - began) / times


def compare(name: str, shape: Shape, attends: dict[str, Attend], times: int) -> Iterator[dict]:
    """A record of each kernel, timed in rounds."""
    arrays, seen = shape.arrays()
    wanted = reference(shape, arrays, seen)
    runs, facts = {}, {}
    for kernel, attend in attends.items():
        began = time.perf_counter()
        try:
            step = both_ways(attend)
            got = jax.block_until_ready(step(*arrays, seen))
        except Exception as error:  # whatever a card says of a kernel is a result, too
            yield {"shape": name, "kernel": kernel, "failed": str(error).splitlines()[0][:200]}
            continue
        facts[kernel] = {"compile_s": time.perf_counter() - began} | errors(got, wanted)
        runs[kernel] = partial(step, *arrays, seen)
    took: dict[str, list[float]] = {kernel: [] for kernel in runs}
    for _ in range(5):
        for kernel, run in runs.items():
            took[kernel].append(milliseconds(run, times))
    for kernel, rounds in took.items():
        ms = statistics.median(rounds)
        rate = shape.flops / ms * 1e3 / 1e12
        yield {"shape": name, "kernel": kernel, "ms": ms, "tflops": rate} | facts[kernel]


def with_blocks(shape: Shape) -> dict[str, Attend]:
    """Our kernels with the usual sizes of blocks and numbers of warps, and with others."""
    usual = gpu_blocks.Calls.of(shape.scoring, shape.tokens, shape.head_dim)
    attends: dict[str, Attend] = {"usual": by_blocks(usual)}
    for q, k, warps in product((64, 128), (32, 64, 128), (4, 8)):
        calls = (replace(call, block_q=q, block_k=k, num_warps=warps) for call in usual)
        attends[f"{q}x{k}, {warps} warps"] = by_blocks(gpu_blocks.Calls(*calls))
    return attends


def by_blocks(calls: gpu_blocks.Calls) -> Attend:
    """Our kernels with these sizes."""
    return lambda *a: gpu_blocks.attention_by(calls, *a, REACH)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", action="append", choices=[*SHAPES, *TINY])
    parser.add_argument("--kernel", action="append", choices=list(gpu_attention.NAMES))
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--times", type=int, default=20, help="calls a round")
    parser.add_argument(
        "--results", type=Path, help="file to which a line of JSON is added for each"
    )
    args = parser.parse_args()
    shapes, device = (TINY if args.tiny else SHAPES), jax.devices()[0]
    print(f"{device.device_kind}, JAX {jax.__version__}; forward and backward")
    for name in args.shape or shapes:
        shape = (SHAPES | TINY)[name]
        attends = with_blocks(shape) if args.blocks else kernels(shape, device.platform != "gpu")
        if args.kernel:
            attends = {kernel: attends[kernel] for kernel in args.kernel if kernel in attends}
        for record in compare(name, shape, attends, args.times):
            record = {"device": device.device_kind, "jax": jax.__version__} | record
            print_record(record)
            if args.results:
                with args.results.open("a") as file:
                    file.write(json.dumps(record) + "\n")


def print_record(record: dict[str, Any]) -> None:
    """A line for people."""
    head = f"{record['shape']:<14} {record['kernel']:<24}"
    if "failed" in record:
        print(f"{head} failed: {record['failed']}")
        return
    exact = [f"{name[6:]} {value:.1e}" for name, value in record.items() if name[:6] == "error_"]
    print(f"{head} {record['ms']:>8.2f} ms {record['tflops']:>6.0f} TFLOP/s  {', '.join(exact)}")


if __name__ == "__main__":
    main()
