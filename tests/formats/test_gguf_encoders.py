"""Encoders in GGUF: all but their heads, bit for bit; llama.cpp gives their hidden states."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("gguf")

from lmwright.core.compute import Compute
from lmwright.core.param import map_params
from lmwright.data.tokens.gguf_header import gguf_package
from lmwright.errors import UserError
from lmwright.formats.gguf_archs import ARCHS
from lmwright.formats.gguf_write import write_gguf
from lmwright.formats.hf_layout import HfTensors
from lmwright.formats.hf_read import model_from_config
from lmwright.formats.load import load_model
from tests.formats import llama_cpp
from tests.parity.compare import make_batch

SIZES = {
    "vocab_size": 97, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 5,
    "num_attention_heads": 6, "max_position_embeddings": 192,
}  # fmt: skip
MODERN = {
    "norm_eps": 3e-4, "local_attention": 10, "global_rope_theta": 5003.0, "local_rope_theta": 301.0,
}  # fmt: skip
ENCODERS = {
    "EuroBertForMaskedLM": {
        "num_key_value_heads": 2, "rms_norm_eps": 3e-4, "rope_theta": 5003.0},
    "ModernBertForMaskedLM": MODERN,
    "ModernBertForMaskedLM every second": MODERN | {
        "global_attn_every_n_layers": 2, "hidden_activation": "silu", "local_attention": 9},
}  # fmt: skip
HEAD = ("lm_head", "head.", "decoder.")


def written(case, folder, dtype="fp32", **change):
    """(model, weights, path of the file)."""
    said, rng = SIZES | ENCODERS[case] | change, np.random.default_rng(0)
    model = model_from_config(said | {"architectures": [case.split()[0]]}, case)
    draw = lambda p: 0.3 * rng.standard_normal(p.shape) + (not p.is_matrix)  # noqa: E731
    w = map_params(lambda p: draw(p).astype("f4"), model.spec())
    write_gguf(model, HfTensors(model, w), lambda: w, None, folder / "m.gguf", dtype=dtype)
    return model, w, folder / "m.gguf"


@pytest.mark.parametrize("case", ENCODERS)
def test_the_file_holds_all_but_the_head(case, tmp_path):
    model, w, path = written(case, tmp_path)
    reader = gguf_package().GGUFReader(path)
    stored = sorted(tensor.data.tobytes() for tensor in reader.tensors)
    body = {n: a for n, a in HfTensors(model, w).items() if not n.startswith(HEAD)}
    assert stored == sorted(array.tobytes() for array in body.values())
    name = reader.fields["general.architecture"].contents()
    assert reader.fields[f"{name}.attention.causal"].contents() is False
    with pytest.raises(UserError, match="an encoder without its head"):
        load_model(path)


@pytest.mark.parametrize("case", ENCODERS)
def test_llama_cpp_gives_the_same_hidden_states(case, tmp_path, record_property):
    """41 ids, past the windows; products in another order make the difference."""
    llama_cpp.needed()
    model, w, path = written(case, tmp_path)
    ids = np.random.default_rng(1).integers(0, model.vocab_size, 41)
    ours = jax.jit(lambda w: model.hidden(w, make_batch(ids[None]), Compute())[0][0])(w)
    apart = np.abs(ours - llama_cpp.embeddings(path, ids)).max() / np.abs(ours).max()
    record_property("llama_cpp_hidden", float(apart))
    assert apart < 3e-5


@pytest.mark.parametrize(
    "case, change, said",
    [
        ("EuroBertForMaskedLM", {"attention_bias": True}, "attention_bias"),
        ("EuroBertForMaskedLM", {"head_dim": 32}, "head_dim"),
        ("ModernBertForMaskedLM", {"norm_bias": True}, "norm_bias"),
        ("ModernBertForMaskedLM", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope"),
        ("ModernBertForMaskedLM", {"layer_types": ["sliding_attention", "full_attention",
         "sliding_attention", "sliding_attention", "full_attention"]}, "layer_pattern"),
    ],
)  # fmt: skip
def test_what_a_file_cannot_say_is_refused(case, change, said, tmp_path):
    with pytest.raises(UserError, match=said):
        written(case, tmp_path, "q8_0", **change)
    assert list(tmp_path.iterdir()) == []


def test_the_page_names_every_architecture_that_is_read():
    page = (Path(__file__).parents[2] / "docs" / "import.md").read_text(encoding="utf-8")
    listed = re.search(r"^Architectures: (.*?)\. `llama` is", page, re.M | re.S)[1]
    assert set(re.findall(r"`([^`]+)`", listed)) == {n for n, a in ARCHS.items() if not a.encoder}
