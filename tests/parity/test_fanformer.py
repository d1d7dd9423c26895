"""FANformer equals a llama of transformers with the paper's layer put into it, and a plain block
where nothing is periodic."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright import presets
from lmwright.core.compute import Compute
from lmwright.core.param import count_params, init_weights, walk
from lmwright.errors import UserError
from lmwright.formats.gguf_names import gguf_arch_of
from lmwright.formats.hf_read import import_hf
from lmwright.formats.open import find_model
from lmwright.models.fanformer import Fanformer
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from tests.in_memory import export_hf, to_hf
from tests.parity.compare import assert_near, make_batch

SIZES = {
    "vocab_size": 61, "embed_dim": 24, "mlp_dim": 40, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 10, "seq_len": 32, "norm_eps": 3e-4, "rope_theta": 5003.0,
}  # fmt: skip
MODEL = Fanformer(**SIZES, periodic_fraction=0.125, head="untied")
PLAIN = Llama(**SIZES, head="untied")
TOKENS = np.random.default_rng(1).integers(3, 61, (2, 19))
FAN = ("fan", "fan_bias")


def loss_and_gradients(model, w):
    def loss(w):
        found = Clm().loss(model, w, make_batch(TOKENS), jax.random.key(0), Compute())
        return found.total / found.weight

    return jax.jit(jax.value_and_grad(loss))(w)


def logits_of(model, w):
    batch = make_batch(TOKENS)
    return jax.jit(lambda w: model.logits(w, model.hidden(w, batch, Compute())[0]))(w)


def without_fan(w):
    layers = {name: leaf for name, leaf in w["layers"].items() if name not in FAN}
    return {**w, "layers": layers}


def stirred(model):
    rng = np.random.default_rng(0)
    w = init_weights(model.spec(), jax.random.key(0))
    return jax.tree.map(lambda a: a + 0.1 * rng.standard_normal(a.shape).astype("f4"), w)


def test_it_equals_a_llama_with_the_papers_layer():
    torch = pytest.importorskip("torch", reason="torch is the reference")
    transformers = pytest.importorskip("transformers")
    w = stirred(MODEL)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**PLAIN.hf.config(PLAIN)))
    named = {name: torch.tensor(a) for name, a in to_hf(PLAIN, without_fan(w)).items()}
    theirs.load_state_dict(named)

    class Fan(torch.nn.Module):
        def __init__(self, matrix, bias):
            super().__init__()
            self.matrix = torch.nn.Parameter(torch.tensor(np.array(matrix)))
            self.bias = torch.nn.Parameter(torch.tensor(np.array(bias)))

        def forward(self, x):
            p, g = torch.split(x @ self.matrix + self.bias, [3, 18], dim=-1)
            return torch.cat([torch.cos(p), torch.sin(p), g], dim=-1)

    fans = [Fan(*(w["layers"][name][i] for name in FAN)) for i in range(2)]
    for layer, fan in zip(theirs.model.layers, fans, strict=True):
        layer.input_layernorm = torch.nn.Sequential(layer.input_layernorm, fan)
    out = theirs(input_ids=torch.tensor(TOKENS), labels=torch.tensor(TOKENS))
    out.loss.backward()
    value, grads = loss_and_gradients(MODEL, w)
    np.testing.assert_allclose(value, out.loss.item(), rtol=1e-5)
    ours = to_hf(PLAIN, without_fan(grads))
    for name, parameter in theirs.named_parameters():
        name = name.replace("input_layernorm.0.", "input_layernorm.")
        if name in ours:
            assert_near(ours[name], parameter.grad.numpy(), name)
    for i, fan in enumerate(fans):
        assert_near(grads["layers"]["fan"][i], fan.matrix.grad.numpy(), "fan")
        assert_near(grads["layers"]["fan_bias"][i], fan.bias.grad.numpy(), "fan_bias")


def test_without_waves_it_is_the_plain_block():
    none = replace(MODEL, periodic_fraction=0.0)
    w = stirred(none)
    w["layers"]["fan"] = jnp.broadcast_to(jnp.eye(24), (2, 24, 24))
    w["layers"]["fan_bias"] = jnp.zeros((2, 24))
    np.testing.assert_array_equal(logits_of(none, w), logits_of(PLAIN, without_fan(w)))


def test_the_released_size():
    model = presets.of_section("model")["fanformer-1b"]()
    count = count_params(model.spec())
    fan = sum(p.size for path, p in walk(model.spec()) if path.endswith(FAN))
    assert (round(count / 1e6, 1), round(fan / 1e6, 1)) == (1235.6, 58.7)
    assert round((count - model.vocab_size * model.embed_dim) / 1e9, 4) == 1.1326


def test_its_folder_is_read_here_alone_and_there_is_no_gguf(tmp_path):
    w = stirred(MODEL)
    proof = export_hf(MODEL, w, None, tmp_path / "out")
    assert "cannot load" in proof.transformers
    model, again, _ = import_hf(tmp_path / "out")
    assert model == MODEL
    for (path, a), (_, b) in zip(walk(w), walk(again), strict=True):
        np.testing.assert_array_equal(a, b, path)
    with pytest.raises(UserError, match=r"FanformerForCausalLM: has no GGUF form here"):
        gguf_arch_of(MODEL.hf.config(MODEL))


def test_its_fraction_gives_whole_numbers():
    with pytest.raises(UserError, match=r"0.3 of model.embed_dim = 2048 are 614.4 angles; use"):
        find_model("fanformer-1b", ["periodic_fraction=0.3"])
