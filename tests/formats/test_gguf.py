"""GGUF in and out: transformers, the gguf package and (where installed) llama.cpp agree; bad files
are refused with one sentence, and nothing is left behind."""

import json
import shutil
import struct
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from lmwright.core.param import map_params  # noqa: E402
from lmwright.data.tokens.gguf_header import write_tensor  # noqa: E402
from lmwright.errors import UserError  # noqa: E402
from lmwright.formats import reference  # noqa: E402
from lmwright.formats.convert import export_command, import_command  # noqa: E402
from lmwright.formats.gguf_names import metadata_of  # noqa: E402
from lmwright.formats.gguf_order import pairs  # noqa: E402
from lmwright.formats.gguf_read import open_gguf  # noqa: E402
from lmwright.formats.gguf_rope import llama3_factors, llama3_rope, rope_factors  # noqa: E402
from lmwright.formats.gguf_write import write_gguf  # noqa: E402
from lmwright.formats.hf_layout import HfTensors  # noqa: E402
from lmwright.formats.load import load_model  # noqa: E402
from lmwright.formats.proof import logits  # noqa: E402
from lmwright.models.llama import Llama  # noqa: E402
from lmwright.nn.rope import rotations  # noqa: E402
from tests.in_memory import to_hf  # noqa: E402

BASE = Llama(
    vocab_size=67, embed_dim=96, mlp_dim=160, num_layers=2, num_heads=6, num_kv_heads=2,
    head_dim=32, seq_len=40, rope_theta=5003.0, norm_eps=3e-5, head="untied",
)  # fmt: skip
FAMILIES = {
    "llama": replace(BASE, bias="attention"),
    "llama tied": replace(BASE, head="tied"),
    "qwen2": replace(BASE, bias="qkv", embed_dim=192),  # its head_dim is embed_dim / num_heads
    "qwen3": replace(BASE, qk_norm="head", head="tied"),
    "arcee": replace(BASE, mlp="relu2"),
}
BY_TRANSFORMERS = ("llama tied", "qwen2")


def weights_of(model, seed=0):
    rng = np.random.default_rng(seed)
    return map_params(lambda p: rng.standard_normal(p.shape).astype("f4") * 0.3, model.spec())


def write(model, w, out, dtype="fp32", tokenizer_dir=None, **options):
    tensors = HfTensors(model, w)
    return write_gguf(model, tensors, lambda: w, tokenizer_dir, out, dtype=dtype, **options)


@pytest.fixture
def without_transformers(monkeypatch):
    monkeypatch.setattr(reference.importlib.util, "find_spec", lambda name: None)


