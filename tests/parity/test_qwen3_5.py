"""Qwen3.5 beside transformers in float64, whose own gradients of decays are less exact in float32;
documents and states, and what is refused."""

import copy
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.errors import UserError
from lmwright.formats.hf_read import model_from_config
from lmwright.models import cached
from lmwright.models.counts import cache_bytes, params_report
from lmwright.objectives.clm import Clm
from tests.in_memory import to_hf
from tests.parity.compare import TOLERANCE, assert_near, make_batch
from tests.parity.test_families import TOKENS, problem

torch = pytest.importorskip("torch", reason="torch is the reference")
modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")

NAMES = ["qwen3-5", "qwen3-5-yarn"]


class InDoubles:
    """torch, for a module that computes some things in float32 whatever it is given."""

    def __getattr__(self, name):
        return torch.float64 if name == "float32" else getattr(torch, name)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, monkeypatch, record_property):
    _, theirs, model, w = problem(name)
    model, theirs = replace(model, chunk_tokens=16), copy.deepcopy(theirs).double()
    monkeypatch.setattr(modeling, "torch", InDoubles())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    ids = torch.tensor(TOKENS)
    theirs(input_ids=ids, labels=ids).loss.backward()

    def loss(w):
        compute = Compute(loss_chunk_tokens=5)
        result = Clm().loss(model, w, make_batch(TOKENS), jax.random.key(0), compute)
        return result.total / result.weight

    ours = to_hf(model, jax.jit(jax.grad(loss))(w))
    wanted = {path: p.grad.numpy() for path, p in theirs.named_parameters()}
    assert ours.keys() == wanted.keys()
    off = {path: np.abs(ours[path] - g).max() / np.abs(g).max() for path, g in wanted.items()}
    record_property("gradients", float(max(off.values())))
    assert max(off.values()) < TOLERANCE, off


def hidden(model, w, tokens, ids):
    """The residual stream of rows with these segments."""
    places = np.zeros_like(ids)
    for row, document in np.ndindex(len(ids), int(ids.max()) + 1):
        mine = ids[row] == document
        places[row, mine] = np.arange(mine.sum())
    batch = Batch(jnp.asarray(tokens), jnp.asarray(ids), jnp.asarray(places), jnp.ones(ids.shape))
    return np.asarray(hidden_of(model)(w, batch))


@cache
def hidden_of(model):
    """A function of weights and a batch: rows of one length are one program."""
    return jax.jit(lambda w, batch: model.hidden(w, batch, Compute())[0])


def test_packed_documents_are_apart():
    _, _, model, w = problem("qwen3-5")
    ids = np.ones_like(TOKENS)
    ids[0, 11:], ids[1, 11:], ids[1, 22:] = 2, 2, 0  # of two lengths: each is a program
    packed = hidden(replace(model, chunk_tokens=4), w, TOKENS, ids)
    for row, document in [(0, 1), (0, 2), (1, 1), (1, 2)]:
        mine = ids[row] == document
        alone = hidden(model, w, TOKENS[row : row + 1, mine], np.ones((1, mine.sum()), int))
        assert_near(packed[row, mine], alone[0], f"{row}, {document}")


def test_a_state_goes_on():
    """Tokens in three pieces, one of them a single token, as in one."""
    _, _, model, w = problem("qwen3-5")
    model, compute = replace(model, chunk_tokens=4), Compute()
    memory, parts = cached.new_cache(model, len(TOKENS), 32, compute), []
    extend = jax.jit(lambda w, t, kept: cached.extend(model, w, t, t >= 0, kept, compute))
    for start, end in [(0, 13), (13, 14), (14, 29)]:
        h, memory = extend(w, jnp.asarray(TOKENS[:, start:end]), memory)
        parts.append(h)
    whole = hidden(model, w, TOKENS, np.ones_like(TOKENS))
    assert_near(np.concatenate(parts, 1), whole, "pieces")


def test_sizes_of_the_state():
    model = problem("qwen3-5")[2]  # one of its two layers has keys and values
    constant = 4 * 6 * 9 * 9 + 2 * 3 * 12 * 9  # memories, and tokens of convolutions
    assert cache_bytes(model, 0) == constant
    assert cache_bytes(model, 100) == constant + 100 * 2 * 2 * 2 * 10
    assert f"80 bytes for a token and {constant:,} for a row" in params_report("x", model)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"linear_value_head_dim": 7}, "linear_value_head_dim = 7 differ, which is not supported"),
        ({"linear_num_value_heads": 8}, "8 is not a multiple of model.linear_num_key_heads = 3"),
        ({"layer_types": ["full_attention"]}, "layer_types does not name the type of 2 layers"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "holds 'sliding_attention'; supported are linear_attention, full_attention",
        ),
        ({"attention_bias": True}, "attention_bias = True is not supported; it is False"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; it is 'silu'"),
    ],
)
def test_what_is_not_computed_is_refused(said, message):
    row = problem("qwen3-5")[0]
    config = row.said | {"architectures": [row.architecture]} | said
    with pytest.raises(UserError, match=message):
        model_from_config(config, "config.json")


def test_rotations_for_images_are_those_of_text():
    """A text has the same position in all three of their parts."""
    row, _, model, _ = problem("qwen3-5-yarn")
    rope = row.said["rope_parameters"] | {"mrope_section": [1, 1, 1], "mrope_interleaved": True}
    config = row.said | {"architectures": [row.architecture], "rope_parameters": rope}
    assert model_from_config(config, "config.json") == model
