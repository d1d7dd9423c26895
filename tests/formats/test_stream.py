"""Streaming import: sharded as it is read, in the dtype that is stored, little memory."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lmwright.core.param import map_params, walk
from lmwright.core.sharding import AXES, make_mesh, weight_shardings
from lmwright.formats import hf_stream
from lmwright.formats.hf_layout import slots
from lmwright.formats.hf_stream import from_hf
from lmwright.formats.load import load_model
from lmwright.formats.proof import logits
from lmwright.formats.safetensors import plan_shards, write_shards
from lmwright.formats.transposed import transposed
from lmwright.models.llama import Llama
from tests.in_memory import to_hf

MODEL = Llama(
    vocab_size=44, embed_dim=24, mlp_dim=40, num_layers=6, num_heads=4, num_kv_heads=2,
    head_dim=8, seq_len=16, head="untied", bias="all", rope_theta=777.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def tensors():
    rng = np.random.default_rng(3)
    w = map_params(lambda p: rng.standard_normal(p.shape).astype("f4"), MODEL.spec())
    return to_hf(MODEL, w)


@pytest.mark.parametrize("shape", [(1, 3), (130, 7), (64, 64)])
@pytest.mark.parametrize("dtype", ["f4", ml_dtypes.bfloat16, "f8"])
def test_transposed(shape, dtype):
    array = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    out = transposed(array)
    assert out.flags.c_contiguous and out.dtype == array.dtype
    np.testing.assert_array_equal(out, array.T)


@pytest.mark.parametrize("small", [0, hf_stream.SMALL])
@pytest.mark.parametrize(
    "axes", [{"fsdp": 4, "tensor": 2}, {"stage": 2, "fsdp": 2, "tensor": 2}], ids=str
)
def test_sharded_as_it_is_read(tensors, axes, small, monkeypatch):
    """Each leaf, a large or a small one, has the sharding asked for and the values of a load on
    one device, which are those given."""
    monkeypatch.setattr(hf_stream, "SMALL", small)
    mesh = make_mesh({axis: axes.get(axis, 1) for axis in AXES}, jax.devices())
    shardings = weight_shardings(MODEL.spec(), mesh)
    alone, spread = from_hf(MODEL, tensors), from_hf(MODEL, tensors, shardings=shardings)
    for name, tensor in to_hf(MODEL, alone).items():
        np.testing.assert_array_equal(tensor, tensors[name], err_msg=name)
    for (path, a), (_, b) in zip(walk(alone), walk(spread), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=path)
    for (path, leaf), (_, wanted) in zip(walk(spread), walk(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), path
        size = wanted.shard_shape(leaf.shape)
        assert {s.data.shape for s in leaf.addressable_shards} == {size}
    assert len(spread["layers"]["q"].sharding.device_set) == 8


@pytest.mark.parametrize("small", [0, hf_stream.SMALL])
@pytest.mark.parametrize("fsdp", [None, 1, 4])
def test_leaves_are_no_views_of_what_is_given(tensors, fsdp, small, monkeypatch):
    monkeypatch.setattr(hf_stream, "SMALL", small)
    given, shardings = {name: array.copy() for name, array in tensors.items()}, None
    if fsdp is not None:
        shape = dict.fromkeys(AXES, 1) | {"fsdp": fsdp}
        shardings = weight_shardings(MODEL.spec(), make_mesh(shape, jax.devices()[:fsdp]))
    w = from_hf(MODEL, given, shardings=shardings)
    for array in given.values():
        array[:] = 7.0
    for name, tensor in to_hf(MODEL, w).items():
        np.testing.assert_array_equal(tensor, tensors[name], err_msg=name)


def test_stored_dtype_is_kept_unless_another_is_asked_for(tensors):
    """bf16 matrices stay bf16, norms in float32 stay float32, and the logits are those of the
    same values in float32."""
    mixed = {
        name: array if "norm" in name else array.astype(ml_dtypes.bfloat16)
        for name, array in tensors.items()
    } | {"model.norm.weight": tensors["model.norm.weight"].astype("f8")}
    kept = from_hf(MODEL, mixed)
    kinds = {path: leaf.dtype for path, leaf in walk(kept)}
    assert kinds["layers.q"] == kinds["embed"] == kinds["layers.up_bias"] == jnp.bfloat16
    assert kinds["layers.mlp_norm"] == kinds["norm"] == jnp.float32
    asked = from_hf(MODEL, mixed, dtype=jnp.float32)
    assert {leaf.dtype for _, leaf in walk(asked)} == {jnp.dtype("f4")}
    ids = np.arange(22, dtype=np.int32).reshape(2, 11) * 2
    np.testing.assert_array_equal(logits(MODEL, kept, ids), logits(MODEL, asked, ids))
    halves = from_hf(MODEL, tensors, dtype=jnp.float16)
    np.testing.assert_array_equal(
        np.asarray(halves["layers"]["down"][4]),
        tensors["model.layers.4.mlp.down_proj.weight"].T.astype("f2"),
    )


WIDE = Llama(
    vocab_size=32000, embed_dim=4096, mlp_dim=11008, num_layers=4, num_heads=32, num_kv_heads=32,
    head_dim=128, seq_len=4096, head="untied",
)  # fmt: skip

CHILD = """
import json, sys
import jax, jax.numpy as jnp
from lmwright.formats.load import load_model
from lmwright.core.weight import nbytes
jnp.zeros(8).block_until_ready()
def peak():  # of this process alone; getrusage's may be its parent's
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
before = peak()
w = load_model(sys.argv[1]).load(dtype=sys.argv[2] if len(sys.argv) > 2 else None)
print(json.dumps({"grown": peak() - before, "share": nbytes(w)}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_memory_stays_under_the_share_and_twice_the_largest_tensor(tmp_path, dtype):
    """Llama 2 7B with its own widths and vocabulary but 4 of its 32 layers, random bfloat16,
    two shards; peak resident memory of a process of its own."""
    rng = np.random.default_rng(0)

    def stream():
        for slot in slots(WIDE):
            bits = rng.integers(0, 1 << 13, slot.shape, np.uint16) + (60 << 7)
            yield slot.name, bits.view(ml_dtypes.bfloat16)

    sizes = [(slot.name, 2 * slot.size) for slot in slots(WIDE)]
    total = sum(size for _, size in sizes)
    write_shards(tmp_path, stream(), plan_shards(sizes, 1_200_000_000), total)
    (tmp_path / "config.json").write_text(json.dumps(WIDE.hf.config(WIDE)))
    command = [sys.executable, "-c", CHILD, str(tmp_path), *([dtype] if dtype else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    largest = max(size for _, size in sizes) * (2 if dtype else 1)
    print(f"\n{dtype or 'as stored'}: {found}, largest tensor {largest}")
    assert found["share"] == total * (2 if dtype else 1)
    assert found["grown"] < found["share"] + 2 * largest


def test_an_opened_model_reads_nothing_until_asked(tmp_path, tensors, monkeypatch):
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(MODEL.hf.config(MODEL)))
    from lmwright.formats.safetensors import TensorFiles

    read, get = [], TensorFiles.__getitem__
    monkeypatch.setattr(
        TensorFiles, "__getitem__", lambda self, name: read.append(name) or get(self, name)
    )
    loaded = load_model(tmp_path)
    assert read == [] and len(loaded.tensors) == len(tensors)
    assert loaded.weights is loaded.weights
    assert sorted(read) == sorted(tensors)  # each once
