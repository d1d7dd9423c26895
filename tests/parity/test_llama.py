"""The llama family equals transformers: logits and gradients, all features, dims pairwise
different, theta and eps off their defaults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import map_params
from lmwright.formats.hf_stream import from_hf
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from tests.in_memory import to_hf
from tests.parity.compare import hidden_states

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")


BASE = dict(
    vocab_size=97, embed_dim=48, mlp_dim=80, num_layers=3, num_heads=6, num_kv_heads=2,
    head_dim=10, seq_len=64, rope_theta=5003.0, norm_eps=3e-4, embed_std=0.3,
)  # fmt: skip
CASES = {
    "llama": {},
    "llama-untied": {"head": "untied"},
    "llama-mha-bias": {"num_kv_heads": 6, "bias": "attention"},
    "llama-mqa-all-bias": {"num_kv_heads": 1, "bias": "all", "head": "untied"},
    "geglu": {"mlp": "geglu"},
    "reglu": {"mlp": "reglu"},
    "qwen2": {"bias": "qkv"},
    "qwen3": {"qk_norm": "head", "head": "untied"},
    "qwen3-bias": {"qk_norm": "head", "bias": "attention"},
    "arcee-relu2": {"mlp": "relu2", "bias": "all"},
    "arcee-relu": {"mlp": "relu"},
}
WITH_GRADIENTS = ("llama", "llama-mqa-all-bias", "qwen2", "qwen3-bias", "arcee-relu2")


def random_weights(model, seed=0):
    """Weights in which no norm is one and no bias is zero, of the usual sizes."""
    rng = np.random.default_rng(seed)

    def one(param):
        std = param.std or (param.matrix_shape[0] ** -0.5 if param.is_matrix else 0.1)
        return (std * rng.standard_normal(param.shape) + (param.fill or 0)).astype("f4")

    return map_params(one, model.spec())


def make_batch(tokens):
    b, t = tokens.shape
    return Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        segment_ids=jnp.ones((b, t), jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t)),
        loss_weight=jnp.ones((b, t), jnp.float32),
    )


def reference(model, w):
    """The transformers model with the same weights, loaded from lmwright's export."""
    config = model.hf.config(model)
    cls = getattr(transformers, config["architectures"][0])
    theirs = cls(cls.config_class(**{k: v for k, v in config.items() if k != "architectures"}))
    tensors = {k: torch.tensor(np.asarray(v)) for k, v in to_hf(model, w).items()}
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if model.head == "tied" else set())
    theirs.tie_weights()
    return theirs.eval()


def setup(case):
    model = Llama(**(BASE | CASES[case]))
    w = random_weights(model)
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, (2, 17))
    return model, w, reference(model, w), tokens, make_batch(tokens)


@pytest.mark.parametrize("case", WITH_GRADIENTS)
def test_logits_loss_and_gradients_equal_transformers(case):
    model, w, theirs, tokens, batch = setup(case)
    out = theirs(input_ids=torch.tensor(tokens), labels=torch.tensor(tokens))
    out.loss.backward()
    compute = Compute(loss_chunk_tokens=5)

    def loss(w):
        with hidden_states(model) as found:
            result = Clm().loss(model, w, batch, jax.random.key(0), compute)
        return result.total / result.weight, model.logits(w, *found)

    (value, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(w)
    np.testing.assert_allclose(logits, out.logits.detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(value, out.loss.item(), rtol=1e-5)
    ours = to_hf(model, grads)
    for name, parameter in theirs.named_parameters():
        grad = parameter.grad.numpy()
        scale = np.abs(grad).max()
        np.testing.assert_allclose(ours[name], grad, rtol=1e-4, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("case", sorted(CASES.keys() - set(WITH_GRADIENTS)))
def test_logits_equal_transformers(case):
    model, w, theirs, tokens, batch = setup(case)
    with torch.no_grad():
        out = theirs(input_ids=torch.tensor(tokens))
    ours = jax.jit(lambda w: model.logits(w, model.hidden(w, batch, Compute())[0]))(w)
    np.testing.assert_allclose(ours, out.logits.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_config_and_weights_come_back(case):
    model = Llama(**(BASE | CASES[case]))
    w = random_weights(model)
    fields = model.hf.fields(model.hf.config(model), "config.json")
    assert Llama(**fields, embed_std=model.embed_std) == model
    back = from_hf(model, to_hf(model, w))
    jax.tree.map(np.testing.assert_array_equal, back, w)
