"""Files of a BitNet: trained floats, packed values and GGUF hold one model, as transformers, the
gguf package and llama.cpp read them."""

import json
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.param import init_weights, walk
from lmwright.core.rounding import ternary
from lmwright.errors import UserError
from lmwright.formats import proof
from lmwright.formats.encoding import encoding_of
from lmwright.formats.gguf_write import write_gguf
from lmwright.formats.hf_layout import HfTensors
from lmwright.formats.hf_write import write_hf
from lmwright.formats.load import load_model
from lmwright.formats.proof import agreement, logits
from lmwright.formats.reference import Reference
from lmwright.formats.ternary import codes_of, floats_of, pack, unpack
from lmwright.models.bitnet import BitNet
from lmwright.models.llama import Llama
from tests.formats import llama_cpp

SIZES = {
    "vocab_size": 97, "embed_dim": 256, "mlp_dim": 512, "num_layers": 2, "num_heads": 8,
    "num_kv_heads": 4, "head_dim": 32, "seq_len": 64,
}  # fmt: skip
IDS = np.random.default_rng(1).integers(0, 97, (16, 2)).astype(np.int32)


def model_of(mlp):
    """(model, random weights whose norms do something)."""
    model, rng = BitNet(**SIZES, mlp=mlp), np.random.default_rng(0)
    w = init_weights(model.spec(), jax.random.key(0))
    stir = lambda a: a + 0.1 * rng.standard_normal(a.shape).astype("f4") * (a == 1)  # noqa: E731
    return model, jax.tree.map(lambda a: np.asarray(stir(a)), w)


