"""A Granite 4 without Mamba-2 in GGUF: a Granite 3, of which llama.cpp computes the same."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("gguf")

from lmwright.core.param import map_params
from lmwright.errors import UserError
from lmwright.formats import proof
from lmwright.formats.gguf_write import write_gguf
from lmwright.formats.hf_layout import HfTensors
from lmwright.formats.hf_read import model_from_config
from lmwright.formats.load import load_model
from lmwright.formats.proof import agreement, logits
from lmwright.formats.reference import Reference
from tests.formats import llama_cpp
from tests.formats.gguf_rows import BAMBA, MAMBA, SIZES

PLAIN = SIZES | MAMBA | {
    "architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["attention"] * 4,
    "num_local_experts": 0, "position_embedding_type": "rope",
}  # fmt: skip
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64}


def write(config, out, monkeypatch, **fields):
    """(model, random weights) of a config.json and other fields, which the file holds."""
    monkeypatch.setattr(proof, "transformers_says", lambda *_: Reference(None, "not asked"))
    model, rng = model_from_config(config, "config.json"), np.random.default_rng(0)
    model = replace(model, **fields)
    w = map_params(lambda p: jnp.asarray(rng.standard_normal(p.shape) * 0.3, "f4"), model.spec())
    write_gguf(model, HfTensors(model, w), lambda: w, None, out, dtype="fp32")
    return model, w


def test_llama_cpp_computes_the_same(tmp_path, monkeypatch):
    out = tmp_path / "m.gguf"
    model, w = write(PLAIN, out, monkeypatch)
    ids = proof.proof_tokens(model, None)
    mine, back = logits(model, w, ids)[:1], load_model(out)
    assert back.model.kind == "granite"
    assert agreement(mine, logits(back.model, back.weights, ids)[:1]).max_abs_diff < 1e-6
    llama_cpp.needed()
    found = agreement(mine, llama_cpp.logits(out, ids[0])[None])
    assert found.max_abs_diff / found.max_abs_logit < 1e-5


def test_what_means_the_same_is_written(tmp_path, monkeypatch):
    """A pattern of all layers, the usual factor of scores, and chunks, of which files say none."""
    config = PLAIN | {"layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "nope"}
    whole = {"mixer_pattern": ("mamba", "full") * 2, "attention_multiplier": None}
    model, _ = write(config, tmp_path / "m.gguf", monkeypatch, chunk_tokens=64, **whole)
    back = load_model(tmp_path / "m.gguf").model
    assert (back.kinds, back.score_scale) == (model.kinds, model.score_scale)


@pytest.mark.parametrize("change", [{"position_embedding_type": None}, EXPERTS])
def test_one_that_no_granite_3_is_is_refused(change, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"llama\.cpp computes a 'granite4.*only where"):
        write(PLAIN | change, tmp_path / "m.gguf", monkeypatch)
    assert not [*tmp_path.iterdir()]


def test_one_without_attention_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"has attention in some layers, and here is none"):
        write(PLAIN | {"layer_types": ["mamba"] * 4}, tmp_path / "m.gguf", monkeypatch)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("layers", [[], [0, 1, 2, 3]])
def test_a_bamba_of_one_sort_of_layers_is_refused(layers, tmp_path, monkeypatch):
    config = SIZES | BAMBA | {"architectures": ["BambaForCausalLM"], "attn_layer_indices": layers}
    with pytest.raises(UserError, match=rf"here {len(layers)} of 4 have attention"):
        write(config, tmp_path / "m.gguf", monkeypatch)
    assert not [*tmp_path.iterdir()]
