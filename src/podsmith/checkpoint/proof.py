"""Proof that an export is the model: its files read again and compared.

tensors   every value equals the source rounded to the file's dtype, bit for bit
logits    source against the folder as podsmith imports it, float32, fixed prompts
logits    the folder in podsmith against the folder in transformers, where installed
"""

import importlib.util
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import podsmith
from podsmith.checkpoint.reader import import_hf
from podsmith.checkpoint.safetensors import TensorFiles
from podsmith.core.batch import Batch
from podsmith.core.dtypes import Compute
from podsmith.core.param import Tree

PROMPTS = (
    "Once upon a time, in a small village by the sea, there lived",
    "def main(argv):\n    for name in sorted(argv):\n        print(",
    "The report names three causes: first, the cost of energy; second,",
)
PROMPT_TOKENS = 48
TOLERANCE = 1e-3  # of the largest logit; float32 sums in another order stay below 1e-4


@dataclass(frozen=True)
class Agreement:
    """How far two sets of logits are apart."""

    max_abs_diff: float
    max_abs_logit: float
    greedy_agreement: float
    """Share of positions at which the most likely token is the same."""


@dataclass(frozen=True)
class Proof:
    """What was compared, and how well it agrees."""

    dtype: str
    tokens: int
    tensors: str
    source_to_folder: Agreement
    folder_to_transformers: Agreement | None
    transformers: str
    """Version compared with, or why it was not."""

    def to_dict(self) -> dict[str, Any]:
        return {"podsmith": podsmith.__version__, **asdict(self)}

    def lines(self) -> list[str]:
        """For people: one sentence a comparison."""
        said = [
            f"tensors: {self.tensors}",
            f"source and folder: {_sentence(self.source_to_folder)}",
        ]
        if self.folder_to_transformers is None:
            return [*said, f"transformers: not compared, {self.transformers}"]
        other = _sentence(self.folder_to_transformers)
        return [*said, f"podsmith and transformers {self.transformers}: {other}"]


def _sentence(a: Agreement) -> str:
    return (
        f"logits differ by at most {a.max_abs_diff:.2e} (largest {a.max_abs_logit:.3g}), "
        f"greedy choice equal at {a.greedy_agreement:.2%} of positions"
    )


def compare_tensors(folder: Path, expected: Iterable[tuple[str, np.ndarray]]) -> None:
    """Raises RuntimeError unless the files hold exactly these arrays, bit for bit."""
    files = TensorFiles(folder)
    for name, array in expected:
        found = files[name]
        if found.dtype != array.dtype or found.shape != array.shape:
            raise RuntimeError(f"{name}: written as {array.dtype} {array.shape}, read otherwise")
        if not np.array_equal(found.view(np.uint8), array.view(np.uint8)):
            raise RuntimeError(f"{name}: the file does not hold what was written; check the disk")


def prove(folder: Path, model: Any, w: Tree, tokenizer: Any, dtype: str) -> Proof:
    """Compares logits of (model, w), the folder imported, and the folder in transformers.

    Raises RuntimeError where they are further apart than rounding explains.
    """
    tokens = proof_tokens(model, tokenizer)
    source = logits(model, w, tokens)
    again_model, again, _ = import_hf(folder)
    result = logits(again_model, again, tokens)
    del again
    first = agreement(source, result)
    if dtype == "fp32":
        _insist(first, "the folder read again")
    second, version = None, "it is not installed"
    if all(importlib.util.find_spec(name) for name in ("transformers", "torch")):
        theirs, version = transformers_logits(folder, tokens)
        second = agreement(result, theirs)
        _insist(second, f"transformers {version}")
    count = len(list(TensorFiles(folder)))
    return Proof(dtype, int(tokens.size), f"all {count} equal bit for bit in {dtype}",
                 first, second, version)  # fmt: skip


def _insist(found: Agreement, other: str) -> None:
    if not found.max_abs_diff <= TOLERANCE * max(found.max_abs_logit, 1.0):
        raise RuntimeError(
            f"the export was refused: {other} gives logits that differ by {found.max_abs_diff:.3g}"
        )


def proof_tokens(model: Any, tokenizer: Any) -> np.ndarray:
    """int32 [B, T]: the fixed prompts, repeated to one length; fixed ids without a tokenizer."""
    length = min(PROMPT_TOKENS, model.seq_len)
    if tokenizer is None:
        rng = np.random.Generator(np.random.Philox(0))
        return rng.integers(0, model.vocab_size, (len(PROMPTS), length), dtype=np.int32)
    rows = [np.resize(np.asarray(tokenizer.encode(text), np.int32), length) for text in PROMPTS]
    return np.stack(rows)


def logits(model: Any, w: Tree, tokens: np.ndarray) -> np.ndarray:
    """float32 [B, T, V] of whole rows, with full precision matmuls."""
    b, t = tokens.shape
    batch = Batch(
        tokens=jnp.asarray(tokens),
        segment_ids=jnp.ones((b, t), jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t)),
        loss_weight=jnp.ones((b, t), jnp.float32),
    )
    with jax.default_matmul_precision("highest"):
        return np.asarray(_forward(model, w, batch))


@partial(jax.jit, static_argnums=0)
def _forward(model: Any, w: Tree, batch: Batch) -> jax.Array:
    return model.logits(w, model.hidden(w, batch, Compute())[0])


def transformers_logits(folder: Path, tokens: np.ndarray) -> tuple[np.ndarray, str]:
    """float32 [B, T, V] from transformers, and its version."""
    import torch
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            out = theirs.eval()(input_ids=torch.tensor(tokens, dtype=torch.long))
    finally:
        transformers.logging.set_verbosity(level)
    return out.logits.float().numpy(), transformers.__version__


def agreement(a: np.ndarray, b: np.ndarray) -> Agreement:
    """Distance of two float arrays [B, T, V]."""
    return Agreement(
        max_abs_diff=float(np.abs(a - b).max()),
        max_abs_logit=float(np.abs(a).max()),
        greedy_agreement=float((a.argmax(-1) == b.argmax(-1)).mean()),
    )
