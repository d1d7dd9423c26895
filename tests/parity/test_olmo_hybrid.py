"""OLMo Hybrid beside transformers in float64, whose gradients of decays are less exact in float32;
files in other forms than the released ones, and what is refused."""

import copy
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.errors import UserError
from lmwright.formats.hf_read import import_hf, model_from_config
from lmwright.models import cached
from lmwright.models.counts import cache_bytes
from lmwright.objectives.clm import Clm
from tests.in_memory import export_hf, to_hf
from tests.parity.compare import TOLERANCE, assert_near, in_class, make_batch
from tests.parity.test_families import TOKENS, logits_of, problem
from tests.parity.test_qwen3_5 import InDoubles, hidden

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.olmo_hybrid.modeling_olmo_hybrid")


@pytest.mark.parametrize("name", ["olmo-hybrid", "olmo-hybrid-rope"])
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

    ours = in_class(model, to_hf(model, jax.jit(jax.grad(loss))(w)))
    wanted = {path: p.grad.numpy() for path, p in theirs.named_parameters()}
    assert ours.keys() == wanted.keys()
    off = {path: np.abs(ours[path] - g).max() / np.abs(g).max() for path, g in wanted.items()}
    record_property("gradients", float(max(off.values())))
    assert max(off.values()) < TOLERANCE, off


def test_a_state_goes_on():
    """Tokens in three pieces, one of them a single token, as in one."""
    _, _, model, w = problem("olmo-hybrid")
    model, compute = replace(model, chunk_tokens=4), Compute()
    memory, parts = cached.new_cache(model, len(TOKENS), 32, compute), []
    extend = jax.jit(lambda w, t, kept: cached.extend(model, w, t, t >= 0, kept, compute))
    for start, end in [(0, 13), (13, 14), (14, 29)]:
        h, memory = extend(w, jnp.asarray(TOKENS[:, start:end]), memory)
        parts.append(h)
    whole = hidden(model, w, TOKENS, np.ones_like(TOKENS))
    assert_near(np.concatenate(parts, 1), whole, "pieces")


def test_sizes_of_the_state():
    model = problem("olmo-hybrid")[2]  # one of its two layers has keys and values
    constant = 4 * 6 * 9 * 14 + 2 * 3 * (6 * 9 + 6 * 14)  # memories, and tokens of convolutions
    assert cache_bytes(model, 0) == constant
    assert cache_bytes(model, 100) == constant + 100 * 2 * 2 * 2 * 10


def test_transformers_files_are_read_and_ours_by_transformers(tmp_path):
    """It writes three filters of one size, and other names of norms."""
    _, theirs, model, w = problem("olmo-hybrid")
    theirs.save_pretrained(tmp_path / "theirs")
    found, again, _ = import_hf(tmp_path / "theirs")
    assert found == model
    for a, b in zip(jax.tree.leaves(w), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    export_hf(model, w, None, tmp_path / "ours")
    names = json.loads((tmp_path / "ours/config.json").read_text())
    assert names["rope_parameters"] == {"rope_theta": None}
    cls = transformers.OlmoHybridForCausalLM
    there = cls.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = there(input_ids=torch.tensor(TOKENS)).logits.numpy()
    assert_near(logits_of(model, w, TOKENS), logits, "logits")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"linear_num_value_heads": 8}, "8 is not a multiple of model.linear_num_key_heads = 3"),
        ({"layer_types": ["full_attention"]}, "layer_types does not name the type of 2 layers"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; it is 'silu'"),
    ],
)
def test_what_is_not_computed_is_refused(said, message):
    row = problem("olmo-hybrid")[0]
    config = row.said | {"architectures": [row.architecture]} | said
    with pytest.raises(UserError, match=message):
        model_from_config(config, "config.json")


@pytest.mark.parametrize("kind, other", [("linear", "full"), ("full", "linear")])
def test_one_kind_of_layers_is_not_written(kind, other):
    model = replace(problem("olmo-hybrid")[2], mixer_pattern=(kind,))
    with pytest.raises(UserError, match=f"has no {other} layer"):
        model.hf.config(model)


def test_rotations_have_no_effect_where_there_are_none():
    model = problem("olmo-hybrid")[2]
    with pytest.raises(UserError, match=r'rope_theta: has no effect.*model.rotation = "rope"'):
        replace(model, rope_theta=5000.0)
