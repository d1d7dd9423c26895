"""How our models are compared with those of transformers."""

import re
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.evals.generate import Sampling, generate
from lmwright.formats.inputs_first import inputs_first
from lmwright.formats.recut_tensors import RecutTensors
from lmwright.objectives.clm import Clm
from tests.in_memory import to_hf

torch = pytest.importorskip("torch", reason="torch is the reference")

TOLERANCE = 1e-5  # of the largest value
PROMPTS = [list(range(40, 63)), [5, 9, 2, 77], [*range(20, 33)]]
NEW_TOKENS = 64
UNROTATED_KEYS = "attention.self.key.bias", *(f"decoder.layers.{i}.self_attn.k_proj.bias"
                                              for i in range(5))  # fmt: skip
"""Biases of keys in BERT and OPT."""


def make_batch(tokens, real=None):
    """A batch [B, T] of these tokens; what is not `real` is padding, of no weight."""
    real = np.ones(tokens.shape, bool) if real is None else real
    place = np.cumsum(real, 1)
    return Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        segment_ids=jnp.asarray(real, jnp.int32),
        positions=jnp.asarray(np.maximum(place - 1, 0), jnp.int32),
        loss_weight=jnp.asarray(real & (place > 1), jnp.float32),
    )


def randomize(theirs):
    """Random weights; those of norms and biases are off their usual values."""
    with torch.no_grad():
        for path, parameter in theirs.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1:
                parameter += 0.1 * noise
            else:
                std = 0.3 if "embed" in path else parameter.shape[-1] ** -0.5
                parameter.copy_(std * noise)
        for path, buffer in saved_buffers(theirs).items():
            if path.endswith("layer_scalar"):
                buffer += 0.1 * torch.randn_like(buffer)


def saved_buffers(theirs):
    """Tensors of a model's files that no training of theirs changes."""
    named = dict(theirs.named_parameters())
    return {k: v for k, v in theirs.state_dict(keep_vars=True).items()
            if k not in named and v.dtype.is_floating_point and not v.requires_grad}  # fmt: skip


def in_class(model, tensors):
    """Tensors by the names of transformers' class, and in its layout, of those in files."""
    named = [(_renamed(name, model.hf.modules), a) for name, a in _joined(model, tensors).items()]
    return dict(inputs_first(named, model.hf.inputs_first))


def in_files(model, tensors):
    """Tensors by our names and layout, of those in transformers' class."""
    ours = {theirs: name for name, theirs in model.hf.modules.items()}
    named = [(_renamed(name, ours), tensor) for name, tensor in tensors.items()]
    own = dict(inputs_first(named, model.hf.inputs_first))  # which is its own inverse
    parts, renamed = model.hf.recut(model.hf.config(model), "config.json")
    return dict(RecutTensors(own, parts, renamed, "weights")) if parts else own


def _joined(model, tensors):
    """Tensors with those that transformers' class has as one."""
    named = dict(tensors)
    for whole, parts in model.hf.recut(model.hf.config(model), "config.json")[0].items():
        first = parts[0][0]
        for base in [n.removesuffix(first) for n in tensors if n.endswith(first)]:
            named[base + whole] = np.concatenate([named.pop(base + part) for part, _ in parts])
    return named


def _renamed(name, modules):
    """The name of a weight where modules have other names; `{i}` stands for a layer's number."""
    number = re.search(r"\.(\d+)\.", name)
    one = lambda module: module.replace("{i}", number[1] if number else "")  # noqa: E731
    module, _, leaf = name.rpartition(".")
    return next((f"{one(n)}.{leaf}" for m, n in modules.items() if one(m) == module), name)


def assert_near(ours, theirs, name, tolerance=TOLERANCE):
    """The largest difference, as a share of their largest value, which it returns."""
    largest = np.abs(theirs).max()
    if name.endswith(UNROTATED_KEYS):
        # they move all scores of a query alike, so that their gradient is rounding alone
        assert max(largest, np.abs(ours).max()) < 1e-5, name
        return 0.0
    distance = np.abs(np.asarray(ours, np.float64) - theirs).max()
    assert largest > 0, name
    # sums of decays cancel: theirs are as far from float64
    tolerance *= 2 if name.endswith("mamba.A_log") else 1
    assert distance <= tolerance * largest, f"{name}: {distance / largest:.2e} of the largest"
    return distance / largest


@contextmanager
def hidden_states(model):
    """Those [B, T, D] that a loss reads, so that the logits need no second pass."""
    found = []
    hidden = type(model).hidden

    def seen(*args, **options):
        states, *others = hidden(*args, **options)
        found.append(states)
        return (states, *others)

    with mock.patch.object(type(model), "hidden", seen):
        yield found


def assert_same_training(theirs, model, w, tokens, record_property, **options):
    """Logits, loss and every gradient of a causal model; `options` are for theirs."""
    theirs.zero_grad()
    ids, compute = torch.tensor(tokens), Compute(loss_chunk_tokens=5)
    out = theirs(input_ids=ids, labels=ids, **options)
    out.loss.backward()

    def loss(w):
        with hidden_states(model) as found:
            result = Clm().loss(model, w, make_batch(tokens), jax.random.key(0), compute)
        return result.total / result.weight, model.logits(w, *found)

    (value, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(w)
    near = assert_near(logits, out.logits.detach().numpy(), "logits")
    record_property("logits", float(near))
    np.testing.assert_allclose(value, out.loss.item(), rtol=TOLERANCE)
    ours, named = in_class(model, to_hf(model, grads)), dict(theirs.named_parameters())
    fixed = {path for path in ours if path in saved_buffers(theirs)}
    assert set(ours) - fixed == set(named)
    assert not any(np.any(ours[path]) for path in fixed)
    found = [assert_near(ours[path], p.grad.numpy(), path) for path, p in named.items()]
    record_property("gradients", float(max(found)))


def assert_same_text(theirs, model, w):
    """Greedy text of a left-padded batch, token for token; windows are shorter than the longest
    prompt."""
    longest = max(map(len, PROMPTS))
    assert all(window < longest for window in model.windows if window)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    out = theirs.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    no_text = SimpleNamespace(decode=lambda ids, **_: "", eos_id=None, bos_id=None)
    found = generate(model, w, no_text, PROMPTS, Sampling(NEW_TOKENS), prefix=())
    assert [list(one.tokens) for one in found] == out[:, longest:].tolist()
    assert len({one.tokens for one in found}) == len(PROMPTS)
