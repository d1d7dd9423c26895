"""Each kind of training compiled by XLA's compiler for CUDA: its step fits, with the kernels that
it should have, and holds neither all scores of a row nor a wide copy of a frozen base."""

import re
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest

from lmwright.formats.open import load_run
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.compiler import compile as aot
from lmwright.planner.compiler.gpu import has_cuda_compiler
from tests.golden.curves import toml

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_cuda_compiler(), reason="needs JAX's plugin for CUDA (cuda13)"),
]
LENGTH = 1024  # tokens of a row, and no two other sizes side by side
SIZES = dict(vocab_size=2048, embed_dim=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64,
             seq_len=LENGTH)  # fmt: skip
DENSE = SIZES | dict(mlp_dim=384)
LLAMA = dict(kind="llama", **DENSE)
ENCODER = dict(model=dict(kind="eurobert", **DENSE), masked=True)
EXPERTS = dict(num_experts=8, experts_per_token=2, mlp_dim=128, balance_loss=0.01)
MANY = [dict(name="a", rank=4, rows=2), dict(name="b", rank=8, rows=6)]
# weights are most of the memory: 2 layers of 47 M, few tokens
LARGE = dict(model=LLAMA | dict(embed_dim=2048, mlp_dim=6144, num_heads=16, num_kv_heads=2,
             head_dim=128), batch=1, length=256)  # fmt: skip
SCORES = re.compile(rf"\[(\d+,)*{LENGTH},{LENGTH}\]")

FORWARD, BACKWARD = {"_out_kernel": 2}, {"_dq_kernel": 2, "_dkv_kernel": 2}  # of two layers
ATTENTION = FORWARD | BACKWARD

CASES = {
    "full": (dict(), ATTENTION),
    "lora": (dict(lora=dict(rank=8)), ATTENTION),
    "several adapters": (dict(lora=dict(adapters=MANY)), ATTENTION),
    "several adapters over int8": (dict(lora=dict(base="int8", adapters=MANY)), ATTENTION),
    "int8 base": (LARGE | dict(lora=dict(rank=8, base="int8")), ATTENTION),
    "int4 base": (LARGE | dict(lora=dict(rank=8, base="int4")), ATTENTION),
    # up, gate, down: forward and to the rows; and their gradients
    "experts": (
        dict(model=dict(kind="qwen3-moe", **DENSE, experts=EXPERTS)),
        ATTENTION | {"_product_kernel": 12, "_gradient_kernel": 6},
    ),
    "sft": (dict(objective=dict(kind="sft"), rows="prompt"), ATTENTION),
    "dpo": (dict(objective=dict(kind="dpo"), rows="preference", lora=dict(rank=8)),
            {"_out_kernel": 4} | BACKWARD),
    "mlm": (ENCODER | dict(objective=dict(kind="mlm")), ATTENTION),
    "diffusion": (dict(model=dict(kind="llada", **DENSE), masked=True,
                       objective=dict(kind="diffusion")), ATTENTION),
    "diffusion by blocks": (
        dict(model=dict(kind="llada", **DENSE), masked=True,
             objective=dict(kind="diffusion", block_tokens=32)),
        # a masked row's own blocks, the clean row's before them, and the clean row
        {"_out_kernel": 6, "_dq_kernel": 6, "_dkv_kernel": 6},
    ),
    "distill": (dict(objective=dict(kind="distill", teacher="teacher", teacher_model=LLAMA)),
                {"_out_kernel": 4} | BACKWARD),
    "bitnet": (dict(model=dict(kind="bitnet", **DENSE)), ATTENTION),
    "qat": (dict(qat=dict(weights="int4")), ATTENTION),
    "xlstm": (dict(model=dict(kind="xlstm", key_dim=32, chunk_tokens=64,
                              **{k: v for k, v in DENSE.items() if k != "num_kv_heads"})), {}),
}  # fmt: skip


def run_of(folder, case):
    """The run of a case, of two layers without rematerialization."""
    tokenizer = dict(vocab_size=2048)
    if case.get("masked"):
        tokenizer["special_tokens"] = ["<|endoftext|>", "<|mask|>"]
    sections = dict(
        name="kind", dir="run",
        model=case.get("model", LLAMA),
        objective=case.get("objective", dict(kind="clm")),
        optim=dict(kind="adamw", learning_rate=1e-3),
        data=dict(dir="data", sources=[dict(path="text", rows=case.get("rows", "text"))],
                  tokenizer=tokenizer,
                  pack=dict(method="best-fit", seq_len=case.get("length", LENGTH))),
        train=dict(steps=100, global_batch_size=case.get("batch", 8), remat="none"),
        **{name: case[name] for name in ("lora", "qat") if name in case},
    )  # fmt: skip
    path = folder / "run.toml"
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in sections.items()))
    return load_run(path)


def kernels_in(hlo):
    """Number of calls of each kernel of ours, and of tokamax's."""
    ours = re.findall(r'xla\.gpu\.triton".* name = "(_\w+_kernel)"', hlo)
    return Counter(ours + re.findall(r'custom_call_target="(mosaic_gpu\w*)"', hlo))


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_each_kind_compiles(name, tmp_path):
    case, kernels = CASES[name]
    found = aot.compile_for(run_of(tmp_path, case), parse_machine("gpu:h100x1"))
    assert found.fits
    if name.endswith("base") and find_spec("tokamax"):  # which computes Hopper's heads of 128
        kernels = {"mosaic_gpu_v2": sum(kernels.values())}
    assert kernels_in(found.hlo) == kernels
    assert not SCORES.search(found.hlo), "scores of all pairs of tokens"
    if name == "full":  # each weight and its moments are updated by one kernel, in place
        assert not re.search(r"= f32\S* copy\(%state__", found.hlo)
    if name == "experts":
        assert " while(" not in found.hlo
    if base := case.get("lora", {}).get("base"):
        assert f" {'s4' if base == 'int4' else 's8'}[" in found.hlo
    if "length" in case:  # no copy of both layers in bf16 beside the base
        assert found.temp_bytes < found.num_params


def test_a_step_repeats_its_bits_with_the_options_of_the_manual(tmp_path):
    """The gradient of the embedding, the one sum whose order would be free, is of sorted rows."""
    run = run_of(tmp_path, CASES["full"][0])
    options = {"xla_gpu_exclude_nondeterministic_ops": "True"}
    run = replace(run, train=replace(run.train, compiler_options=options))
    hlo = aot.compile_for(run, parse_machine("gpu:h100x1")).hlo
    scatters = re.findall(r" scatter\(.*", hlo)
    assert scatters and all("unique_indices=true" in line for line in scatters)
    shape = dict(embed_dim=576, mlp_dim=1536, num_heads=9, num_kv_heads=3, seq_len=2048)
    run = run_of(tmp_path, dict(model=LLAMA | shape, length=2048))  # whose products are Triton's
    pack = replace(run.data.pack, attention="row")
    run = replace(run, data=replace(run.data, pack=pack))
    run = replace(run, train=replace(run.train, compiler_options=options))
    assert "__cudnn$fmha" not in aot.compile_for(run, parse_machine("gpu:h100x1")).hlo
