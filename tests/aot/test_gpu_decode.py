"""Programs of `generate` and `eval` compiled by XLA's compiler for CUDA: many tokens a call, a
cache that is written in place, and no copies of weights."""

import re

import jax
import pytest

from lmwright.planner.compiler import gpu
from tests.aot.slices import with_compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not gpu.has_cuda_compiler(), reason="needs JAX's plugin for CUDA (cuda13)"),
]
by_mesh = pytest.mark.skipif(
    jax.__version_info__ >= (0, 12),
    reason="this JAX lowers Triton for a card that is there or that the mesh names",
)
# keys or values of a layer, of the 4 rows of gpu_decode, however its axes are turned
CACHE = r"bf16\[(?:4,2048,2,64|4,2,2048,64|4,2,64,2048)\]"


def program(name, monkeypatch):
    for key, value in gpu.ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    return with_compiler("-m", "tests.aot.gpu_decode", name)


def test_the_host_is_asked_once_in_many_tokens(monkeypatch):
    hlo = program("decode", monkeypatch)
    loop = re.search(r'while\(.*body=%([\w.\-]+).*known_trip_count":\{"n":"(\d+)"', hlo)
    assert loop and loop[2] == "16"
    body = re.search(rf"\n%{re.escape(loop[1])} .*?\n}}", hlo, re.S)[0]
    made = re.findall(rf"%([\w.\-]+) = \(?{CACHE}\S* (\w+)\(", body)
    written = [name for name, op in made if op not in ("get-tuple-element", "bitcast", "parameter")]
    # keys and values of two layers, each by one write in place
    assert len(written) == 4 and all("dynamic_update_slice" in name for name in written)
    assert not re.search(r"f32\[4,2,2048,64\]|f32\[4,2048,2,64\]", body), "a wide copy of the cache"
    weight = r"bf16\[(?:512,1408|1408,512|512,8,64|8,64,512|4096,512)\]"
    copied = re.findall(rf"= {weight}\S* (?:copy|fusion)\(", body)
    assert not copied


@by_mesh
def test_prompts_are_read_by_the_kernels(monkeypatch):
    hlo = program("prefill", monkeypatch)
    assert len(re.findall(r'name = "_out_kernel"', hlo)) == 2
    assert not re.search(r"\[(\d+,)*1024,1024\]", hlo)


@by_mesh
def test_rows_are_measured_by_the_kernels(monkeypatch):
    hlo = program("eval", monkeypatch)
    assert len(re.findall(r'name = "_out_kernel"', hlo)) == 1  # of scanned layers
    assert not re.search(r"\[(\d+,)*1024,1024\]", hlo)
