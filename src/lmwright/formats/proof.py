"""Proof that a conversion is the model: its files read again and compared.

tensors   every tensor of the source used exactly once, every value equal to the source
          rounded to the file's dtype, bit for bit
logits    source against the result as lmwright reads it, float32, fixed prompts
logits    the result in lmwright against source and result in transformers, where it can run
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

import lmwright
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch, HfModel
from lmwright.core.param import Tree, count_params
from lmwright.errors import UserError
from lmwright.formats.hf_layout import slots
from lmwright.formats.hf_stream import unused
from lmwright.formats.reference import Reference, too_large, transformers_says
from lmwright.formats.tensor_hash import add_tensor
from lmwright.formats.ternary import has_ternary
from lmwright.formats.text_tensors import NotTaken
from lmwright.models.over import OverEncoder

PROMPTS = (
    "Once upon a time, in a small village by the sea, there lived",
    "def main(argv):\n    for name in sorted(argv):\n        print(",
    "The report names three causes: first, the cost of energy; second,",
)
PROMPT_TOKENS = 48
TOLERANCE = 1e-3  # of the largest logit; float32 sums in another order stay below 1e-4
CODES_TOLERANCE = 5e-2  # where activations are rounded: a sum in another order may round otherwise


@dataclass(frozen=True)
class Agreement:
    """Distance between two sets of logits."""

    max_abs_diff: float
    max_abs_logit: float
    kl: float
    """Kullback-Leibler divergence of the second from the first, nats a position, mean."""
    greedy_agreement: float
    """Share of positions at which the most likely token is the same."""


@dataclass(frozen=True)
class Accounting:
    """Tensors that the result was made from."""

    tensors: int
    """Number of tensors, each used exactly once."""
    parameters: int
    left_out: tuple[str, ...]
    """Tensors of the source that are no weights: known buffers, a stored copy of a tied head."""
    xxh3: str
    """Hash of names, dtypes and bytes of the result's tensors, in its order."""
    not_taken: tuple[NotTaken, ...] = ()
    """Parts of the source beside the text model, such as a vision tower."""