def written(model, w, out, dtype):
    write = write_gguf if out.suffix == ".gguf" else write_hf
    return write(model, HfTensors(model, w), lambda: w, None, out, dtype=dtype)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Function to folders of the 2B model's kind: in floats, packed, in bf16, and packed from
    these; its model and weights."""
    root, (model, w) = tmp_path_factory.mktemp("bitnet"), model_of("relu2glu")

    @cache
    def folder(dtype):
        with pytest.MonkeyPatch.context() as patch:  # transformers is asked below, once
            patch.setattr(proof, "transformers_says", lambda *_: Reference(None, "not asked"))
            written(model, w, root / dtype, dtype)
        return root / dtype

    return folder, model, w


def test_packing_is_that_of_transformers():
    torch = pytest.importorskip("torch", reason="torch is the reference")
    from transformers.integrations.bitnet import pack_weights, unpack_weights

    codes = np.random.default_rng(0).integers(-1, 2, (12, 7)).astype(np.int8)
    packed = pack(codes)
    np.testing.assert_array_equal(packed, pack_weights(torch.tensor(codes, dtype=torch.float)))
    with torch.compiler.set_stance("force_eager"):
        np.testing.assert_array_equal(unpack_weights(torch.tensor(packed), torch.int8), codes)
    np.testing.assert_array_equal(unpack(packed), codes)


@pytest.mark.parametrize("zeros", [0.0, 0.31, 0.97, 1.0])
def test_floats_are_rounded_to_the_codes_that_they_come_from(zeros):
    rng = np.random.default_rng(0)
    shape = (3000, 480)
    codes = np.where(rng.random(shape) < zeros, 0, rng.choice([-1, 1], shape))
    again, scale = codes_of(floats_of(codes.astype(np.int8), np.float32([0.037])))
    np.testing.assert_array_equal(again, codes)
    if codes.any():
        np.testing.assert_allclose(scale, 0.037, rtol=1e-6)


def transformers_logits(folder):
    torch = pytest.importorskip("torch", reason="torch is the reference")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return torch.nn.Module.float(theirs.eval())(
            torch.tensor(IDS, dtype=torch.long)
        ).logits.numpy()


def near(a, b, share=1e-5):
    found = agreement(a, b)
    assert found.max_abs_diff < share * found.max_abs_logit, found


def near_but_for_codes(a, b):
    """Most rows of logits of two forms or programs agree to 1e-5 of the largest, and all to 2 %: an
    activation between two of its 8-bit codes takes one or the other, as the last bit of a sum
    falls."""
    apart = np.abs(a - b).max((1, 2)) / np.abs(a).max()
    assert np.mean(apart < 1e-5) >= 0.6 and apart.max() < 2e-2, apart


@pytest.mark.parametrize("floats, packed", [("fp32", "ternary"), ("bf16", "ternary-bf16")])
def test_the_forms_of_a_folder_agree(folders, floats, packed, record_property):
    """Here and in transformers, which reads one by rounding and the other by unpacking."""
    folder, model, w = folders
    loaded = [load_model(folder(name)) for name in (floats, packed)]
    ours = [logits(each.model, each.load(dtype=jnp.float32), IDS) for each in loaded]
    assert loaded[0].model == loaded[1].model == model
    near_but_for_codes(*ours)
    theirs = [transformers_logits(folder(name)) for name in (floats, packed)]
    near_but_for_codes(*theirs)
    near_but_for_codes(ours[0], theirs[0])
    record_property("forms", float(agreement(*theirs).max_abs_diff / np.abs(theirs[0]).max()))
    if floats == "bf16":  # a rounded master is another model than the floats it comes from
        assert agreement(ours[0], logits(model, w, IDS)).max_abs_diff > 1e-4


def test_packed_bytes(folders):
    folder, model, _ = folders
    packed = folder("ternary")
    said = json.loads((packed / "config.json").read_text())["quantization_config"]
    assert said["quantization_mode"] == "offline" and said["linear_class"] == "autobitlinear"
    sizes = dict(encoding_of("ternary", model, load_model(packed).tensors).sizes(model))
    assert sizes["model.layers.0.mlp.up_proj.weight"] == 256 * 512 / 4


@pytest.mark.parametrize("dtype", ["fp32", "tq1_0", "tq2_0"])
def test_gguf_is_what_llama_cpp_computes(dtype, tmp_path, monkeypatch, record_property):
    """llama.cpp rounds activations in blocks with ternary weights, and not at all with floats."""
    gguf = pytest.importorskip("gguf")
    monkeypatch.setattr(proof, "transformers_says", lambda *_: Reference(None, "not asked"))
    model, w = model_of("swiglu")
    out = tmp_path / "m.gguf"
    written(model, w, out, dtype)
    back = load_model(out)
    assert back.model == model
    if dtype != "fp32":
        w |= {"embed": w["embed"].astype("f2").astype("f4")}  # as it is in the file
    near(logits(model, w, IDS), logits(back.model, back.weights, IDS), 1e-2)
    by_name = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    read = by_name["blk.1.ffn_up.weight"]
    codes, scale = (np.asarray(a) for a in ternary(w["layers"]["up"][1].T, 2))
    values = gguf.dequantize(read.data, read.tensor_type)
    if dtype == "fp32":
        np.testing.assert_allclose(values, codes * scale, rtol=1e-6)
    else:
        np.testing.assert_array_equal(values, codes)
        np.testing.assert_allclose(by_name["blk.1.ffn_up.scale"].data, scale[0], rtol=1e-6)
    llama_cpp.needed()
    there = np.stack([llama_cpp.logits(out, row) for row in IDS[:4]])
    if dtype == "fp32":
        ours = without_rounded_activations(model, w)[:4]
    else:
        ours = logits(model, w, IDS[:4])
    found = agreement(ours, there)
    record_property("llama_cpp", float(found.max_abs_diff / found.max_abs_logit))
    assert found.max_abs_diff < (1e-5 if dtype == "fp32" else 5e-2) * found.max_abs_logit


def without_rounded_activations(model, w):
    """Logits of ternary weights that meet activations as they are."""
    from lmwright.core import ternary as products

    def codes(x, axes):
        return x, jnp.ones((1,) * x.ndim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "int8_tokens", codes)
        jax.clear_caches()
        found = logits(model, w, IDS)
    jax.clear_caches()
    return found


REFUSED = [
    ("relu2glu", "m.gguf", "tq2_0", "--dtype ternary"),
    ("swiglu", "m.gguf", "q8_0", "use tq2_0"),
]


@pytest.mark.parametrize("mlp, name, dtype, cure", REFUSED)
def test_what_would_be_read_as_another_model_is_refused(mlp, name, dtype, cure, tmp_path):
    pytest.importorskip("gguf")
    model, w = model_of(mlp)
    with pytest.raises(UserError, match=cure):
        written(model, w, tmp_path / name, dtype)
    assert list(tmp_path.iterdir()) == []


def test_ternary_types_are_for_ternary_weights(tmp_path):
    """Rows that they do not take are whole in fp32; fp16 rounds the scales."""
    gguf = pytest.importorskip("gguf")
    model = Llama(**SIZES)
    w = init_weights(model.spec(), jax.random.key(0))
    for name, dtype in (("m.gguf", "tq1_0"), ("m", "ternary")):
        with pytest.raises(UserError, match="has none"):
            written(model, w, tmp_path / name, dtype)
    odd = BitNet(**SIZES | {"mlp_dim": 384}, mlp="swiglu")
    w = init_weights(odd.spec(), jax.random.key(0))
    with pytest.raises(UserError, match=r"multiple of 256.*use fp32, which holds the same values"):
        written(odd, w, tmp_path / "m.gguf", "tq2_0")
    written(odd, w, tmp_path / "m.gguf", "fp16")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    read = tensors["blk.1.ffn_down.weight"]
    codes, scale = (np.asarray(a) for a in ternary(w["layers"]["down"][1].T, 2))
    found = gguf.dequantize(read.data, read.tensor_type)[codes != 0]
    assert 1e-6 < np.abs(found / (codes * scale)[codes != 0] - 1).max() < 2**-11


def test_a_folder_that_its_class_computes_otherwise_is_refused(folders, tmp_path):
    folder, *_ = folders
    for change, word in (
        (None, "computes with floats"),
        ({"linear_class": "bitlinear"}, "divides by the scale"),
        ({"use_rms_norm": True}, "norm before every projection"),
        ({"modules_to_not_convert": ["q_proj"]}, "leaves projections"),
    ):
        config = json.loads((folder("fp32") / "config.json").read_text())
        said = config.pop("quantization_config")
        if change is not None:
            config["quantization_config"] = said | change
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=word):
            load_model(tmp_path)


def test_weights_in_bf16_keep_their_codes(folders):
    """Evaluation and generation in bf16 compute the ternary model that was trained, out of a folder
    and out of a run alike."""
    folder, model, w = folders
    of_folder = load_model(folder("fp32"))
    of_run = replace(of_folder, tensors=HfTensors(model, w))
    params, whole, flips = dict(walk(model.spec())), dict(walk(w)), 0
    for found in (of_folder.load(dtype=jnp.bfloat16), of_run.load(dtype=jnp.bfloat16)):
        for path, leaf in walk(found):
            assert leaf.dtype == jnp.bfloat16
            if not params[path].ternary:
                np.testing.assert_array_equal(leaf, whole[path].astype(jnp.bfloat16))
                continue
            dims = len(params[path].inputs) + len(params[path].outputs)
            codes, scale = ternary(whole[path], dims)
            again, near = ternary(leaf, dims)
            np.testing.assert_array_equal(again, codes)
            np.testing.assert_allclose(near, scale, rtol=2**-8)
            flips += np.sum(ternary(whole[path].astype(jnp.bfloat16), dims)[0] != codes)
    assert flips > 0