def test_rows_of_q_and_k_change_places():
    """[head, half, i] in Hugging Face's order is [head, i, half] in llama.cpp's."""
    rows = np.arange(2 * 6 * 3).reshape(12, 3)
    there = pairs(rows, 2, into=True)
    np.testing.assert_array_equal(there[:6, 0] // 3, [0, 3, 1, 4, 2, 5])
    np.testing.assert_array_equal(pairs(there, 2, into=False), rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_model(family, tmp_path):
    """Exact in float32, both ways; transformers reads the same logits from it."""
    pytest.importorskip("accelerate")
    model, out = FAMILIES[family], tmp_path / "model.gguf"
    w = weights_of(model)
    proof = write(model, w, out)
    back = load_model(out)
    assert replace(back.model, embed_std=model.embed_std) == model
    jax.tree.map(np.testing.assert_array_equal, back.weights, w)
    assert proof.source_to_folder.max_abs_diff == 0.0 and proof.accounting.left_out == ()
    if family in BY_TRANSFORMERS:
        assert proof.folder_to_transformers.greedy_agreement == 1.0, proof.transformers
        assert proof.folder_to_transformers.kl < 1e-6
    else:
        assert "drops" in proof.transformers or "cannot load" in proof.transformers
    assert json.loads((tmp_path / "model.gguf.convert.json").read_text())["dtype"] == "fp32"


@pytest.mark.parametrize("dtype, worst", [("fp16", 2e-2), ("bf16", 2e-1), ("q8_0", 0.5)])
def test_smaller_types(dtype, worst, tmp_path, without_transformers):
    """The file holds what the gguf package itself makes of the weights."""
    w = weights_of(BASE)
    proof = write(BASE, w, tmp_path / "m.gguf", dtype)
    assert 0 < proof.source_to_folder.max_abs_diff < worst
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    types = {t.name: t.tensor_type.name for t in reader.tensors}
    assert types["blk.1.ffn_down.weight"] == {"fp16": "F16", "bf16": "BF16"}.get(dtype, "Q8_0")
    assert types["output_norm.weight"] == "F32"
    down = next(t for t in reader.tensors if t.name == "blk.1.ffn_down.weight")
    kind = down.tensor_type
    expected = gguf.dequantize(gguf.quantize(w["layers"]["down"][1].T.copy(), kind), kind)
    np.testing.assert_array_equal(gguf.dequantize(down.data, kind), expected)
    field = reader.fields["general.file_type"].contents()
    assert gguf.LlamaFileType(field).name in ("MOSTLY_F16", "MOSTLY_BF16", "MOSTLY_Q8_0")


WIDE = Llama(
    vocab_size=13, embed_dim=256, mlp_dim=256, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=64, seq_len=16, head="untied",
)  # fmt: skip
QUANTS = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("kind", QUANTS)
def test_quantized_types_are_dequantized(kind, tmp_path, without_transformers):
    """Random blocks of each type, as the gguf package alone reads them."""
    tensors = to_hf(WIDE, weights_of(WIDE))
    kind = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(0)
    name, _, meta = metadata_of(WIDE.hf.config(WIDE), "test")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", name)
    for key, value in meta.items():
        {int: writer.add_uint32, float: writer.add_float32}[type(value)](f"llama.{key}", value)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    expected = {}
    for hf, array in tensors.items():
        there = table.get_name(hf, try_suffixes=(".weight",))
        if array.ndim == 1:
            writer.add_tensor(there, array)
            continue
        try:
            raw = gguf.quantize(array, kind)
        except NotImplementedError:  # the package reads the K types but does not make them
            block, size = gguf.GGML_QUANT_SIZES[kind]
            count = array.size // block
            raw = rng.integers(0, 255, (count, size), np.uint8)
            raw[:, -4:] = raw[:, :4] = raw[:, 80:84] = (0x12, 0x2C, 0x12, 0x2C)  # scales
            raw = raw.reshape(array.shape[0], -1)
        writer.add_tensor(there, raw, raw_dtype=kind)
        expected[hf] = gguf.dequantize(raw, kind)
    writer.write_header_to_file(), writer.write_kv_data_to_file()
    writer.write_tensors_to_file(), writer.close()
    _, _, found = open_gguf(tmp_path / "m.gguf")
    for hf, array in expected.items():
        read = np.asarray(found[hf], np.float32)
        if "q_proj" in hf or "k_proj" in hf:
            read = pairs(read, 4 if "q_proj" in hf else 2, into=True)
        np.testing.assert_array_equal(read, array, err_msg=hf)


def test_llama3_rope_is_found_again():
    """The factors of Llama 3.1 and 3.2, and of other numbers, by transformers' own formula."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    released = [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192)]
    # of a power of two, as any other length with borders in proportion is the same scaling
    for factor, low, high, original in [*released, (5.5, 1.0, 3.5, 512), (12.0, 1.25, 9.0, 16384)]:
        rope = {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low,
            "high_freq_factor": high, "original_max_position_embeddings": original,
        }  # fmt: skip
        config = transformers.LlamaConfig(
            hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=131072,
            rope_parameters=rope | {"rope_theta": 500000.0},
        )  # fmt: skip
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = 500000.0 ** -(np.arange(0, 64, 2) / 64)
        ours = llama3_factors(rope, 500000.0, 64)
        np.testing.assert_allclose(plain / ours, scaled.numpy(), rtol=1e-5)
        said = {"rope_theta": 500000.0, "head_dim": 64}
        llama3_rope(said, ours, "file")
        if (factor, low, high, original) in released:
            assert said["rope_scaling"] == rope
        np.testing.assert_allclose(
            llama3_factors(said["rope_scaling"], 500000.0, 64), ours, rtol=1e-5
        )
        assert said["rope_scaling"]["factor"] == factor
    with pytest.raises(UserError, match="not those of a llama3 rope scaling"):
        llama3_rope(said, ours * 1.01, "file")
    config = {"rope_theta": 500000.0, "head_dim": 64, "rope_parameters": rope}
    np.testing.assert_array_equal(rope_factors(config), ours)
    with pytest.raises(UserError, match=r"^model\.rope_scaling: too few pairs of a head"):
        rope_factors(config | {"head_dim": 6})  # of which no file can be read again


# Bad files, made from a small good one.


@pytest.fixture
def good(tmp_path, without_transformers):
    write(BASE, weights_of(BASE), tmp_path / "m.gguf")
    (tmp_path / "m.gguf.convert.json").unlink()
    return tmp_path / "m.gguf"


def rewritten(path, *, drop=(), change=None, more=(), **keys):
    """The file again by the gguf package, with tensors dropped, changed or added, and keys
    replaced."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), keys.pop("arch", "llama"))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = keys.pop(name, field.contents())
        kind = field.types[0]
        writer.add_key_value(name, value, kind, field.types[-1] if len(field.types) > 1 else None)
    for name, value in keys.items():
        add = {int: writer.add_uint16, float: writer.add_float32, str: writer.add_string}
        add[type(value)](name, value)
    for tensor in reader.tensors:
        if tensor.name not in drop:
            name, data = (change or (lambda n, d: (n, d)))(tensor.name, tensor.data)
            writer.add_tensor(name, data)
    for name in more:
        writer.add_tensor(name, np.ones((3, 3), "f4"))
    writer.write_header_to_file(), writer.write_kv_data_to_file()
    writer.write_tensors_to_file(), writer.close()
    shutil.move(path.with_suffix(".new"), path)


def cut(path, share):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def extra(name, data):
    return ("blk.0.attn_sinks.weight" if name == "output_norm.weight" else name), data


def narrower(name, data):
    return name, (data[:-1].copy() if name == "blk.0.ffn_up.weight" else data)


def integers(name, data):
    return name, (data.astype("i4") if name == "blk.1.attn_k.weight" else data)


def list_of(entries):
    """A header whose one list says how many entries it has, and holds two."""

    def spoil(path):
        head = struct.pack("<IIQQ", 0x46554747, 3, 0, 1) + struct.pack("<Q", 1) + b"a"
        path.write_bytes(head + struct.pack("<IIQ", 9, 4, entries) + b"\0" * 8)

    return spoil


BAD = {
    "list longer than the file": (list_of(2**22), "beyond its end"),
    "list longer than any": (list_of(2**50), "1,125,899,906,842,624 entries"),
    "empty": (lambda p: p.write_bytes(b""), "not a GGUF file"),
    "text": (lambda p: p.write_text("hello " * 99), "not a GGUF file"),
    "cut in the header": (lambda p: cut(p, 0.004), "truncated or damaged"),
    "cut in the tensors": (lambda p: cut(p, 0.6), "truncated or damaged|ends within"),
    "architecture": (lambda p: rewritten(p, arch="llama5"), r"'llama5' is not supported.*llama"),
    "missing": (
        lambda p: rewritten(p, drop=("blk.1.attn_norm.weight",)),
        r"lacks model\.layers\.1\.input_layernorm\.weight"),
    "renamed": (lambda p: rewritten(p, change=extra), r"lacks model\.norm\.weight"),
    "shape": (lambda p: rewritten(p, change=narrower), r"\[159, 96\]"),
    "integers": (lambda p: rewritten(p, change=integers), "is I32"),
    "a part": (lambda p: rewritten(p, **{"split.count": 3}), "one of 3 parts"),
    "rope scaling": (
        lambda p: rewritten(p, **{"llama.rope.scaling.type": "odd"}), "rope scaling 'odd'"),
    "unknown rope key": (
        lambda p: rewritten(p, **{"llama.rope.scaling.beta": 3}), r"rope\.scaling\.beta = 3"),
    "yarn's logarithm": (
        lambda p: rewritten(p, **{"llama.rope.scaling.yarn_log_multiplier": 0.1}),
        r"rope\.scaling\.yarn_log_multiplier = 0\.1"),
    "partial rotation": (
        lambda p: rewritten(p, **{"llama.rope.dimension_count": 16}), "dimension_count = 16"),
    "attn_factor alone": (
        lambda p: rewritten(p, **{"llama.rope.scaling.attn_factor": 1.5}), "attn_factor = 1.5"),
}  # fmt: skip


def ggml_rotations(size, base, scale, *, context, ext=0.0, fast=32.0, slow=1.0, attn=1.0):
    """Radians a token and length of q and k: ggml_rope_yarn of llama.cpp."""

    def corrected(turns):
        return size * np.log(context / (turns * 2 * np.pi)) / (2 * np.log(base))

    start, end = np.floor(corrected(fast)), np.ceil(corrected(slow))
    i = np.arange(size // 2)
    plain = base ** (-2.0 * i / size)
    ramp = 1 - np.clip((i - max(start, 0)) / max(0.001, min(end, size - 1) - max(start, 0)), 0, 1)
    mix = ramp * ext
    length = attn * (1 + 0.1 * np.log(1 / scale)) if ext else attn
    return scale * plain * (1 - mix) + plain * mix, length


ROPES = {
    "the key of 2023": ({"rope.scale_linear": 4.0}, dict(scale=1 / 4)),
    "a factor without a type": ({"rope.scaling.factor": 2.5}, dict(scale=1 / 2.5)),
    "none beside a factor": ({"rope.scaling.type": "none", "rope.scaling.factor": 2.5},
                             dict(scale=1.0)),
    "a factor of 0": ({"rope.scaling.factor": 0.0}, dict(scale=1.0)),
    "yarn": ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
              "rope.scaling.original_context_length": 16, "rope.scaling.finetuned": 1},
             dict(scale=1 / 4, ext=1.0, context=16)),
    "yarn with all keys": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5,
         "rope.scaling.yarn_beta_fast": 3.0, "rope.scaling.yarn_beta_slow": 0.5,
         "rope.scaling.yarn_ext_factor": 1.0},
        dict(scale=1 / 4, ext=1.0, fast=3.0, slow=0.5, attn=0.5)),
}  # fmt: skip


