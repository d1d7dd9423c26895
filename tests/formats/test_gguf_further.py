"""Layers that predict a further token are behind the others in a GGUF file, and are left out;
a file of the same name in the current folder is not taken for the one that was given."""

import jax
import numpy as np
import pytest

pytest.importorskip("gguf")

from lmwright.formats import proof
from lmwright.formats.convert import import_command
from lmwright.formats.gguf_write import write_gguf
from lmwright.formats.hf_layout import HfTensors
from lmwright.formats.load import load_model
from lmwright.formats.reference import Reference
from tests.formats.test_gguf import FAMILIES, rewritten, weights_of, write
from tests.formats.test_gguf_families import model_of


@pytest.mark.parametrize(
    ("case", "name"),
    [("Glm4MoeForCausalLM", "glm4moe"), ("Qwen3_5ForCausalLM", "qwen35"),
     ("NemotronHForCausalLM experts", "nemotron_h_moe")],
)  # fmt: skip
def test_they_are_left_out(case, name, tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "transformers_says", lambda *_: Reference(None, "not asked"))
    model, w = model_of(case)
    path = tmp_path / "m.gguf"
    write_gguf(model, HfTensors(model, w), lambda: w, None, path, dtype="fp32")
    path.with_name("m.gguf.convert.json").unlink()
    before = jax.tree.map(np.array, load_model(path).weights)
    count = model.num_layers

    keys = {f"{name}.block_count": count + 1, f"{name}.nextn_predict_layers": 1}
    if name.startswith("nemotron"):
        meta = model.hf.config(model)
        heads, width = meta["num_key_value_heads"], meta["moe_intermediate_size"]
        types = [*meta["layers_block_type"], "moe"]
        keys[f"{name}.attention.head_count_kv"] = [
            *(heads if kind == "full_attention" else 0 for kind in types[:-1]), heads
        ]  # fmt: skip
        keys[f"{name}.feed_forward_length"] = [width if kind == "moe" else 0 for kind in types]
    rewritten(path, arch=name, more=[f"blk.{count}.nextn.eh_proj.weight"], **keys)
    after = load_model(path)
    assert after.model == model
    jax.tree.map(np.testing.assert_array_equal, after.weights, before)


def test_transformers_reads_the_file_that_was_given(tmp_path, monkeypatch):
    """By its name alone it takes the one of the current folder."""
    for needed in ("torch", "transformers", "accelerate"):
        pytest.importorskip(needed)
    model = FAMILIES["llama tied"]
    for seed, name in enumerate(("here", "there")):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(proof, "transformers_says", lambda *_: Reference(None, "not asked"))
            write(model, weights_of(model, seed), tmp_path / name / "m.gguf")
    monkeypatch.chdir(tmp_path / "here")
    found = import_command(tmp_path / "there" / "m.gguf", tmp_path / "folder")
    assert found.source_to_transformers.kl < 1e-6
