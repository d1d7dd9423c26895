"""Falcon-H1 in GGUF, whose multipliers are in the weights there: the same logits here and in
llama.cpp, and `lmwright verify` calls file and source the same."""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("gguf")

from lmwright.core.param import map_params
from lmwright.errors import UserError
from lmwright.formats import proof
from lmwright.formats.gguf_names import config_of
from lmwright.formats.gguf_read import refuse_blocks
from lmwright.formats.gguf_write import write_gguf
from lmwright.formats.hf_layout import HfTensors
from lmwright.formats.hf_read import model_from_config
from lmwright.formats.load import load_model
from lmwright.formats.proof import agreement, logits
from lmwright.formats.reference import Reference
from lmwright.formats.verify import verify
from tests.formats import llama_cpp
from tests.formats.gguf_rows import LLAMA3, SIZES
from tests.in_memory import export_hf

FALCON = SIZES | {
    "architectures": ["FalconH1ForCausalLM"], "mamba_n_heads": 6, "mamba_d_ssm": 192,
    "mamba_d_state": 32, "mamba_d_conv": 4, "mamba_n_groups": 2, "mamba_rms_norm": True,
    "mamba_norm_before_gate": False, "embedding_multiplier": 3.7, "lm_head_multiplier": 0.43,
    "key_multiplier": 0.61, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8, "mlp_multipliers": [0.9, 0.55],
    "ssm_multipliers": [0.7, 0.6, 0.8, 1.1, 0.4],
    "num_hidden_layers": 3, "rms_norm_eps": 0.01,  # rounding grows in memories and small norms
}  # fmt: skip
CASES = {
    "released": {},
    "no norm of memories": {"mamba_rms_norm": False, "mamba_n_groups": 1},
    "tied": {"tie_word_embeddings": True},
    "tied, of one multiplier": {"tie_word_embeddings": True, "lm_head_multiplier": 3.7},
    "scaled": {"rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48,
        "rope_theta": 5003.0}},
}  # fmt: skip


def made(change):
    """(model, random weights) of a config.json."""
    model, rng = model_from_config(FALCON | change, "config.json"), np.random.default_rng(0)
    draw = lambda p: jnp.asarray(rng.standard_normal(p.shape) * 0.15 + (p.fill or 0), "f4")  # noqa: E731
    return model, map_params(draw, model.spec())


def write(model, w, out, dtype="fp32"):
    return write_gguf(model, HfTensors(model, w), lambda: w, None, out, dtype=dtype)


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch):
    monkeypatch.setattr(proof, "transformers_says", lambda *_: Reference(None, "not asked"))


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_same(case, tmp_path, record_property):
    model, w = made(CASES[case])
    out = tmp_path / "m.gguf"
    found = write(model, w, out).source_to_folder
    assert found.max_abs_diff < 1e-5 * found.max_abs_logit  # of the model with its multipliers
    back = load_model(out).model
    assert (back.ssm_multipliers, back.lm_head_multiplier) == ((1.0,) * 5, 1.0)
    assert back.head == ("tied" if "one" in case else "untied")
    export_hf(model, w, None, tmp_path / "folder")
    verdict = verify(tmp_path / "folder", out)
    assert verdict.same and verdict.tensors.only_a == verdict.tensors.only_b == (), verdict

    llama_cpp.needed()
    ids = proof.proof_tokens(model, None)
    found = agreement(logits(model, w, ids)[:1], llama_cpp.logits(out, ids[0])[None])
    record_property("llama_cpp_logits", found.max_abs_diff / found.max_abs_logit)
    assert found.max_abs_diff / found.max_abs_logit < 1e-5


def test_eight_bits_are_of_the_weights_with_their_multipliers(tmp_path):
    model, w = made({})
    write(model, w, tmp_path / "m.gguf", "q8_0")
    assert verify(tmp_path / "m.gguf", tmp_path / "m.gguf").same


def test_without_multipliers_the_weights_stay(tmp_path):
    ones = {k: [1.0] * len(v) if isinstance(v, list) else 1.0
            for k, v in FALCON.items() if "multiplier" in k}  # fmt: skip
    model, w = made(ones)
    write(model, w, tmp_path / "m.gguf")
    back = load_model(tmp_path / "m.gguf")
    assert back.model == model
    np.testing.assert_array_equal(back.weights["layers"]["mamba_in"], w["layers"]["mamba_in"])


@pytest.mark.parametrize(
    "change, why",
    [
        ({"mamba_norm_before_gate": True}, "mamba_norm_before_gate = True"),
        ({"attention_bias": True}, "falcon-h1 has no biases"),
        ({"rope_parameters": LLAMA3}, "falcon-h1 does not compute"),
    ],
)
def test_what_a_file_cannot_say_is_refused(change, why, tmp_path):
    with pytest.raises(UserError, match=why):
        write(*made(change), tmp_path / "m.gguf")
    assert not [*tmp_path.iterdir()]


def test_weights_of_a_grid_are_refused(tmp_path):
    """Those of a grid of four bits with their multipliers are on none."""
    model, w = made({})
    with pytest.raises(UserError, match="whose multipliers GGUF has in the weights"):
        refuse_blocks(model, "qat.weights")
    with pytest.raises(UserError, match="whose multipliers GGUF has in the weights"):
        write(model, w, tmp_path / "m.gguf", "q4_0")
    tensors = HfTensors(model, w)
    tensors.grid = "int4"
    with pytest.raises(UserError, match="q8_0 would round weights again"):
        write_gguf(model, tensors, lambda: w, None, tmp_path / "m.gguf", dtype="q8_0")


def test_a_file_of_llama_cpps_converter_says_its_norm_by_its_tensors():
    meta = {"general.architecture": "falcon-h1", "falcon-h1.block_count": 1}
    for shapes, norm in (({}, False), ({"blk.0.ssm_norm.weight": (1, 8)}, True)):
        assert config_of(meta, shapes, "here")["mamba_rms_norm"] is norm