@pytest.mark.parametrize("case", ROPES)
def test_rotations_are_those_of_llama_cpp(case, good):
    keys, said = ROPES[case]
    rewritten(good, **{f"llama.{name}": value for name, value in keys.items()})
    model = load_model(good).model
    wanted, length = ggml_rotations(32, BASE.rope_theta, **{"context": BASE.seq_len, **said})
    found, scale = rotations(32, model.rope_theta, model.rope_scaling, BASE.seq_len)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert scale == pytest.approx(length, rel=1e-6)


@pytest.mark.parametrize("case", BAD)
def test_bad_file_is_one_clear_error(case, good, tmp_path):
    spoil, says = BAD[case]
    spoil(good)
    with pytest.raises(UserError, match=says) as caught:
        import_command(good, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_without_the_package(good, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install .*\[gguf\]"):
        load_model(good)


def test_nothing_is_overwritten_or_left(good, tmp_path):
    before = good.read_bytes()
    with pytest.raises(UserError, match="--overwrite"):
        export_command(good, good)
    with pytest.raises(UserError, match="one file"):
        export_command(good, tmp_path / "x.gguf", max_shard_bytes=1000)
    with pytest.raises(UserError, match="too large for float16"):
        w = weights_of(BASE)
        w["layers"]["up"][1, 2, 3] = 1e30
        write(BASE, w, tmp_path / "x.gguf", "fp16")
    with pytest.raises(UserError, match="gelu_pytorch_tanh"):
        write(replace(BASE, mlp="geglu"), weights_of(BASE), tmp_path / "x.gguf")
    assert good.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_llama_cpp_gives_the_same_text(shared_data, tmp_path, without_transformers):
    """Loaded by llama.cpp itself: greedy text and ids."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    stories = shared_data / "models" / "stories260k"
    export_command(stories, tmp_path / "s.gguf", dtype="fp32")
    theirs = llama_cpp.Llama(str(tmp_path / "s.gguf"), n_ctx=512, verbose=False)
    text = "Lily's d\u00e9j\u00e0 vu, 1234 times"
    ours = load_model(stories).tokenizer.encode(text)
    assert theirs.tokenize(text.encode(), add_bos=True)[1:] == ours
    out = theirs([1], max_tokens=150, temperature=0.0, repeat_penalty=1.0)
    expected = (stories / "expected_greedy.txt").read_text().strip()
    assert expected.startswith(out["choices"][0]["text"].strip())


def test_logits_of_a_quantized_file_are_those_of_its_values(tmp_path, without_transformers):
    """Q8_0 through lmwright equals the gguf package's values put into the source."""
    w = weights_of(BASE)
    write(BASE, w, tmp_path / "m.gguf", "q8_0")
    kind = gguf.GGMLQuantizationType.Q8_0
    rounded = {
        name: gguf.dequantize(gguf.quantize(a, kind), kind) if a.ndim == 2 else a
        for name, a in to_hf(BASE, w).items()
    }
    from lmwright.formats.hf_stream import from_hf

    ids = np.arange(30, dtype=np.int32).reshape(2, 15)
    ours = logits(BASE, load_model(tmp_path / "m.gguf").weights, ids)
    np.testing.assert_allclose(ours, logits(BASE, from_hf(BASE, rounded), ids), atol=1e-4)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, ml_dtypes.bfloat16])
def test_a_full_disk_is_told_of_small_tensors_too(dtype, tmp_path):
    """numpy's own way loses them without an error."""
    tensor = np.arange(6).reshape(2, 3).astype(dtype)
    for place, full in ((Path("/dev/full"), True), (tmp_path / "whole", False)):
        file = place.open("wb", buffering=0)
        writer = SimpleNamespace(write_tensor_data=lambda each, file=file: each.tofile(file))
        with file, pytest.raises(OSError, match="No space left") if full else nullcontext():
            write_tensor(writer, tensor)
    assert (tmp_path / "whole").read_bytes() == tensor.tobytes()