@dataclass(frozen=True)
class Source:
    """Origin of a model, where transformers may read it."""

    path: Path | None
    """Path that transformers can read; None where it can read nothing."""
    model: HfModel
    """The model that its own configuration describes."""
    load: Callable[[], Tree]
    """Function that loads its weights as our tree."""
    adapter: Path | None = None
    """A PEFT folder that was merged into what lies at `path`; `model` and `load` are the result."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Comparisons that were made, and how well they agree."""

    dtype: str
    tokens: int = 0
    tensors: str
    accounting: Accounting
    source_to_folder: Agreement | None = None
    """Agreement of the source and the result; None where the model does not fit into memory, and
    `why_no_logits` says so."""
    folder_to_transformers: Agreement | None = None
    transformers: str = ""
    """Version compared with, or the reason why not."""
    why_no_logits: str | None = None
    source_to_transformers: Agreement | None = None
    """Agreement of the source with transformers; None where the source is our own, or transformers
    cannot read it."""
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Fields of the model that were changed on the way: before and after."""
    merged_to_peft: Agreement | None = None
    """A merged adapter against PEFT with the same base and folder."""
    peft: str | None = None
    """Version of PEFT, or the reason why it was not compared; None where no adapter was merged."""
    outputs: str = "logits"
    """The outputs that are compared: `hidden states` of a model without a head."""

    def to_dict(self) -> dict[str, Any]:
        return {"lmwright": lmwright.__version__, **asdict(self)}

    def lines(self) -> list[str]:
        """The result as text, one sentence a comparison."""
        lines = [f"tensors: {self.tensors}"]
        lines += [
            f"not taken: {each.part}, {each.tensors} tensors of {each.parameters:,} parameters"
            for each in self.accounting.not_taken
        ]
        lines += [f"changed: {name} from {a!r} to {b!r}" for name, (a, b) in self.changed.items()]
        if self.source_to_folder is None:
            lines.append(f"{self.outputs}: not compared, {self.why_no_logits}")
        else:
            lines.append(f"source and result: {sentence(self.source_to_folder, self.outputs)}")
        if self.source_to_transformers is not None:
            there = sentence(self.source_to_transformers, self.outputs)
            lines.append(f"source in lmwright and transformers {self.transformers}: {there}")
        if self.merged_to_peft is not None:
            there = sentence(self.merged_to_peft, self.outputs)
            lines.append(f"merged here and the adapter in PEFT {self.peft}: {there}")
        elif self.peft is not None:
            lines.append(f"the adapter in PEFT: not compared, {self.peft}")
        if self.folder_to_transformers is None:
            return [*lines, f"result in transformers: not compared, {self.transformers}"]
        other = sentence(self.folder_to_transformers, self.outputs)
        return [*lines, f"result in lmwright and transformers {self.transformers}: {other}"]


def sentence(a: Agreement, outputs: str = "logits") -> str:
    """An agreement in words."""
    if outputs != "logits":
        return f"{outputs} differ by at most {a.max_abs_diff:.2e} (largest {a.max_abs_logit:.3g})"
    return (
        f"logits differ by at most {a.max_abs_diff:.2e} (largest {a.max_abs_logit:.3g}), "
        f"KL {a.kl:.1e} nats, greedy choice equal at {a.greedy_agreement:.2%} of positions"
    )


def compare_tensors(
    written: Mapping[str, np.ndarray], expected: Iterable[tuple[str, np.ndarray]]
) -> str:
    """Hash (xxh3) of the tensors. Raises RuntimeError unless they are exactly these arrays, bit for
    bit, and no others."""
    digest, names = xxhash.xxh3_128(), set()
    for name, array in expected:
        names.add(name)
        read = written[name]
        if read.dtype != array.dtype or read.shape != array.shape:
            raise RuntimeError(f"{name}: written as {array.dtype} {array.shape}, read otherwise")
        bits = read.view(np.uint8) if read.ndim else read
        if not np.array_equal(bits, array.view(np.uint8) if array.ndim else array):
            raise RuntimeError(f"{name}: the file does not hold what was written; check the disk")
        add_tensor(digest, name, read)
        del read, array, bits
    if extra := set(written) - names:
        raise RuntimeError(f"{sorted(extra)[0]}: is in the result but not in the source")
    return digest.hexdigest()


def _accounting(model: HfModel, source: Mapping[str, Any], xxh3: str) -> Accounting:
    """The tensors of `source` that became the model."""
    wanted = slots(model)
    return Accounting(
        tensors=len(wanted),
        parameters=sum(slot.size for slot in wanted),
        left_out=tuple(unused(wanted, source)),
        xxh3=xxh3,
        not_taken=getattr(source, "not_taken", ()),
    )


NO_BASE = "it cannot read the base, not a Hugging Face folder or GGUF file; export it first"


def prove(
    model: HfModel,
    tensors: Mapping[str, Any],
    load_source: Callable[[], Tree],
    load_result: Callable[[], tuple[Any, Tree]],
    tokenizer: Any,
    *,
    dtype: str,
    compared: str,
    xxh3: str,
    result: Path,
    source: Source | None,
    exact: bool,
) -> Proof:
    """Compares logits of the source, of the result read again, and of both in transformers;
    `compared` and `xxh3` are what the comparison of the tensors gave.

    The source is run as `model`, and as its own configuration says where transformers reads
    it. The models are in memory one after the other. Raises RuntimeError where they are further
    apart than rounding explains: source and result where they are `exact`ly equal, lmwright and
    transformers always.
    """
    num_params, config = count_params(model.spec()), model.hf.config(model)
    tolerance = CODES_TOLERANCE if has_ternary(model) else TOLERANCE
    proof = Proof(
        dtype=dtype,
        tensors=compared,
        accounting=_accounting(model, tensors, xxh3),
        changed=differences(source.model, model) if source else {},
        outputs=_outputs(model),
    )
    adapter = source.adapter if source is not None else None
    if why := too_large(num_params):
        return replace(proof, transformers=why, why_no_logits=why, peft=why if adapter else None)
    tokens = proof_tokens(model, tokenizer)
    expected = finite(logits(model, load_source(), tokens))
    again = logits(*load_result(), tokens)
    first = agreement(expected, again)
    if exact:
        _insist(first, "the result read again", tolerance)
    there, version = _against(
        transformers_says(result, tokens, num_params, config), again, tolerance
    )
    proof = replace(proof, tokens=int(tokens.size), source_to_folder=first)
    proof = replace(proof, folder_to_transformers=there, transformers=version)
    if adapter is not None:
        reference = Reference(None, NO_BASE)
        if source.path is not None:
            reference = transformers_says(source.path, tokens, num_params, config, adapter)
        merged, peft = _against(reference, expected, tolerance, "PEFT")
        return replace(proof, merged_to_peft=merged, peft=peft)
    if source is None or there is None:
        return proof
    # what the source means is decided by its own config, read by somebody else
    config = source.model.hf.config(source.model)
    reference = transformers_says(source.path, tokens, num_params, config)
    if source.model != model:
        expected = logits(source.model, source.load(), tokens)
    return replace(proof, source_to_transformers=_against(reference, expected, tolerance)[0])


NOT_FINITE = (
    "the model gives {} that are not finite: the training diverged, or the source is damaged; take "
    "an earlier checkpoint, or download it again"
)


def finite(found: np.ndarray, what: str = "logits") -> np.ndarray:
    """Results of a model, unchanged. Raises UserError where some are not finite."""
    if np.isfinite(found).all():
        return found
    raise UserError(NOT_FINITE.format(what))


def _against(
    reference: Reference, ours: np.ndarray, tolerance: float, who: str = "transformers"
) -> tuple[Agreement | None, str]:
    if reference.logits is None:
        return None, reference.version
    distance = agreement(ours, reference.logits[..., : ours.shape[-1]])
    _insist(distance, f"{who} {reference.version}", tolerance)
    return distance, reference.version


def _outputs(model: HfModel) -> str:
    return model.outputs if isinstance(model, OverEncoder) else "logits"


def _insist(distance: Agreement, other: str, tolerance: float) -> None:
    if not distance.max_abs_diff <= tolerance * max(distance.max_abs_logit, 1.0):
        raise RuntimeError(
            f"the result was refused: {other} gives logits that differ by "
            f"{distance.max_abs_diff:.3g}"
        )


# ends of fields that change no result, or only training
OF_TRAINING = ("_std", "_cut", "_loss", "bias_rate", "chunk_tokens")
ALIKE = ({"glm4-moe-lite", "deepseek-v3"},)  # families of the same layers, one in GGUF


def differences(a: Any, b: Any) -> dict[str, tuple[Any, Any]]:
    """Fields in which two models differ: in the first and in the second."""
    x, y = asdict(a), asdict(b)
    return {n: (x.get(n), y.get(n)) for n in {**x, **y} if x.get(n) != y.get(n)}


def proof_tokens(model: HfModel, tokenizer: Any) -> np.ndarray:
    """int32 [B, T]: the fixed prompts, repeated to one length; fixed ids without a tokenizer."""
    length = min(PROMPT_TOKENS, model.seq_len)
    if tokenizer is None:
        rng = np.random.Generator(np.random.Philox(0))
        return rng.integers(0, model.vocab_size, (len(PROMPTS), length), dtype=np.int32)
    rows = [np.resize(np.asarray(tokenizer.encode(text), np.int32), length) for text in PROMPTS]
    return np.stack(rows)


def logits(model: HfModel, w: Tree, tokens: np.ndarray) -> np.ndarray:
    """float32 [B, T, V] of whole rows, of a classifier [B, 1, K], with full precision matmuls."""
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
def _forward(model: HfModel, w: Tree, batch: Batch) -> jax.Array:
    if isinstance(model, OverEncoder):
        return model.compared(w, batch, Compute())
    return model.logits(w, model.hidden(w, batch, Compute())[0])


def agreement(a: np.ndarray, b: np.ndarray) -> Agreement:
    """Distance of two float arrays [B, T, V]."""
    p, q = (_log_softmax(x.astype(np.float64)) for x in (a, b))
    return Agreement(
        max_abs_diff=float(np.abs(a - b).max()),
        max_abs_logit=float(np.abs(a).max()),
        kl=max(float((np.exp(p) * (p - q)).sum(-1).mean()), 0.0),
        greedy_agreement=float((a.argmax(-1) == b.argmax(-1)).mean()),
    )


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
