"""Experts that were trained rounded: every form of export holds their values to the bit, also as
other packages read them, and routers stay floats."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from lmwright.core.param import init_weights, walk
from lmwright.errors import UserError
from lmwright.formats.compressed import (
    PackedIntegers,
    bits_of,
    left_as_floats,
    pack_integers,
    refuse_grid,
    scheme,
    unpack_integers,
)
from lmwright.formats.fused_tensors import FusedTensors
from lmwright.formats.gguf_write import write_gguf
from lmwright.formats.hf_layout import HfTensors
from lmwright.formats.hf_write import write_hf
from lmwright.formats.load import load_model
from lmwright.formats.proof import logits
from lmwright.formats.safetensors import TensorFiles
from lmwright.formats.text_tensors import TextTensors
from lmwright.models.experts import Experts
from lmwright.models.modernbert import ModernBert
from lmwright.models.moe import Dots1, Mixtral, Olmoe, Qwen3Moe
from lmwright.models.text_part import TextPart
from lmwright.program.qat_section import Qat
from lmwright.program.trainee import training_of
from tests.formats import llama_cpp
from tests.formats.unpacked import IDS, is_read_by_others
from tests.sharded.problem import make_run

SIZES = {
    "vocab_size": 97, "embed_dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "seq_len": 32,
}  # fmt: skip
EXPERTS = Experts(num_experts=5, experts_per_token=2, mlp_dim=32)
MODELS = {
    "mixtral": Mixtral(**SIZES, experts=EXPERTS),
    "qwen3-moe": Qwen3Moe(**SIZES, mlp_dim=95, dense_layers=(0,), experts=EXPERTS),
    "olmoe": Olmoe(
        **{**SIZES, "num_kv_heads": 4}, experts=replace(EXPERTS, shares="all"), head="untied"
    ),
    "dots1": Dots1(
        **SIZES, mlp_dim=96, dense_layers=(0,),
        experts=replace(EXPERTS, num_experts=6, score="sigmoid", shared_dim=64, bias_rate=0.001),
    ),
}  # fmt: skip


def trained(kind, weights, group=None):
    """(model, values that it computes with, its tensors) in a run with [qat]."""
    model = MODELS[kind]
    run = replace(make_run(), model=model, qat=Qat(weights=weights, group_size=group))
    training, latent = training_of(run), init_weights(model.spec(), jax.random.key(0))
    (trainee,) = training.trainees
    values = jax.tree.map(np.asarray, training.merged(trainee, {}, latent))
    codes = jax.tree.map(np.asarray, training.codes(trainee, {}, latent))
    return model, values, HfTensors(model, values, codes, weights)


@pytest.mark.parametrize(
    "kind, weights, group",
    [
        ("qwen3-moe", "int8", None),  # a row of 95 does not fill its last word
        ("olmoe", "int4", 32),  # a whole row of an expert's `down` is one group
        pytest.param("mixtral", "int4", 16, marks=pytest.mark.slow),
        pytest.param("dots1", "int4", 16, marks=pytest.mark.slow),
    ],
)
def test_folders_hold_the_values(kind, weights, group, tmp_path):
    """Packed and as floats; every matrix of an expert has integers, no router has."""
    model, w, tensors = trained(kind, weights, group)
    packed, floats = tmp_path / "packed", tmp_path / "floats"
    for folder, dtype in ((packed, weights), (floats, "fp32")):
        write_hf(model, tensors, lambda: w, None, folder, dtype=dtype)
        back = load_model(folder)
        assert back.model == model
        jax.tree.map(np.testing.assert_array_equal, back.weights, w)
    said = json.loads((packed / "config.json").read_text())["quantization_config"]
    files, plain = TensorFiles(packed), set(TensorFiles(floats))
    routers = {name.removesuffix(".weight") for name in plain if name.endswith(".gate.weight")}
    assert routers and set(said["ignore"]) == {"lm_head", *routers}
    matrices = {name for name in plain if "proj" in name or ".experts." in name}
    assert sum(".experts." in name for name in matrices) >= 15
    assert {f"{name}_packed" for name in matrices} == {n for n in files if n.endswith("packed")}
    is_read_by_others(packed, model, w, tensors)


def test_linear_layers_around_those_of_an_encoder_are_said_to_be_floats():
    transformers = pytest.importorskip("transformers", reason="knows its own layers")
    model = ModernBert(**SIZES | {"num_kv_heads": 4}, mlp_dim=96)
    theirs = transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            cls_token_id=1, sep_token_id=2,
        )
    )  # fmt: skip
    linear = {name for name, m in theirs.named_modules() if type(m).__name__ == "Linear"}
    assert set(left_as_floats(model)) == {name for name in linear if ".layers." not in name}


@pytest.mark.parametrize(
    "of_all, of_group, of_weights, told",
    [
        ({}, {}, {"strategy": "tensor"}, "not one symmetric scheme"),
        ({}, {}, {"symmetric": False}, "not one symmetric scheme"),  # with zero points
        ({}, {}, {"type": "float"}, "not one symmetric scheme"),
        ({}, {}, {"num_bits": 2}, "not one symmetric scheme"),
        ({"format": "nvfp4-pack-quantized"}, {}, {}, "not one symmetric scheme"),
        ({}, {}, {"strategy": "block", "block_structure": [8, 8]}, "not one symmetric scheme"),
        ({}, {"output_activations": {"num_bits": 8}}, {}, "config.output_activations"),
        ({"kv_cache_scheme": {"num_bits": 8}}, {}, {}, "config.kv_cache_scheme"),
        # rotated weights (QuIP, SpinQuant), which the reader has to turn back
        ({"transform_config": {"config_groups": {"u": {}}}}, {}, {}, "config.transform_config"),
    ],
)
def test_schemes_that_are_not_read(of_all, of_group, of_weights, told):
    said = scheme("int4", 32, ["lm_head"])
    assert bits_of({"quantization_config": said | {"transform_config": {}}}, "here") == 4
    group = said["config_groups"]["group_0"]
    group = group | of_group | {"weights": group["weights"] | of_weights}
    said = said | of_all | {"config_groups": {"group_0": group}}
    with pytest.raises(UserError, match=f"^here: quantization_.*{told}.*; start from the unq"):
        bits_of({"quantization_config": said}, "here")


@pytest.mark.parametrize(
    "changed, told",
    [
        ({"x.weight_scale": None}, "here: lacks x.weight_scale; download"),
        ({"x.weight_shape": None}, "here: lacks x.weight_shape; download"),
        ({"x.weight_scale": np.ones((6, 3), "f4")}, "parts of x.weight .* do not agree"),
        ({"x.weight_packed": np.ones((6, 3), "i4")}, "parts of x.weight .* do not agree"),
        ({"x.weight_shape": np.array([4, 32])}, "parts of x.weight .* do not agree"),
        ({"config_groups": ["W4A16"]}, "not one symmetric scheme"),
        ({"config_groups": {"group_0": "W4A16"}}, "not one symmetric scheme"),
    ],
)
def test_damaged_folders_are_one_sentence(changed, told):
    parts = {
        "x.weight_packed": np.ones((6, 4), "i4"), "x.weight_scale": np.ones((6, 2), "f4"),
        "x.weight_shape": np.array([6, 32]),
    }  # fmt: skip
    said = scheme("int4", 16, [])
    said |= {name: changed[name] for name in changed if name in said}
    whole = {n: part for n, part in (parts | changed).items() if part is not None and n not in said}
    with pytest.raises(UserError, match=told):
        tensors = PackedIntegers(whole, {"quantization_config": said}, "here/config.json")
        tensors.described("x.weight")


def test_what_was_read_packed_is_not_packed_again_under_other_names():
    """As DeepSeek-V3's and Qwen3-Next's are, whose layers of further tokens are left out."""
    parts = {
        "model.x.weight_packed": np.ones((6, 4), "i4"), "model.x.weight_shape": np.array([6, 32]),
        "model.x.weight_scale": np.ones((6, 2), "f4"), "mtp.y": np.ones(3, "f4"),
    }  # fmt: skip
    packed = PackedIntegers(parts, {"quantization_config": scheme("int4", 16, [])}, "here/config")
    text = TextTensors(packed, TextPart("D", {}, {"mtp.": "more"}), "here")
    assert set(text) == {"model.x.weight"}
    for tensors in (packed, text, FusedTensors(text, {}, "here")):
        with pytest.raises(UserError, match="int4: the integers of a packed folder are read as fl"):
            refuse_grid("int4", tensors)


@pytest.mark.parametrize("kind", ["mixtral", "olmoe"])
def test_gguf_files_hold_the_values(kind, tmp_path, record_property):
    gguf = pytest.importorskip("gguf")
    model, w, tensors = trained(kind, "q4_0")
    out = tmp_path / "m.gguf"
    write_gguf(model, tensors, lambda: w, None, out, dtype="q4_0")
    read = dict(walk(load_model(out).weights))
    for path, leaf in walk(w):
        if path not in ("embed", "head"):  # which are F16
            np.testing.assert_array_equal(read[path], leaf)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(out).tensors}
    assert kinds["blk.1.ffn_up_exps.weight"] == "Q4_0"
    assert kinds["blk.1.ffn_gate_inp.weight"] == "F32"
    llama_cpp.needed()
    ours, there = logits(model, w, IDS)[0], llama_cpp.logits(out, IDS[0])
    apart = np.abs(ours - there).max() / np.abs(ours).max()
    record_property("llama_cpp", float(apart))
    assert apart < 3e-2  # it rounds activations to 8 bits, in blocks of 32


def test_a_last_word_that_codes_do_not_fill():
    """By the layout: value + 8, the first in the low bits."""
    codes = np.array([[-8, 7, 3, 0, 1, -1, 2, 5, -7, 6]], np.int8)
    packed = pack_integers(codes, 4)
    nibbles = [int(word) >> 4 * n & 15 for word in packed.view("u4")[0] for n in range(8)]
    assert nibbles == [0, 15, 11, 8, 9, 7, 10, 13, 1, 14, *[0] * 6]
    np.testing.assert_array_equal(unpack_integers(packed, 4, 10), codes)
